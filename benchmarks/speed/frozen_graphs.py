"""Frozen graphs beside packed weights: `python -m benchmarks.speed.frozen_graphs`, a pass of few rows in five forms.

torch.compile can freeze a graph: weights become its constants, in the layout of oneDNN's kernels or, with
`max_autotune`, of Inductor's own C++ products, whichever is faster when both are tried. `heads.pack_weights` gives a
model that is not compiled the same layout, or our own kernel where oneDNN does not multiply the dtype. Measured at the
price of 0.16 billion weights (the widened demo backbone): milliseconds of a pass, seconds of its first call, which
compiles or packs, and whether edited weights are noticed.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks.shared import describe_cpu, figures_table, parser_of, run_benchmark, say, wide_console
from benchmarks.speed.pass_costs import filled_state, make_pass
from benchmarks.speed.real_costs.cells import CONTEXT, timed
from benchmarks.speed.real_costs.shapes import SHAPES
from benchmarks.speed.real_costs.widened import open_widened
from heads.backbone.compiling.compiled_backbone import CompiledBackbone
from heads.backbone.model import Backbone
from heads.products.packed import pack_weights
from heads.tuning.timing import interleaved_medians

SHAPE = "0.16B"
FREEZING = {"freezing": True, "cpp.weight_prepack": True}
TEMPLATES = {**FREEZING, "max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"}
FORMS: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "plain": (False, False, {}),
    "packed": (True, False, {}),
    "compiled": (False, True, {}),
    "compiled, frozen": (False, True, FREEZING),
    "compiled, frozen, C++ products": (False, True, TEMPLATES),
}
"""By name: whether weights are packed, whether passes are compiled, and Inductor's settings."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    say(console, f"{describe_cpu()}, passes of {options.rows} rows after {CONTEXT} tokens, {SHAPE} weights")
    for dtype in options.dtypes:
        console.print(measure(dtype, options.rows, options.rounds))


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.frozen_graphs", __doc__)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["bfloat16", "float32"])
    parser.add_argument("--rows", type=int, default=8, help="nodes of a pass")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved; medians count")
    return parser


def measure(dtype: str, rows: int, rounds: int) -> Table:
    """A row for each form of the backbone; all forms share the weights that they were made of."""
    model = open_widened(("medusa",), SHAPES[SHAPE], getattr(torch, dtype)).model
    table = figures_table(dtype, "form", "ms", "first call, s", "edits", left=1)
    passes = {name: FirstPass(model, rows, *form) for name, form in FORMS.items()}
    seconds = interleaved_medians({name: timed(one.run, time.perf_counter) for name, one in passes.items()}, rounds)
    for name, one in passes.items():
        noticed = "noticed" if one.notices_edits() else "missed"
        table.add_row(name, f"{1000 * seconds[name]:.1f}", f"{one.seconds:.1f}", noticed)
    return table


class FirstPass:
    """A form of the model after its first pass, which packs or compiles; what that took is kept.

    Attributes:
        run: a further pass, which returns its logits.
    """

    def __init__(self, model: Any, rows: int, pack: bool, compile: bool, settings: dict[str, Any]) -> None:
        twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
        if pack:
            pack_weights(twin)
        backbone = CompiledBackbone(Backbone(twin)) if compile else Backbone(twin)
        layers: list[Any] = list(backbone.layers)
        products = [layer.mlp.down_proj for layer in layers]
        self.edited = next(one for one in products if one.weight.any())  # layers that were added have zeros
        self.run: Callable[[], Any] = make_pass(backbone, filled_state(Backbone(model), CONTEXT), rows)
        start = time.perf_counter()
        with torch._inductor.config.patch(**settings):
            self.run()
        self.seconds = time.perf_counter() - start

    @torch.no_grad()
    def notices_edits(self) -> bool:
        """Whether logits change when a weight is doubled in place; it is halved again."""
        before = self.run().clone()
        self.edited.weight.mul_(2)
        changed = not torch.allclose(self.run(), before)
        self.edited.weight.div_(2)
        return changed


if __name__ == "__main__":
    run_benchmark(main)
