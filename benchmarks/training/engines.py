"""The same training under every engine, launched as a user would, compared with one process.

    python -m benchmarks.training.engines [--cases NAME …] [--engines NAME …] [--json FILE]

Each case trains a tiny backbone's heads for the same steps on the same blocks, split differently by every engine.
Losses of all steps and the saved weights must equal the single process's to TOLERANCE, gradient norms to
NORM_TOLERANCE; a step at rate 0 must save the same bytes; a checkpoint of one engine must resume under another. On a
machine with GPUs the same runs go over NCCL with `--gpu`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3MoeConfig

from benchmarks.budget import Budget
from benchmarks.shared import ROOT, figures_table, parser_of, run_benchmark, say, wide_console, write_figures

STEPS = 20
TOLERANCE = 1e-5
"""Allowed difference of losses and weights, relative for values above 1, since float32 sums have another order."""
NORM_TOLERANCE = 1e-4
"""Allowed difference of gradient norms: the root of one long float32 sum, which engines split differently."""

FUTURE_WARNING = re.compile(r"^.*FutureWarning: .*\n(?:  .*\n)?", re.MULTILINE)
"""A warning, and the line of source that Python prints below it."""

GROUNDED = {"family": "grounded", "heads": {"num_heads": 2}, "rates": {"heads": 3e-3}}
THREE_RATES = {"heads": 3e-3, "base": 1e-3, "heads_to_base": 5e-4}
DYNAMO = {"family": "dynamo", "heads": {"num_heads": 2}, "rates": THREE_RATES}


@dataclass(frozen=True, kw_only=True)
class RunCase:
    """One run.

    Attributes:
        config: keys of its config beside those that all runs share.
        tied: the backbone's embeddings are tied.
        experts: the backbone is a mixture of experts.
        tolerance: allowed difference between engines; bfloat16 has 8 bits, so another order of sums changes the third
            digit.
    """

    config: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    experts: bool = False
    tolerance: float = TOLERANCE


CASES = {
    "grounded, frozen": RunCase(config=GROUNDED),
    "dynamo, three rates": RunCase(config=DYNAMO),
    "medusa, shared unembedding, tied": RunCase(
        config={"family": "medusa", "heads": {"num_heads": 2, "unembedding": "shared"}, "rates": {"heads": 3e-3}},
        tied=True,
    ),
    "grounded, draft vocabulary": RunCase(config=GROUNDED | {"heads": {"num_heads": 2, "draft_vocabulary": 24}}),
    "medusa, draft vocabulary, shared": RunCase(
        config=GROUNDED
        | {"family": "medusa", "heads": {"num_heads": 2, "draft_vocabulary": 24, "unembedding": "shared"}},
    ),
    "dynamo, tied, checkpointing": RunCase(config=DYNAMO | {"backbone": {"gradient_checkpointing": True}}, tied=True),
    "dynamo, LoRA heads": RunCase(
        config=DYNAMO | {"heads": {"num_heads": 2, "lora_rank": 4}},
    ),
    "grounded, backbone with LoRA": RunCase(config=GROUNDED | {"rates": THREE_RATES, "lora": {"rank": 4}}),
    "medusa, LoRA, self-distillation": RunCase(
        config={
            "family": "medusa",
            "heads": {"num_heads": 2},
            "rates": {"heads": 3e-3, "base": 1e-3},
            "lora": {"rank": 4},
            "warm_in": {"schedule": "linear", "steps": 2, "coefficient": 0.5},
            "self_distillation": {"weight": 0.5},
        }
    ),
    "medusa, LoRA on bfloat16, self-distillation": RunCase(
        config={
            "family": "medusa",
            "heads": {"num_heads": 2},
            "rates": {"heads": 3e-3, "base": 1e-3},
            "lora": {"rank": 4},
            "self_distillation": {"weight": 0.5},
            "backbone": {"dtype": "bfloat16"},
        },
        tolerance=2e-2,
    ),
    "grounded, frozen in bfloat16": RunCase(config=GROUNDED | {"backbone": {"dtype": "bfloat16"}}),
    "dynamo, bf16": RunCase(config=DYNAMO | {"trainer": {"bf16": True}}, tolerance=2e-2),
    "grounded, frozen experts": RunCase(config=GROUNDED, experts=True),
    "dynamo, three rates, experts": RunCase(config=DYNAMO, experts=True),
    "grounded, experts with LoRA": RunCase(
        config=GROUNDED | {"rates": THREE_RATES, "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
        experts=True,
    ),
    "eagle, three rates, soft labels": RunCase(
        config={
            "family": "eagle",
            "heads": {"num_heads": 2, "fc_norm": True, "norm_output": True},
            "rates": THREE_RATES,
            "loss": {"hard": 0.5, "soft": 1.0},
        }
    ),
    "backbone alone": RunCase(config={"family": None, "rates": {"base": 1e-3}}),
}


RESUMED = ("dynamo, three rates", "dynamo, three rates, experts")
"""Cases whose runs another engine goes on with; experts are stored one by one and trained as one tensor."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How the eight blocks of a step are split: processes x blocks x accumulation."""

    processes: int
    batch: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.processes} x {self.batch} x {self.accumulation}"


