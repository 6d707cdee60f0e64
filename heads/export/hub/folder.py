"""Write a model folder that is served with heads: weights, tokenizer, heads/, custom_generate/generate.py, model card.

    out/config.json, *.safetensors, tokenizer…    the backbone's files, or those that were trained with the heads
    out/heads/                                    heads.json, heads.safetensors, tree.json
    out/custom_generate/generate.py               what trust_remote_code=True puts in place of generate
    out/README.md                                 the model card

`transformers serve out --trust-remote-code` decodes with the heads, and so does `model.generate` of a model that was
opened with trust_remote_code; without it, the folder is the plain model. It appears whole or not at all, after it was
loaded back and checked.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub.utils import tqdm
from transformers import AutoConfig

from heads.backbone.loading import BackboneConfig, explained, load_tokenizer
from heads.checkpoint.backbone import sync
from heads.checkpoint.convert import merge
from heads.checkpoint.opening import find_backbone, find_trained, recorded_backbone
from heads.checkpoint.remote import FILES, NESTED, backbone_around, download, find_heads
from heads.checkpoint.save_load import load
from heads.checkpoint.schema import HeadsDescription, read_description
from heads.decoding.tree_decoding import TreeDecoding
from heads.export.drafted_logits import largest_difference
from heads.export.hub import template
from heads.export.hub.card import CARD, write_card
from heads.export.replacing import check_place
from heads.inside import find_inside, remove
from heads.quantization.quantizer import METHOD

logger = logging.getLogger(__name__)

COPIED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*")
"""Files of a backbone that are copied: weights, configs, tokenizer and licence, no code and no pickles."""
NOT_COPIED = ("training.json", "consolidated*")
"""Headway's record of a backbone's training, and the second copy of the weights in Mistral's folders."""
GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"
NEEDED = "# and Headway itself; generate.py says so where it is missing\ntransformers>=5.23\ntorch>=2.13\n"
CHECKED_TOKENS = 8


