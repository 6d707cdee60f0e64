"""How much the options of a training run gain: compiled layers, stored hidden states, a second process."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.shared import ROOT, figures_table
from benchmarks.training.training_speed import (
    MIB,
    WORKLOADS,
    Workload,
    backbone_step,
    our_step,
    seconds_of,
    take_turns,
)
from train.data.blocks import to_table
from train.data.hidden_states import cache_hidden_states
from train.engine.compiling import compile_layers
from train.engine.half_precision import multiplies_bfloat16
from train.loop.batches import collate
from train.objective.document_attention import document_attention
from train.objective.model import TrainedModel

DEMO_SHAPE = Workload(family="medusa", unembedding="shared", vocab=2048, width=192, layers=8, batch=16)
LONG_BLOCKS = Workload(family="medusa", unembedding="shared", vocab=2048, layers=2, batch=1, length=2048)
LARGEST_DIFFERENCE = 1e-5  # of states in float32, whose sums have another order


def compile_table(console: Console, rounds: int) -> list[dict[str, Any]]:
    """Uncompiled and compiled decoder layers, interleaved: a frozen backbone's forward, a trained one's step."""
    torch._inductor.config.force_disable_caches = True  # type: ignore[attr-defined]
    names = ("backbone", "part", "uncompiled", "compiled", "ratio", "compiling took")
    table = figures_table("torch.compile", *names, left=2)
    rows = []
    for workload in (DEMO_SHAPE, WORKLOADS[0]):
        for row in compile_rows(workload, rounds):
            rows.append(row)
            cells = [f"{1000 * row[kind]:,.0f} ms" for kind in ("plain", "compiled")]
            table.add_row(
                row["backbone"], row["part"], *cells, f"{row['ratio']:.2f}", f"{row['compile_seconds']:.0f} s"
            )
    console.print(table)
    return rows


def compile_rows(workload: Workload, rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of one backbone."""
    kinds: dict[str, tuple[bool, Callable[[TrainedModel, dict[str, Tensor]], Callable[[], Any]]]] = {
        "frozen backbone, forward": (False, without_autograd),
        "backbone and heads trained, whole step": (True, our_step),
    }
    for name, (trains, make) in kinds.items():
        batch = workload.data()
        plain, compiled = (workload.build(trains_backbone=trains) for _ in range(2))
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        compile_layers(compiled)
        steps = {"plain": make(plain, batch), "compiled": make(compiled, batch)}
        first = seconds_of(steps["compiled"])
        found = take_turns(steps, rounds)
        seconds = {kind: statistics.median(values) for kind, values in found.items()}
        yield {
            "backbone": f"{workload.layers} layers of {workload.width}, {workload.tokens:,} tokens",
            "part": name,
            **seconds,
            "ratio": statistics.median(a / b for a, b in zip(found["plain"], found["compiled"], strict=True)),
            "compile_seconds": first - seconds["compiled"],
        }


def half_table(console: Console, rounds: int) -> list[dict[str, Any]]:
    """Our step in float32 and under bfloat16 autocast, as `trainer.bf16` runs it, interleaved; and both losses."""
    has = "has" if multiplies_bfloat16() else "has no"
    columns = ("family", "float32", "bf16", "float32 / bf16", "loss in float32", "in bf16")
    table = figures_table(f"trainer.bf16 on a CPU that {has} instructions for bfloat16", *columns)
    rows = []
    for workload in WORKLOADS:
        rows.append(half_row(workload, rounds))
        row = rows[-1]
        cells = [f"{1000 * row[kind]:,.0f} ms" for kind in ("float32", "bf16")]
        table.add_row(
            row["family"], *cells, f"{row['ratio']:.2f}", f"{row['float32_loss']:.4f}", f"{row['bf16_loss']:.4f}"
        )
    console.print(table)
    return rows


def half_row(workload: Workload, rounds: int) -> dict[str, Any]:
    batch, autocast = workload.data_of_seed(), torch.autocast("cpu", torch.bfloat16)
    plain, half = (workload.build() for _ in range(2))
    losses = {
        "float32_loss": plain(**batch)["loss"].item(),
        "bf16_loss": autocast(half.__call__)(**batch)["loss"].item(),
    }
    steps = {"float32": our_step(plain, batch), "bf16": autocast(our_step(half, batch))}
    found = take_turns(steps, rounds)
    ratio = statistics.median(a / b for a, b in zip(found["float32"], found["bf16"], strict=True))
    seconds = {kind: statistics.median(values) for kind, values in found.items()}
    return {"family": workload.name, **seconds, "ratio": ratio, **losses}


def without_autograd(model: TrainedModel, batch: dict[str, Tensor]) -> Callable[[], Any]:
    return torch.no_grad()(backbone_step(model, batch))