ONE = Split(processes=1, batch=8, accumulation=1)
TWO = Split(processes=2, batch=2, accumulation=2)
FOUR = Split(processes=4, batch=1, accumulation=2)
SPLITS = {split.processes: split for split in (ONE, TWO, FOUR)}
ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload")


def prepare(folder: Path, *, tied: bool, experts: bool = False) -> None:
    """A tiny backbone, and texts of uneven length: blocks then hold different numbers of labels."""
    base = base_of(folder, tied, experts)
    if base.is_dir():
        return
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "checkpoints/demo/base")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }
        sizes |= {"vocab_size": len(tokenizer), "num_key_value_heads": 2, "eos_token_id": 0}
        more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        dense = LlamaConfig(**sizes, tie_word_embeddings=tied)
        config = Qwen3MoeConfig(**sizes, **more) if experts else dense
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdef ", k=draw.randrange(20, 400))) for _ in range(800)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def base_of(folder: Path, tied: bool, experts: bool) -> Path:
    return folder / ("experts" if experts else "tied" if tied else "base")


def write_config(
    folder: Path, name: str, case: RunCase, split: Split, *, gpu: bool = False, **more: Any
) -> tuple[Path, Path]:
    """The run's config and its output folder; `more` replaces top-level keys, `trainer` is added to."""
    prepare(folder, tied=case.tied, experts=case.experts)
    trainer = {
        "max_steps": STEPS,
        "per_device_train_batch_size": split.batch,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": split.accumulation,
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": not gpu,
    }
    content = {
        "output_dir": str(folder / name),
        "data": {"train": [{"path": str(folder / "text.jsonl")}], "eval_fraction": 0.05, "block_size": 32},
        "evaluation": {"every_steps": 0, "num_prompts": 3, "prompt_tokens": 8, "new_tokens": 8},
        **case.config,
        "backbone": {
            "name_or_path": str(base_of(folder, case.tied, case.experts)),
            **case.config.get("backbone", {}),
        },
        **more,
        "trainer": trainer | case.config.get("trainer", {}) | more.get("trainer", {}),
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path, folder / name


def launch(config: Path, engine: str, split: Split, *arguments: str) -> str:
    """Launch a run from the repository root, as a user would; returns the processes' output.

    Raises:
        RuntimeError: the run failed.
    """
    command = [sys.executable]
    if engine != "single":  # which needs no launcher
        command += ["-m", "accelerate.commands.launch", "--config_file", f"launch/{engine}.yaml"]
        command += ["--num_processes", str(split.processes), "--main_process_port", free_port()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(config.parent / "cache")}
    environment["PYTHONFAULTHANDLER"] = "1"  # a process that aborts says where
    done = subprocess.run(
        [*command, "train.py", "--config", str(config), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{engine} on {split.processes} processes ended with {done.returncode}; the end of its stdout:\n"
            f"{tail(done.stdout)}\nand of its stderr:\n{tail(done.stderr)}"
        )
    return done.stdout + done.stderr


def tail(output: str, length: int = 4000) -> str:
    """The last characters of a run's output, without libraries' FutureWarnings, which fill pages.

    >>> tail("x.py:7: FutureWarning: y goes away\\n  warnings.warn(\\nKilled")
    'Killed'
    """
    return FUTURE_WARNING.sub("", output)[-length:]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def read_logged(run: Path, kind: str) -> dict[tuple[int, str], float]:
    """The logged values whose names end in `kind`, by step and name: those of every step and the last evaluation."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    untimed = [line for line in lines if "train_runtime" not in line]
    return {(line["step"], name): line[name] for line in untimed for name in line if name.endswith(kind)}


def read_weights(run: Path) -> dict[str, torch.Tensor]:
    """All tensors that a run saved: heads, and the trained backbone or its adapter."""
    return {
        f"{path.name}: {name}": tensor
        for path in sorted((run / "last").rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def read_bytes(run: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (run / "last").rglob("*.safetensors")}


def largest_difference(one: dict[Any, Any], other: dict[Any, Any]) -> float:
    """The largest difference between two runs' losses or weights, relative where they exceed 1.

    >>> largest_difference({"a": 1.0, "b": 200.0}, {"a": 1.5, "b": 220.0})
    0.5

    Raises:
        ValueError: they do not hold the same names.
    """
    if one.keys() != other.keys():
        raise ValueError(f"one run has what the other has not: {sorted(map(str, one.keys() ^ other.keys()))[:5]}")
    pairs = [(torch.as_tensor(one[k]).double(), torch.as_tensor(other[k]).double()) for k in one]
    found = torch.stack([((a - b).abs() / a.abs().clamp(min=1)).max() for a, b in pairs])
    return float(found.nan_to_num(nan=float("inf")).max())


HALFWAY: dict[str, Any] = {"save_every_steps": STEPS // 2, "trainer": {"save_total_limit": None}}
"""The step of a checkpoint in the middle, from which another engine resumes."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    case: str
    engine: str
    split: str
    losses: float
    norms: float
    weights: float
    seconds: float

    @property
    def allowed(self) -> tuple[float, float]:
        """The largest difference of losses and weights, and of norms, that the case allows."""
        tolerance = CASES[self.case].tolerance
        return tolerance, max(NORM_TOLERANCE, 10 * tolerance)

    @property
    def equal(self) -> bool:
        allowed, allowed_norms = self.allowed
        return max(self.losses, self.weights) <= allowed and self.norms <= allowed_norms


class Comparison:
    """Runs and their single-process references, in one folder; finished runs are not repeated."""

    def __init__(self, folder: Path, *, gpu: bool = False, launch: Callable[..., str] = launch) -> None:
        self.folder = folder
        self.gpu = gpu
        self.launch = launch

    def train(self, case: str, engine: str, split: Split, **more: Any) -> Path:
        settings = hashlib.sha256(json.dumps(more).encode()).hexdigest()[:8]
        name = f"{case}-{engine}-{split.processes}-{settings}".replace(" ", "_").replace(",", "")
        config, run = write_config(self.folder, name, CASES[case], split, gpu=self.gpu, **more)
        finished = self.folder / f"{name}.finished"
        if not finished.exists():
            shutil.rmtree(run, ignore_errors=True)
            finished.write_text(self.launch(config, engine, split))
        return run

    def compare(self, case: str, engine: str, split: Split) -> EngineRow:
        reference = self.train(case, "single", ONE, **HALFWAY)
        started = time.perf_counter()
        run = self.train(case, engine, split, **HALFWAY)
        return EngineRow(
            case=case,
            engine=engine,
            split=str(split),
            losses=largest_difference(read_logged(reference, "loss"), read_logged(run, "loss")),
            norms=largest_difference(read_logged(reference, "grad_norm"), read_logged(run, "grad_norm")),
            weights=largest_difference(read_weights(reference), read_weights(run)),
            seconds=time.perf_counter() - started,
        )

    def same_bytes(self, case: str, engine: str, split: Split) -> bool:
        """Whether one step at rate 0, which changes no weight, saves the same bytes as one process."""
        still: dict[str, Any] = {
            "trainer": {"max_steps": 1, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1000}
        }
        found = [read_bytes(self.train(case, *how, **still)) for how in (("single", ONE), (engine, split))]
        return found[0] == found[1]

    def resume_under(self, case: str, before: str, split_before: Split, after: str, split_after: Split) -> float:
        """Resume one engine from the middle of another's run; returns the weights' difference to one process's run.

        Weights, moments and data order are the same under every engine, so the result is that of one process.
        """
        name = f"{case}-{before}-then-{after}".replace(" ", "_").replace(",", "")
        config, run = write_config(self.folder, name, CASES[case], split_after, gpu=self.gpu, **HALFWAY)
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.train(case, before, split_before, **HALFWAY), run)
        shutil.rmtree(run / f"checkpoint-{STEPS}")
        shutil.rmtree(run / "last")
        self.launch(config, after, split_after, "--resume", "true")
        return largest_difference(read_weights(self.train(case, "single", ONE, **HALFWAY)), read_weights(run))


def is_supported(case: str, engine: str, gpu: bool) -> bool:
    """Whether an engine trains a case here: DeepSpeed on CPUs trains only in float32."""
    return gpu or not (CASES[case].config.get("trainer", {}).get("bf16") and engine.startswith("zero"))


def runs_on(engine: str, split: Split) -> bool:
    """Whether an engine starts on so many processes: FSDP2 has nothing to split among one."""
    return split.processes > 1 or engine != "fsdp2"


def show(rows: Sequence[EngineRow], console: Console) -> None:
    title = f"Against one process ({ONE}), {STEPS} steps: largest difference, and what is allowed (for norms)"
    names = ("case", "engine", "processes x blocks\nx accumulation")
    table = figures_table(title, *names, "losses", "norms", "weights", "allowed", "equal", "seconds", left=len(names))
    for row in rows:
        verdict = "yes" if row.equal else "NO"
        differences = [f"{value:.1e}" for value in (row.losses, row.norms, row.weights)]
        allowed = "{:g} ({:g})".format(*row.allowed)
        table.add_row(row.case, row.engine, row.split, *differences, allowed, verdict, f"{row.seconds:.0f}")
    console.print(table)


def splits_of(processes: Sequence[int] | None, *, gpu: bool) -> list[Split]:
    """The splits that are compared with one process: those asked for, or with GPUs as many processes as there are.

    Raises:
        ValueError: there is no GPU to run on.
    """
    if gpu and not torch.cuda.is_available():
        raise ValueError("--gpu was given and PyTorch finds no GPU here.")
    here = [max(n for n in SPLITS if n <= torch.cuda.device_count())] if gpu else [2, 4]
    return [SPLITS[n] for n in processes or here]


Job = tuple[str, str, Split]


def jobs_of(cases: Sequence[str], engines: Sequence[str], splits: Sequence[Split], *, gpu: bool) -> list[Job]:
    """Every case and engine under the first split, then the first two cases under the others, as far as they run."""
    first, *more = splits
    found = [(case, engine, first) for case in cases for engine in engines if is_supported(case, engine, gpu)]
    found += [(case, engine, split) for split in more for case in few(cases) for engine in engines]
    return [job for job in found if runs_on(*job[1:])]


def few(cases: Sequence[str]) -> list[str]:
    """The cases for what is not done with all."""
    return [case for case in list(CASES)[:2] if case in cases]


def main() -> None:
    parser = parser_of("benchmarks.training.engines", __doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES, metavar="NAME")
    parser.add_argument("--gpu", action="store_true", help="over NCCL, with one process for each GPU, instead of gloo")
    parser.add_argument(
        "--processes",
        nargs="+",
        type=int,
        choices=list(SPLITS),
        help="how many share a run, first in all cases and then in two; 2 and 4, or with --gpu one for each GPU",
    )
    parser.add_argument("--only-losses", action="store_true", help="compare trained runs; save and resume none")
    parser.add_argument("--minutes", type=float, help="begin no comparison that would last longer; which is said")
    parser.add_argument("--runs", help="store the runs in this folder; finished ones are not repeated")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    console = wide_console()
    if options.runs:
        Path(options.runs).mkdir(parents=True, exist_ok=True)
    with contextlib.nullcontext(options.runs) if options.runs else tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(Path(folder), gpu=options.gpu)
        splits = splits_of(options.processes, gpu=options.gpu)
        first, budget, rows = splits[0], Budget(options.minutes), []
        engines = [engine for engine in options.engines if runs_on(engine, first)]
        for engine in options.engines:
            if engine not in engines:
                say(console, f"{engine} is left out: one process runs, and it splits weights among several.")
        for job in jobs_of(options.cases, engines, splits, gpu=options.gpu):
            if budget.is_spent():
                say(console, f"{job[0]}, {job[1]}, {job[2]} is left out: {budget.describe()}")
                continue
            with budget.one():
                rows.append(comparison.compare(*job))
            print(f"{rows[-1]}", file=sys.stderr, flush=True)
        same: dict[str, bool] = {}
        moved: dict[str, float] = {}
        if not options.only_losses:
            chosen = few(options.cases)
            same = {f"{c}, {engine}": comparison.same_bytes(c, engine, first) for c in chosen for engine in engines}
            moves = [("single", ONE, engine, first) for engine in engines]
            moves += [(engine, first, "single", ONE) for engine in engines]
            moved = {
                f"{case}, {before} on {split.processes} -> {after} on {other.processes}": comparison.resume_under(
                    case, before, split, after, other
                )
                for case in RESUMED
                if case in options.cases
                for before, split, after, other in moves
            }
    show(rows, console)
    if same:
        console.print(f"one step at rate 0 saves the same bytes: {sum(same.values())} of {len(same)}")
    for name, difference in moved.items():
        console.print(f"resumed halfway, {name}: weights differ by {difference:.1e}")
    write_figures(options.json, {"rows": [vars(row) for row in rows], "same_bytes": same, "resumed": moved})
    if not (all(row.equal for row in rows) and all(same.values()) and max(moved.values(), default=0.0) <= TOLERANCE):
        sys.exit("an engine trains or saves something else than one process")


if __name__ == "__main__":
    run_benchmark(main)