def export_to_hub_folder(
    heads: str | Path,
    out: str | Path,
    *,
    measured: Sequence[str | Path] = (),
    license: str | None = None,
    backbone: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a folder of heads and its backbone as one model folder.

    Args:
        heads: folder of heads. A LoRA adapter that was trained with them is merged.
        out: a new folder.
        measured: files of `headway benchmark --json` or `headway evaluate`, whose figures the model card shows.
        license: identifier on the hub, such as apache-2.0; None is the one in the backbone's own model card.
        backbone: folder or hub name; None is the one in heads.json.
        overwrite: an earlier export is replaced once the new one is whole.

    Raises:
        ValueError: `out` exists, or a backbone that cannot be opened without further code.
        OSError: the disk is full or `out` cannot be written.
    """
    out = Path(out)
    heads = find_heads(heads)
    check_place(out, [heads, backbone or find_backbone(heads)], overwrite=overwrite)
    description = read_description(heads)
    if description.trained_backbone is not None and description.trained_backbone.adapter:
        with TemporaryDirectory(dir=out.absolute().parent, prefix=".merged-") as merged:
            merge(heads, alone := Path(merged) / "merged")
            return export_to_hub_folder(alone, out, measured=measured, license=license, overwrite=overwrite)
    config = recorded_backbone(heads, "auto")
    if backbone is not None:
        config = replace(config, name_or_path=backbone, revision=None, tokenizer=None)
    if config.quantization:
        logger.warning(
            "The heads were trained on %s with %s weights, and this folder has them as they are on the disk: quantise "
            "where it is opened, or drafts may be accepted less often.",
            config.name_or_path,
            config.quantization.get("quant_method", "quantised"),
        )
    source = find_files(heads, description, config)
    refuse_code(source, config)
    with whole(out) as begun:
        copy_backbone(source, config, begun)
        copy_heads(heads, begun)
        write_custom_generate(begun)
        # A backbone that was trained with the heads may have no card; the one it was trained from names the licence.
        licensed = source if (source / CARD).is_file() else Path(config.name_or_path)
        write_card(begun, heads=heads, served=True, base=licensed, measured=measured, license=license)
        try:
            check(begun, source, heads)
        except ValueError as error:  # its message names a folder that is removed by then
            said = str(error).replace(str(begun / NESTED), str(heads)).replace(str(begun), config.name_or_path)
            raise ValueError(said) from None
        sync(begun)
    return out


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A context with a folder beside `out` to write to; at the end it replaces `out`, on an error it is removed."""
    begun = out.absolute().parent / f".{out.name}.tmp"
    remove(begun)
    try:
        begun.mkdir(parents=True)
        yield begun
        remove(out)
        begun.rename(out)
    except OSError as error:
        raise OSError(
            f"The model folder could not be written to {out} ({error.strerror or error}); nothing was left there. Free "
            f"space or choose another folder."
        ) from error
    finally:
        remove(begun)


def find_files(heads: Path, description: HeadsDescription, config: BackboneConfig) -> Path:
    """The backbone's folder: the one that was trained with the heads, a local one, or the hub's in its cache."""
    if description.trained_backbone is not None and backbone_around(heads) is None:
        return find_trained(heads, description.trained_backbone.folder)
    if Path(config.name_or_path).is_dir():
        return Path(config.name_or_path)
    return download(config.name_or_path, [*COPIED, CARD], config.revision, without=NOT_COPIED)


def refuse_code(source: Path, config: BackboneConfig) -> None:
    """
    Raises:
        ValueError: a backbone that needs code beside its weights, one packed by Headway, or one without safetensors.
    """
    settings = read_json(source / "config.json")
    name = config.name_or_path
    if "auto_map" in settings:
        raise ValueError(
            f"The backbone {name} needs code that lies beside its weights, which transformers serve does not open; "
            f"decode with it in Python, as docs/decode.md says."
        )
    named = settings.get("architectures")
    if not (isinstance(named, list) and named and hasattr(transformers, str(named[0]))):
        raise ValueError(
            f"The backbone {name} has architectures {named!r} in config.json, which names no class of transformers; "
            f"a server opens it by that name: save the backbone again with model.save_pretrained(folder)."
        )
    if (settings.get("quantization_config") or {}).get("quant_method") == METHOD:
        raise ValueError(
            f"The backbone {name} is packed in microscaling weights, which open only after `import heads`, and a "
            f"server does not import it before it loads; export heads on the unpacked backbone."
        )
    if not any(source.glob("*.safetensors")):
        raise ValueError(
            f"The backbone {name} holds no *.safetensors, and no pickle is copied; save it again with "
            f"model.save_pretrained(folder), and name that folder as the backbone."
        )


def read_json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8-sig"))
    return found if isinstance(found, dict) else {}


def copy_backbone(source: Path, config: BackboneConfig, out: Path) -> None:
    """Copy weights, configs and tokenizer byte for byte; save the tokenizer if heads were trained with another one."""
    found = sorted({path for pattern in COPIED for path in source.glob(pattern) if path.is_file()})
    wanted = [path for path in found if not any(path.match(pattern) for pattern in NOT_COPIED)]
    bar = tqdm(wanted, desc="copying the backbone", unit="file", disable=None)  # type: ignore[no-untyped-call]
    for path in bar:  # shown on a terminal
        shutil.copyfile(find_inside(source, path.name), out / path.name)
    elsewhere = config.tokenizer is not None and Path(config.tokenizer).resolve() != source.resolve()
    if elsewhere or not (out / "tokenizer_config.json").is_file():
        load_tokenizer(config).save_pretrained(out)


def copy_heads(heads: Path, out: Path) -> None:
    (out / NESTED).mkdir()
    for name in FILES:
        if (heads / name).is_file():
            shutil.copyfile(find_inside(heads, name), out / NESTED / name)


def write_custom_generate(out: Path) -> None:
    (out / GENERATE).parent.mkdir()
    shutil.copyfile(template.__file__, out / GENERATE)
    (out / REQUIREMENTS).write_text(NEEDED, encoding="utf-8")


@torch.no_grad()
def check(folder: Path, source: Path, heads: Path) -> None:
    """Load the folder back as its readers do, decode with it, and compare all logits with those of its sources.

    Raises:
        ValueError: the copied backbone is not the heads' own, or logits differ.
    """
    wanted_1TV = logits_of(open_as_served(source))  # the model is gone before the next one is opened
    model = open_as_served(folder)
    token_heads = load(folder, model)
    prompt_1T = torch.tensor([[model.config.get_text_config().vocab_size // 2]])
    model.generate(prompt_1T, max_new_tokens=CHECKED_TOKENS, do_sample=False, custom_generate=TreeDecoding(token_heads))
    same = torch.equal(logits_of(model), wanted_1TV)
    if not same or largest_difference(token_heads, load(heads, token_heads.backbone)) != 0:
        raise ValueError(
            f"The folder gives other logits than the {'heads' if same else 'backbone'} that it was made of; nothing "
            f"was left there. Look at the disk, and try again."
        )


def open_as_served(folder: Path) -> Any:
    """The model of a folder by its class's name, as transformers serve opens it."""
    with explained(str(folder)):
        kind = getattr(transformers, AutoConfig.from_pretrained(folder).architectures[0])
        return kind.from_pretrained(folder, dtype=torch.float32).eval()


def logits_of(model: Any) -> torch.Tensor:
    """(1, T, V) along random tokens."""
    vocab_size = model.config.get_text_config().vocab_size
    tokens_1T = torch.randint(vocab_size, (1, 2 * CHECKED_TOKENS), generator=torch.Generator().manual_seed(0))
    logits_1TV: torch.Tensor = model(tokens_1T).logits
    return logits_1TV
