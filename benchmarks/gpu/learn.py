"""A 100M Llama and heads on it, trained within minutes, and what they give: `python -m benchmarks.gpu.learn`.

The text is the source of the standard library and of all installed packages; one file in twenty is held out. Training
takes shares of --minutes: of the 8.25 of `make gpu` the backbone has about five, since text, heads and measuring have
to fit into the same command, and each family of heads less than one. In the rest tokens per pass and per second are
measured against plain generation. Trainer and decoder are the project's own. Only the printed tables and --json are
kept. `--tiny` has a tiny model and seconds for each training, to try all of this on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.paper.trained_rows import short_run, train_row
from benchmarks.shared import parse_with_defaults_of, parser_of, run_benchmark, say, wide_console, write_figures
from heads.checkpoint.opening import Opened, open_heads
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.evaluation.methods import GreedySettings, Method, lookup_alone, plain, tree
from heads.evaluation.prompts import cut_prompt
from heads.evaluation.tables import describe_machine, measure, speed_table, versions
from train.config import TrainConfig, read_config
from train.run import run

END = "<|endoftext|>"
LARGEST_FILE = 200_000  # characters: longer files are data
TOKENIZER_TEXT = 30_000_000  # characters that the tokenizer is trained on


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of a run.

    Attributes:
        shares: the parts of --minutes for training the backbone, and each family of heads.
        probed: steps that are timed, to foresee how many fit into a share; the first ones, which warm up, are in the
            estimate, so it is rather too long.
    """

    characters: int
    vocabulary: int
    width: int
    layers: int
    block: int
    batch: int
    shares: tuple[float, float] = (0.62, 0.09)
    probed: int = 40
    prompts: int = 8
    new_tokens: int = 128


FULL = Scale(characters=160_000_000, vocabulary=16_384, width=768, layers=12, block=512, batch=64)
TINY = Scale(
    characters=2_000_000, vocabulary=512, width=64, layers=2, block=64, batch=4, probed=4, prompts=2, new_tokens=16
)
TINY_OPTIONS = {"minutes": 0.1}
RATES = {"grounded": 5e-3, "medusa": 1e-2}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.gpu.learn", __doc__)
    parser.add_argument("--minutes", type=float, default=9.0, help="of everything, as far as it can be foreseen")
    parser.add_argument("--tiny", action="store_true", help=f"a tiny model; by default {TINY_OPTIONS}")
    parser.add_argument("--json", metavar="FILE", help="write rows, machine and versions here")
    options = parse_with_defaults_of("tiny", TINY_OPTIONS, parser, arguments)
    scale, console = TINY if options.tiny else FULL, wide_console()
    with tempfile.TemporaryDirectory() as place:
        folder, started = Path(place), time.monotonic()
        held_out = write_text(folder, scale)
        tokenizer = make_backbone_folder(folder, scale)
        say(console, f"text and tokenizer: {time.monotonic() - started:.0f} s")
        seconds = 60 * options.minutes
        backbone = train(folder, "backbone", None, scale, seconds * scale.shares[0], console)
        trained = {f: train(folder, f, backbone, scale, seconds * scale.shares[1], console) for f in RATES}
        opened = open_heads(list(trained.values()))
        prompts = prompts_of(held_out, tokenizer, scale, opened.model.device)
        blocks = {name: compare(console, opened, settings, name, prompts) for name, settings in settings_of(scale)}
    found = {name: [asdict(row) for row in rows] for name, rows in blocks.items()}
    device = default_device()
    write_figures(options.json, {"blocks": found, "machine": describe_machine(device), "versions": versions()})


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def python_files() -> Iterator[Path]:
    """The .py files of the standard library and of installed packages, in a fixed random order."""
    roots = {Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib", "platlib")}
    files = sorted({file for root in roots for file in root.rglob("*.py")})
    random.Random(0).shuffle(files)
    yield from files


def write_text(folder: Path, scale: Scale) -> list[str]:
    """Write train.jsonl and unseen.jsonl, each text once; returns the held-out texts."""
    seen: set[bytes] = set()
    held_out: list[str] = []
    written = 0
    with (folder / "train.jsonl").open("w") as train_file, (folder / "unseen.jsonl").open("w") as heldout_file:
        for file in python_files():
            text = file.read_text(encoding="utf-8", errors="ignore")
            digest = hashlib.sha256(text.encode()).digest()
            if not 1000 < len(text) < LARGEST_FILE or digest in seen:
                continue
            seen.add(digest)
            if len(seen) % 20 == 0:
                held_out.append(text)
            print(json.dumps({"text": text}), file=heldout_file if len(seen) % 20 == 0 else train_file)
            written += len(text)
            if written > scale.characters:
                break
    return held_out


def make_backbone_folder(folder: Path, scale: Scale) -> Any:
    """A config and a byte-level BPE trained on a part of the text; returns the tokenizer."""
    with (folder / "train.jsonl").open() as lines:
        texts, total = [], 0
        for line in lines:
            texts.append(json.loads(line)["text"])
            total += len(texts[-1])
            if total > TOKENIZER_TEXT:
                break
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=scale.vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=END, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder / "shape")
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=scale.width,
        intermediate_size=scale.width * 8 // 3,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.width // 32 if scale.width < 256 else scale.width // 64,
        max_position_embeddings=max(1024, 2 * scale.block),
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder / "shape")
    return tokenizer


