"""The cost of a teacher in the loss, forward and backward alone: `python -m benchmarks.training.loss_costs`.

Each loss of docs/train.md is timed beside hard labels at several sizes, interleaved, in the chunks of training
(train/objective/losses.py); figures are medians. The limit beside them counts only matrix products with the
unembedding: three for hard labels (logits, and gradients of states and weights; two if the unembedding is frozen) and
one more for a teacher's logits, which the heads that it teaches share. Time above the limit goes to softmaxes,
logarithms and top-n over the vocabulary, which are bound by memory.
"""
# R row, D model width, V vocabulary

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.shared import describe_cpu, figures_table, parser_of, run_benchmark, say, wide_console, write_figures
from heads.backbone.projection import Projection
from heads.evaluation.tables import describe_machine, versions
from heads.tuning.timing import interleaved_medians
from train.objective.losses import weighted_loss
from train.objective.soft_targets import Distillation
from train.objective.targets import HeadRows

SIZES = ("2048,128,8192", "32000,256,1024", "32000,1024,512")
HARD, SHARED = "hard", "hard, shared"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A column of the table.

    Attributes:
        teacher: fields of its `Distillation`; None is hard labels.
        trained: the unembedding is the head's own and is trained.
        heads: number of heads, each with its own unembedding; the ratio is to as many with hard labels.
        apart: whether each head computes the teacher's logits itself, as heads with different teachers do.
    """

    teacher: Mapping[str, Any] | None
    trained: bool = True
    heads: int = 1
    apart: bool = False

    @property
    def beside(self) -> str:
        """Name of the hard-label loss to compare with."""
        return HARD if self.trained else SHARED

    @property
    def limit(self) -> float:
        """The number of products divided by that of hard labels."""
        own = self.heads * (3 if self.trained else 2)
        asked = self.heads if self.apart else 1
        return (own + asked * (self.teacher is not None)) / own


LOSSES = {
    HARD: Loss(teacher=None),
    SHARED: Loss(teacher=None, trained=False),
    "soft": Loss(teacher={}),
    "soft, shared": Loss(teacher={}, trained=False),
    "kl": Loss(teacher={"divergence": "kl"}),
    "T = 2": Loss(teacher={"temperature": 2.0}),
    "top_n 64": Loss(teacher={"top_n": 64}),
    "4 heads": Loss(teacher={}, heads=4),
    "4, apart": Loss(teacher={}, heads=4, apart=True),
}


class LossWorkload:
    """Random weights and states of one size; timings do not depend on their values."""

    def __init__(self, vocabulary: int, width: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight_VD, self.teacher_VD = (torch.randn(vocabulary, width, generator=generator) / 10 for _ in range(2))
        self.hidden_RD, self.target_RD = (torch.randn(rows, width, generator=generator) for _ in range(2))
        self.labels_R = torch.randint(vocabulary, (rows,), generator=generator)

    def step(self, loss: Loss) -> Callable[[], float]:
        """Seconds of one forward and backward."""
        weights = [self.weight_VD.clone().requires_grad_(loss.trained) for _ in range(loss.heads)]

        def run() -> float:
            hidden = [self.hidden_RD.clone().requires_grad_() for _ in weights]
            for weight_VD in weights:
                weight_VD.grad = None
            start = time.perf_counter()
            weighted_loss(map(partial(self.rows, loss), weights, hidden))[0].backward()
            return time.perf_counter() - start

        return run

    def rows(self, loss: Loss, weight_VD: Tensor, hidden_RD: Tensor) -> HeadRows:
        teacher = None
        if loss.teacher is not None:
            unembedding = Projection(weight=self.teacher_VD)
            states_ND = self.target_RD.clone() if loss.apart else self.target_RD
            teacher = Distillation(states_ND=states_ND, projection=unembedding, **loss.teacher)
        return HeadRows(
            projection=Projection(weight=weight_VD),
            hidden_RD=hidden_RD,
            labels_R=self.labels_R,
            gates=None if loss.trained else [0.0],
            hard=1.0 if teacher is None else 0.0,
            distillation=teacher,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = {size: measure(read_size(size), options.rounds) for size in options.sizes}
    console = wide_console()
    say(console, describe_cpu())
    console.print(table(found))
    measured_on = {"machine": describe_machine(torch.device("cpu")), "versions": versions()}
    write_figures(options.json, {**measured_on, "milliseconds": found})


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.training.loss_costs", __doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="V,D,R", help="vocabulary, width, rows")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each median")
    parser.add_argument("--threads", type=int, default=1, help="threads of a product")
    parser.add_argument("--json", metavar="FILE", help="write milliseconds, machine and versions here")
    return parser


def read_size(text: str) -> tuple[int, int, int]:
    """
    >>> read_size("2048,128,8192")
    (2048, 128, 8192)

    Raises:
        ValueError: not three whole numbers above 0.
    """
    numbers = text.split(",")
    if len(numbers) != 3 or not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--sizes has {text!r}; give vocabulary, width and rows as 32000,1024,512.")
    vocabulary, width, rows = map(int, numbers)
    return vocabulary, width, rows


def measure(size: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Milliseconds of each loss."""
    workload = LossWorkload(*size)
    seconds = interleaved_medians({name: workload.step(loss) for name, loss in LOSSES.items()}, rounds)
    return {name: 1000 * value for name, value in seconds.items()}


def table(found: Mapping[str, Mapping[str, float]]) -> Table:
    title = "\nloss with a teacher over loss with hard labels, forward and backward; own unembeddings unless shared"
    soft = [name for name, loss in LOSSES.items() if loss.teacher is not None]
    made = figures_table(title, "vocabulary,\nwidth, rows", f"{HARD},\nms", f"{SHARED},\nms", *soft)
    for size, milliseconds in found.items():
        ratios = [milliseconds[name] / milliseconds[LOSSES[name].beside] / LOSSES[name].heads for name in soft]
        plain = [f"{milliseconds[name]:.0f}" for name in (HARD, SHARED)]
        made.add_row(size, *plain, *(f"{ratio:.2f}" for ratio in ratios))
    made.add_row("limit by products", "", "", *(f"{LOSSES[name].limit:.2f}" for name in soft))
    return made


if __name__ == "__main__":
    run_benchmark(main)
