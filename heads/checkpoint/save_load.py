"""Save and load heads: `heads.safetensors` and `heads.json`, no pickle, no backbone weights, checked on loading.

heads/checkpoint/schema.py has the fields of heads.json.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from heads.backbone.model import Backbone
from heads.checkpoint.adapter import has_adapter
from heads.checkpoint.backbone import PREFIX, check_trained_backbone, save_backbone
from heads.checkpoint.remote import find_heads
from heads.checkpoint.schema import DESCRIPTION, FORMAT_VERSION, TENSORS, HeadsDescription, read_description
from heads.checkpoint.shapes import check_fit, read_shapes
from heads.decoding.request.entry import check_token_heads
from heads.decoding.tuned_file import find_tuned_tree
from heads.families import build_config, family_module
from heads.inside import is_foreign_link, is_one_name, open_new, remove
from heads.interface.draft_vocabulary import check_draft_tokens
from heads.interface.token_heads import TokenHeads
from heads.quantization.linear import MXLinear
from heads.quantization.packed_heads import packed_layers, put_packed_heads

logger = logging.getLogger(__name__)

FINGERPRINT_ROWS = 64


def save(
    token_heads: TokenHeads,
    folder: str | Path,
    *,
    recipe: dict[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    state_dict: dict[str, Tensor] | None = None,
    with_backbone: bool | None = None,
    tokenizer: Any = None,
) -> None:
    """Write heads to a folder; old files there stay complete until the new ones are.

    Args:
        recipe: how the heads were made: resolved config, versions, commit.
        dtype: dtype of the saved tensors; None keeps their own.
        state_dict: the heads' gathered tensors, if they are sharded.
        with_backbone: save the backbone too, or its LoRA adapter; by default if it was trained with the heads or has an
            adapter, since the heads fit no other backbone.
        tokenizer: saved with the backbone.

    Raises:
        ValueError: with_backbone=False for heads whose backbone was trained with them.
        OSError: the disk is full or the folder cannot be written; the old files are untouched.
    """
    check_token_heads(token_heads)
    tensors = {
        name: tensor.detach().to("cpu", (dtype if tensor.is_floating_point() else None) or tensor.dtype).contiguous()
        for name, tensor in (token_heads.state_dict() if state_dict is None else state_dict).items()
    }
    content = to_bytes(tensors, metadata={"format": "pt"})  # one entry: several are written in random order
    folder, model = Path(folder), token_heads.backbone.model
    changed = token_heads.backbone_was_trained or has_adapter(model)
    if changed and with_backbone is False:
        raise ValueError(
            "with_backbone=False was given for heads whose backbone was trained with them or has an adapter; they fit "
            "no other backbone: leave with_backbone out."
        )
    before, old = set(folder.glob(f"{PREFIX}*")), named_backbone(folder)
    trained = save_backbone(model, folder, dtype=dtype, tokenizer=tokenizer) if with_backbone or changed else None
    description = {
        "format_version": FORMAT_VERSION,
        "family": token_heads.family,
        "config": vars(token_heads.config),
        "backbone": describe_backbone(token_heads.backbone),
        "trained_backbone": trained,
        "num_parameters": num_parameters(token_heads, tensors),
        "measured_accuracy": token_heads.measured_accuracy,
        "sha256": hashlib.sha256(content).hexdigest(),
        "recipe": recipe or {},
    }
    if packed := packed_layers(token_heads):
        description["packed_layers"] = packed
    text = json.dumps(description, indent=2, default=str) + "\n"
    new = None if trained is None else folder / trained["folder"]
    try:
        write_whole(folder, {TENSORS: content, DESCRIPTION: text.encode()})
    except OSError:
        if new is not None and new not in before:
            remove(new)  # no heads.json names it
        raise
    if old is not None and old != new:
        remove(old)


def num_parameters(token_heads: TokenHeads, tensors: Mapping[str, Tensor]) -> int:
    """How many weights the heads have, those of packed layers included."""
    packed = (module for module in token_heads.modules() if isinstance(module, MXLinear))
    plain = (tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    return sum(plain) + sum(layer.in_features * layer.out_features for layer in packed)


def named_backbone(folder: Path) -> Path | None:
    """The folder of the trained backbone that the present heads.json names, if it exists.

    The next save removes this folder. So a link, or a name that `save` never writes, is warned of and not followed.
    """
    try:
        name = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8-sig"))["trained_backbone"]["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_one_name(name) or not name.startswith(PREFIX) or is_foreign_link(folder / name):
        logger.warning(
            "%s names %r as its trained backbone, outside the folder; that is not touched.", folder / DESCRIPTION, name
        )
        return None
    return folder / name if (folder / name).is_dir() else None


def write_whole(folder: Path, files: dict[str, bytes]) -> None:
    """Write all files under temporary names, then move all into place; on an error remove the temporary ones."""
    begun: list[tuple[Path, Path]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            begun.append((folder / f".{name}.{os.getpid()}.tmp", folder / name))
            with open_new(begun[-1][0]) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        for temporary, _ in begun:
            temporary.unlink(missing_ok=True)
        size = sum(map(len, files.values())) / 2**20
        raise OSError(
            f"{', '.join(files)} ({size:.1f} MiB) could not be written to {folder} ({error.strerror or error}); "
            f"what was saved there before is untouched. Free space or choose another folder."
        ) from error
    for temporary, final in begun:
        temporary.replace(final)


def load(
    folder: str | Path,
    model: Any,
    *,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> TokenHeads:
    """Heads from a folder or from the hub, on a causal LM, in eval mode.

    Args:
        folder: what `save` wrote, a model folder with heads inside (`headway export --to hub`), or "organisation/name"
            on the hub, where no folder here has that name.
        model: the backbone that they were trained on, or a `Backbone` that wraps it.
        dtype: dtype of the heads; None is the backbone's.
        revision: branch, tag or commit on the hub.
        cache_dir: where files of the hub are kept; None is huggingface_hub's place.

    Raises:
        ValueError: files are missing or damaged, the backbone is another one or has no weights, or tensors are missing,
            extra or misshapen; the sentence names them. Or there is no such repository, or revision or cache_dir was
            given for a folder.
    """
    folder = find_heads(folder, revision=revision, cache_dir=cache_dir)
    description = read_description(folder)
    backbone = model if isinstance(model, Backbone) else Backbone(model)
    backbone.refresh()
    if description.trained_backbone is not None:
        check_trained_backbone(description.trained_backbone, backbone, folder)
    check_heads_backbone(description, backbone, folder)
    check_fit(description, backbone, folder)
    tensors = read_tensors(Path(folder) / TENSORS, description.sha256)
    token_heads = family_module(description.family).Heads(
        build_config(description.family, **description.config), backbone
    )
    put_packed_heads(token_heads, description.packed_layers or {})
    token_heads.load_state_dict(tensors)
    if token_heads.draft_tokens_S is not None:
        check_draft_tokens(token_heads.draft_tokens_S, None, backbone.vocab_size)
    token_heads.measured_accuracy = description.measured_accuracy
    token_heads.tuned_tree, token_heads.checksum = find_tuned_tree(folder), description.sha256
    token_heads.backbone_was_trained = description.trained_backbone is not None
    return token_heads.to(device=backbone.heads_device, dtype=dtype or backbone.dtype).eval()


def describe_backbone(backbone: Backbone) -> dict[str, Any]:
    return {
        "name": backbone.name,
        "architecture": type(backbone.model).__name__,
        "hidden_size": backbone.hidden_size,
        "vocab_size": backbone.vocab_size,
        "embedding_fingerprint": fingerprint(backbone),
    }


@torch.no_grad()
def fingerprint(backbone: Backbone) -> list[float]:
    """One entry of each of 64 rows spread over the embedding, which tell models apart whatever their dtype."""
    vocab, width = backbone.vocab_size, backbone.hidden_size
    rows = torch.linspace(0, vocab - 1, min(FINGERPRINT_ROWS, vocab)).long().to(backbone.device)
    columns = (torch.arange(len(rows)) % width).to(backbone.device)
    embed = backbone.model.get_input_embeddings().forward  # without the hooks with which engines gather weights
    values = embed(rows)[torch.arange(len(rows), device=backbone.device), columns]
    return [float(f"{value:.6g}") for value in values.float().tolist()]


def check_heads_backbone(description: HeadsDescription, backbone: Backbone, folder: str | Path) -> None:
    """
    Raises:
        ValueError: the backbone is not the one that the heads were trained on.
    """
    wanted, found = description.backbone, describe_backbone(backbone)
    for key in ("hidden_size", "vocab_size"):
        if getattr(wanted, key) != found[key]:
            raise ValueError(
                f"The heads in {folder} belong to {wanted.name} with {key} {getattr(wanted, key)}; the given backbone "
                f"{found['name']} has {found[key]}. Load the heads on their own backbone."
            )
    one, other = wanted.embedding_fingerprint, found["embedding_fingerprint"]
    pairs = zip(one, other, strict=False)
    # bfloat16 keeps 8 bits of a number, so one value in two dtypes differs by up to 2^-8 of itself.
    if len(one) != len(other) or any(abs(a - b) > 2**-7 * max(abs(a), abs(b)) + 1e-6 for a, b in pairs):
        raise ValueError(
            f"The heads in {folder} belong to {wanted.name}; the embedding of the given backbone {found['name']} is "
            f"another one, though its sizes fit. Load the heads on their own backbone."
        )


def read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    read_shapes(path)  # raises on a file that is missing or damaged
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ValueError(f"{path} is not the file that {DESCRIPTION} beside it describes; copy both files again.")
    return load_file(path)
