"""Training: speed and memory beside a plain loop and a floor, where a step's time goes, what each option gives.

    python -m benchmarks.training [PART …] [--json FILE] [--picture FILE]

Parts, by default all:
    speed     tokens per second and peak memory of (a) a plain loop, (b) ours, (c) the floor (training_speed.py)
    memory    peak of one loss forward and backward against the vocabulary; (batch, time, K, vocabulary) must not appear
    chunks    seconds of the loss against the size of its chunks
    step      steps of the demo config through the real Trainer: the share outside forward, backward and optimizer
    compile   uncompiled and compiled decoder layers (training_options.py, as the next ones)
    attention a long block plainly causal, with a dense mask, and document by document
    stored    stored hidden states: the first epoch and later ones
    scaling   one and two processes
    half      a step in float32 and with trainer.bf16
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from benchmarks.shared import figures_table, parser_of, run_benchmark, wide_console, write_figures
from benchmarks.training.loss_size import chunk_table, memory_table
from benchmarks.training.training_options import (
    attention_table,
    compile_table,
    half_table,
    scaling_table,
    stored_table,
)
from benchmarks.training.training_speed import MIB, speed_table
from heads.evaluation.pictures import new_figure, save_figure
from train.config import read_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Timer:
    """Seconds spent in wrapped functions, by name, without the time of wrapped functions that they call."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner
                self._inner = outer + spent

        return timed


def step_table(console: Console, config_path: str, steps: int) -> dict[str, float]:
    """Shares of a training step, after two warm-up steps."""
    from train import run as application

    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--config", config_path, "--output_dir", folder, "--evaluation.every_steps", "0"]
        config = read_config([*flags, "--trainer.max_steps", str(steps + 2), "--trainer.eval_on_start", "false"])
        arguments = application.training_arguments(config)
        model = application.build_model(config, arguments.device)
        tokenizer = application.load_tokenizer(config.backbone)
        data = application.build_datasets(
            config.data, tokenizer, num_heads=model.num_heads, vocab_size=model.backbone.vocab_size
        )
        trainer = application.build_trainer(config, arguments, model, tokenizer, data)
        trainer.add_callback(instrument(timer, trainer))
        trainer.train()
    total = timer.seconds.pop("total")
    shares = {name: seconds / total for name, seconds in timer.seconds.items()}
    shares["everything else"] = 1 - sum(shares.values())
    title = f"A training step of {Path(config_path).name}: {1000 * total / steps:,.0f} ms, {steps} steps"
    table = figures_table(title, "part", "share")
    for name, share in shares.items():
        table.add_row(name, f"{share:.1%}")
    console.print(table)
    return {**shares, "seconds_per_step": total / steps}


def instrument(timer: Timer, trainer: Any) -> Any:
    """Wrap the four parts once the first two steps are over."""
    from transformers import TrainerCallback

    class Instrument(TrainerCallback):
        started = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                model = trainer.model
                model.backbone.forward = timer.wrap("backbone forward", model.backbone.forward)
                model.forward = timer.wrap("heads forward, loss and its gradients", model.forward)
                trainer.get_batch_samples = timer.wrap("waiting for data", trainer.get_batch_samples)
                trainer.accelerator.backward = timer.wrap("backward", trainer.accelerator.backward)
                trainer.optimizer.step = timer.wrap("optimizer", trainer.optimizer.step)
                self.started = time.perf_counter()
            if state.global_step == state.max_steps:
                timer.seconds["total"] = time.perf_counter() - self.started

    return Instrument()


def draw(rows: list[dict[str, Any]], figure: Figure, path: str) -> None:
    axes = figure.subplots()
    vocabularies = [row["vocab"] for row in rows]
    for key, label, style in (
        ("full_logits_bytes", "(rows, K, vocabulary) alone", "k:"),
        ("plain_bytes", "plain loss", "o-"),
        ("chunked_bytes", "chunked loss", "s-"),
    ):
        axes.plot(vocabularies, [row[key] / MIB for row in rows], style, label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="vocabulary", ylabel="peak memory, MiB", title="Loss and backward, 4 heads"
    )
    axes.set_xticks(vocabularies, [f"{v:,}" for v in vocabularies])
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    parser = parser_of("benchmarks.training", __doc__)
    parser.add_argument("parts", nargs="*", help="what to measure, by default all")
    parser.add_argument("--config", default="configs/demo/grounded.yaml", help="run whose steps are timed")
    parser.add_argument("--steps", type=int, default=12, help="steps that are timed")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of compared steps")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--picture", help="PNG of the memory curve")
    options = parser.parse_args()
    console = wide_console()
    parts: dict[str, Callable[[], Any]] = {
        "speed": lambda: speed_table(console, options.rounds),
        "memory": lambda: memory_table(console),
        "chunks": lambda: chunk_table(console, options.rounds),
        "step": lambda: step_table(console, options.config, options.steps),
        "compile": lambda: compile_table(console, options.rounds),
        "attention": lambda: attention_table(console, options.rounds),
        "stored": lambda: stored_table(console),
        "scaling": lambda: scaling_table(console, options.config, options.steps),
        "half": lambda: half_table(console, options.rounds),
    }
    if unknown := set(options.parts) - set(parts):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; allowed are {', '.join(parts)}")
    figure = new_figure(6, 3.6) if options.picture else None
    console.print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    found = {name: measure() for name, measure in parts.items() if name in (options.parts or parts)}
    if figure is not None and "memory" in found:
        draw(found["memory"], figure, options.picture)
    write_figures(options.json, found)


if __name__ == "__main__":
    run_benchmark(main)
