"""Planned tensor memory beside the measured peak of real training steps.

    python -m benchmarks.training.plan [--case NAME …]

Each case trains two steps of a small random Llama through the real Trainer, in its own process. On CPUs the peak of
allocated tensors is read from the allocator's record (torch.profiler), on CUDA from max_memory_allocated. Resident
memory beside it includes libraries' workspaces and memory that the allocator does not return. The exit code is 1 if
plan and measurement differ by more than 15 %.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PrinterCallback

from benchmarks.shared import figures_table, in_own_process, parser_of, run_benchmark, wide_console
from heads.backbone.loading import BackboneConfig
from heads.data.documents import DataConfig, SourceConfig
from train import run as application
from train.config import RatesConfig, TrainConfig
from train.data.blocks import PackedData
from train.data.report import DataReport
from train.plan.memory import LAUNCHES, memory_of
from train.plan.plan import make_plan

TOLERANCE = 0.15
STEPS = 2  # the optimizer's states exist from the second on
MARK = "planned steps"
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TRAINED = RatesConfig(base=1e-4, heads=1e-3, heads_to_base=1e-5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of run, at a size.

    Attributes:
        batch: blocks of a micro-batch.
        block_size: tokens of a block.
        trainer: further fields of TrainingArguments.
    """

    family: str | None
    rates: RatesConfig = field(default_factory=RatesConfig)
    checkpointing: bool = False
    batch: int = 4
    block_size: int = 128
    trainer: dict[str, Any] = field(default_factory=dict)


KINDS: dict[str, dict[str, Any]] = {
    "grounded, frozen": {"family": "grounded"},
    "medusa, frozen": {"family": "medusa"},
    "dynamo, three rates": {"family": "dynamo", "rates": TRAINED},
    "dynamo, checkpointing": {"family": "dynamo", "rates": TRAINED, "checkpointing": True},
    "backbone alone": {"family": None, "rates": RatesConfig(base=1e-4)},
}
MIXED = {"bf16": True, "gradient_accumulation_steps": 2}
SHAPES = ((4, 128), (2, 512))
CASES = {
    f"{name}, {batch} x {block_size}": Case(**kind, batch=batch, block_size=block_size)
    for name, kind in KINDS.items()
    for batch, block_size in SHAPES
} | {"dynamo, bf16, accumulating, 2 x 64": Case(family="dynamo", rates=TRAINED, batch=2, block_size=64, trainer=MIXED)}


def config_of(case: Case, folder: Path) -> TrainConfig:
    """A run of the case on a random backbone whose shape is written into the folder."""
    LlamaConfig(**SHAPE, max_position_embeddings=case.block_size).save_pretrained(folder)
    fields = {"per_device_train_batch_size": case.batch, "max_steps": STEPS, "use_cpu": not torch.cuda.is_available()}
    return TrainConfig(
        output_dir=str(folder / "run"),
        backbone=BackboneConfig(
            name_or_path=str(folder), dtype="float32", random_weights=True, gradient_checkpointing=case.checkpointing
        ),
        data=DataConfig(train=[SourceConfig(path="random tokens")], block_size=case.block_size),
        family=case.family,
        rates=case.rates,
        trainer={**fields, "disable_tqdm": True, "logging_strategy": "no", **case.trainer},
        report_to=[],
    )


def planned(config: TrainConfig) -> int:
    """Bytes of tensors at the peak of a step of one process."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    plan = make_plan(config, device_type=device_type, tokens=config.data.block_size)
    return sum(memory_of(LAUNCHES[0], plan.sizes, 1).training.values())


def train_once(config: TrainConfig) -> tuple[int, int]:
    """The peak of allocated tensors and the growth of resident memory, both in bytes."""
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = peak_on_cuda(config) if torch.cuda.is_available() else peak_on_cpu(config)
    return peak, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def peak_on_cuda(config: TrainConfig) -> int:
    trainer = build_trainer(config)
    torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return torch.cuda.max_memory_allocated()


def peak_on_cpu(config: TrainConfig) -> int:
    """Peak bytes of allocated tensors during the steps, the model included."""
    gc.collect()  # no tensor of an earlier model may be freed during the measurement
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        trainer = build_trainer(config)
        with torch.profiler.record_function(MARK):
            trainer.train()
    path = Path(config.output_dir).parent / "trace.json"
    profile.export_chrome_trace(str(path))
    return highest_total(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def highest_total(events: list[dict[str, Any]]) -> int:
    """The highest total of a profile's memory events after the mark began, minus the total before the first event.

    >>> def memory(ts, total, size=0):
    ...     return {"name": "[memory]", "ts": ts, "args": {"Total Allocated": total, "Bytes": size}}
    >>> highest_total([memory(1, 900, 800), {"name": "planned steps", "ts": 2}, memory(3, 500), memory(4, 700)])
    600
    """
    start = min(event["ts"] for event in events if event["name"] == MARK)
    found = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    before = found[0]["args"]["Total Allocated"] - found[0]["args"]["Bytes"]
    return max(event["args"]["Total Allocated"] for event in found if event["ts"] >= start) - before


def build_trainer(config: TrainConfig) -> Any:
    """The real Trainer over blocks of random tokens, all supervised, each one document."""
    arguments = application.training_arguments(config)
    model = application.build_model(config, arguments.device)
    tokens = torch.randint(3, SHAPE["vocab_size"], (8, config.data.block_size)).tolist()
    length = config.data.block_size
    rows: Any = [{"input_ids": ids, "loss_mask": [True] * length, "document_ids": [0] * length} for ids in tokens]
    data = PackedData(train=rows, eval=None, report=DataReport(train=[], eval=[]))
    application.skip_evaluation(arguments)
    trainer = application.build_trainer(config, arguments, model, None, data)
    trainer.remove_callback(PrinterCallback)
    return trainer


def compare(name: str) -> tuple[int, int, int]:
    """Bytes of one case: planned, measured, growth of resident memory."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(CASES[name], Path(folder))
        return planned(config), *in_own_process(train_once, config)


def main() -> None:
    parser = parser_of("benchmarks.training.plan", __doc__)
    parser.add_argument("--case", nargs="*", choices=list(CASES), help="cases to run, by default all")
    title = "Peak of a training step, MB: planned and measured tensors, and resident memory beside them"
    measured_of = ("planned", "measured", "planned / measured", "resident")
    table = figures_table(title, "case, blocks x tokens", *measured_of)
    worst = 0.0
    for name in parser.parse_args().case or CASES:
        plan, peak, resident = compare(name)
        worst = max(worst, abs(plan / peak - 1))
        table.add_row(name, *(f"{n / 1e6:.1f}" for n in (plan, peak)), f"{plan / peak:.3f}", f"{resident / 1e6:.0f}")
    wide_console().print(table)
    print(f"largest difference: {worst:.1%}; allowed: {TOLERANCE:.0%}")
    sys.exit(int(worst > TOLERANCE))


if __name__ == "__main__":
    run_benchmark(main)