def train(folder: Path, name: str, backbone: Path | None, scale: Scale, seconds: float, console: Any) -> Path:
    """Train the backbone, or heads on it, for about `seconds`; returns the folder with the result."""
    started = time.monotonic()
    per_step = seconds_of_a_step(folder, name, backbone, scale)
    steps = max(scale.probed, int((seconds - (time.monotonic() - started)) / per_step))
    tokens = scale.batch * scale.block
    say(console, f"{name}: {1000 * per_step:.0f} ms a step of {tokens:,} tokens")
    say(console, f"{name}: {steps:,} steps, {steps * tokens / 1e6:,.1f} M tokens")
    return run(config_of(folder, name, backbone, scale, steps)) / "last"


def seconds_of_a_step(folder: Path, name: str, backbone: Path | None, scale: Scale) -> float:
    """From a short training without evaluations, in a folder of its own, which no run then finds used."""
    config = config_of(folder, name, backbone, scale, scale.probed)
    probe = short_run(config, steps=scale.probed, batch=scale.batch, output_dir=str(folder / f"{name}-probe"))
    return train_row(probe).seconds / scale.probed


def config_of(folder: Path, name: str, backbone: Path | None, scale: Scale, steps: int) -> TrainConfig:
    """The run's config, as its YAML file would say it."""
    content: dict[str, Any] = {
        "output_dir": str(folder / name),
        "backbone": {"name_or_path": str(backbone or folder / "shape"), "random_weights": backbone is None},
        "data": {
            "train": [{"path": str(folder / "train.jsonl")}],
            "eval": [{"path": str(folder / "unseen.jsonl")}],
            "block_size": scale.block,
            "max_eval_blocks": 32,
        },
        "optimizer": {"beta1": 0.9, "beta2": 0.95 if backbone is None else 0.99},
        "evaluation": {"every_steps": steps, "num_prompts": 2, "new_tokens": 32},
        "save_every_steps": 0,
        "report_to": [],
        "compile": False,
        "trainer": {
            "max_steps": steps,
            "per_device_train_batch_size": scale.batch,
            "per_device_eval_batch_size": scale.batch,
            "warmup_steps": 0.05,
            "logging_steps": max(1, steps // 10),
            "disable_tqdm": True,
            "bf16": torch.cuda.is_available(),
        },
    }
    if backbone is None:
        content |= {"family": None, "rates": {"base": 1.5e-3}}
    else:
        content |= {"family": name, "heads": {"num_heads": 4}, "rates": {"heads": RATES[name]}}
        content |= {"loss": {"hard": 0.0, "soft": 1.0}}
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    return read_config(["--config", str(file)])


def prompts_of(held_out: Sequence[str], tokenizer: Any, scale: Scale, device: torch.device) -> list[Tensor]:
    """Prompts (1, T) from files that nothing was trained on."""
    cut = [cut_prompt(text, tokenizer, scale.block // 4) for text in held_out]
    return [prompt_1T.to(device) for prompt_1T in cut if prompt_1T.shape[1] == scale.block // 4][: scale.prompts]


def settings_of(scale: Scale) -> list[tuple[str, GreedySettings]]:
    return [
        ("greedy", GreedySettings(new_tokens=scale.new_tokens)),
        ("greedy, repetition penalty 1.1", GreedySettings(new_tokens=scale.new_tokens, repetition_penalty=1.1)),
    ]


def compare(console: Any, opened: Opened, settings: GreedySettings, name: str, prompts: Sequence[Tensor]) -> Any:
    """Plain, heads alone, lookup alone and both, side by side."""
    model, all_heads = opened.model, opened.token_heads
    first = next(iter(all_heads.values()))
    methods: list[Method] = [plain(model, settings)]
    methods += [tree(model, heads, settings, f"{one}, alone", None, 0) for one, heads in all_heads.items()]
    methods += [lookup_alone(model, first, settings)]
    methods += [tree(model, h, settings, f"{one} with lookup", None, DEFAULT_LOOKUP) for one, h in all_heads.items()]
    rows = measure(console, model, methods, settings, prompts, 3, f"speed, {name}")
    console.print(speed_table(rows, f"\n{name}"))
    return rows


if __name__ == "__main__":
    run_benchmark(main)