def attention_table(console: Console, rounds: int, *, workload: Workload = LONG_BLOCKS) -> list[dict[str, Any]]:
    """The backbone's pass over one block with a dense mask, document by document, and plainly causal, interleaved.

    Plain causal attention crosses documents: it is the cost of a block that is a single document, without a mask.

    Raises:
        RuntimeError: by document, the states are not those of a dense mask.
    """
    dense, batch = workload.build(), workload.data()
    fast, rows = workload.build(), []
    title = f"Attention in a block of {workload.length:,} tokens, {workload.layers} layers of width {workload.width}"
    names = ("documents", "plain causal", "dense mask", "by document", "dense / causal", "by document / causal")
    table = figures_table(title, *names, "difference", left=0)
    with document_attention(fast, compiled=False):
        for documents in (1, 8, 32):
            ids_BT = (torch.arange(workload.length) * documents // workload.length)[None]
            steps: dict[str, Callable[[], Any]] = {
                "causal": partial(states_without_autograd, fast, batch, torch.zeros_like(ids_BT)),
                "dense": partial(states_without_autograd, dense, batch, ids_BT),
                "by document": partial(states_without_autograd, fast, batch, ids_BT),
            }
            difference = difference_of(steps["by document"](), steps["dense"]())
            found = take_turns(steps, rounds)
            ratios = {
                name: statistics.median(a / b for a, b in zip(found[name], found["causal"], strict=True))
                for name in ("dense", "by document")
            }
            milliseconds = {name: 1000 * statistics.median(seconds) for name, seconds in found.items()}
            rows.append(
                {"documents": documents, "milliseconds": milliseconds, "ratios": ratios, "difference": difference}
            )
            cells = [f"{value:,.0f} ms" for value in milliseconds.values()]
            cells += [f"{ratio:.2f}" for ratio in ratios.values()]
            table.add_row(str(documents), *cells, f"{difference:.1g}")
    console.print(table)
    return rows


def difference_of(by_document: Tensor, dense: Tensor) -> float:
    """The relative difference of states, which differ by the order of float32 sums.

    Raises:
        RuntimeError: it is larger than that.
    """
    difference = float((by_document - dense).norm() / dense.norm())
    if not difference <= LARGEST_DIFFERENCE:
        raise RuntimeError(f"attention by document gives other states than a dense mask: a difference of {difference}.")
    return difference


@torch.no_grad()
def states_without_autograd(model: TrainedModel, batch: dict[str, Tensor], document_ids_BT: Tensor) -> Tensor:
    return model.hidden_states(batch["input_ids"], document_ids_BT)


def stored_table(console: Console, num_batches: int = 4) -> dict[str, float]:
    """Tokens per second while the backbone runs, while states are stored, and with stored states."""
    workload = WORKLOADS[0]
    generator = np.random.default_rng(0)
    rows = [
        {
            "input_ids": generator.integers(0, workload.vocab, workload.length, dtype=np.int32),
            "loss_mask": np.ones(workload.length, bool),
            "document_ids": np.zeros(workload.length, np.int32),
        }
        for _ in range(num_batches * workload.batch)
    ]
    blocks = datasets.Dataset(to_table(rows)).with_format("numpy")
    model = workload.build()
    optimizer = torch.optim.AdamW(model.token_heads.parameters(), fused=True)  # type: ignore[union-attr]

    def epoch(rows: Any) -> None:
        for start in range(0, len(blocks), workload.batch):
            model(**collate(rows.__getitems__(list(range(start, start + workload.batch)))))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as folder:
        before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, Path(folder)
        epoch(blocks)  # warm-up
        start = time.perf_counter()
        cached = cache_hidden_states(
            model, blocks, collate=collate, batch_size=workload.batch, dtype=None, context=nullcontext
        )
        storing = time.perf_counter() - start
        size = cached.layout.blocks * cached.layout.block_bytes
        seconds = take_turns({"running": lambda: epoch(blocks), "stored": lambda: epoch(cached)}, 2)
        datasets.config.HF_DATASETS_CACHE = before
    running, stored = (statistics.median(seconds[name]) for name in ("running", "stored"))
    tokens = len(blocks) * workload.length
    title = f"Stored hidden states: {workload.name}, {tokens:,} tokens, {size / MIB:,.0f} MiB on disk"
    table = figures_table(title, "epoch", "tokens per second")
    for name, value in (
        ("any, backbone running", running),
        ("first, storing and training", storing + stored),
        ("later ones, stored", stored),
    ):
        table.add_row(name, f"{tokens / value:,.0f}")
    console.print(table)
    return {"running": running, "storing": storing, "stored": stored, "bytes": float(size)}


def scaling_table(console: Console, config: str, steps: int) -> dict[int, float]:
    """The user's own command on one and two processes, with one thread and one core each."""
    title = f"DDP over CPUs: {Path(config).name}, one thread for each process, {steps} steps"
    table = figures_table(title, "processes", "tokens per second", "share of double speed", left=0)
    speeds = {processes: launch(config, steps, processes) for processes in (1, 2)}
    for processes, speed in speeds.items():
        table.add_row(str(processes), f"{speed:,.0f}", "" if processes == 1 else f"{speed / (2 * speeds[1]):.0%}")
    console.print(table)
    return speeds


def launch(config: str, steps: int, processes: int) -> float:
    """Tokens per second, from the Trainer's samples per second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        command += [f"launch/{'ddp' if processes > 1 else 'single'}.yaml", "--num_processes", str(processes)]
        command += ["train.py", "--config", config, "--output_dir", folder, "--trainer.use_cpu", "true"]
        command += ["--trainer.max_steps", str(steps), "--trainer.eval_on_start", "false", "--compile", "false"]
        command += ["--evaluation.every_steps", "0", "--evaluation.num_prompts", "1", "--data.max_eval_blocks", "2"]
        command += ["--trainer.per_device_train_batch_size", "4"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processes]),
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
        (samples,) = (line["train_samples_per_second"] for line in lines if "train_samples_per_second" in line)
        length = json.loads((Path(folder) / "last/heads.json").read_text())["recipe"]["config"]["data"]["block_size"]
    return float(samples) * int(length)
