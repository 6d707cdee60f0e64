"""In which form of the weights further nodes of a pass cost little on this machine: the dtype, plain or packed.

A pass over N nodes reads every weight once, as a plain step does, and multiplies N rows with it. bfloat16 halves the
time of both on a processor with instructions for it. On one without, each row of a bfloat16 product costs as much as
the first, and a tree of eight nodes can take eight plain steps. Packed weights (heads/products/packed.py) make further
rows cheap: they save laying a weight out for each product of several rows, or reading it for each row. Neither depends
on the heads, so timing matrix products is enough: the rows of 1 to 16 nodes are multiplied with copies of the last
layer's largest matrix, so many that no cache holds them.
"""
# R rows, O outputs, I inputs

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heads.backbone.model import Backbone
from heads.backbone.projection import unpacked
from heads.products.packed import is_packed, pack_weights, what_stops_packing
from heads.tuning.search import Choice
from heads.tuning.timing import Clock, interleaved_medians

DTYPES = (torch.float32, torch.bfloat16)
NODES = (1, 2, 4, 8, 16)
BEYOND_CACHES = 64 * 2**20
"""Bytes that a round of float32 products reads at least, unless that takes more matrices than there are layers."""
REPEATS = 5


class Form(NamedTuple):
    """How a backbone's weights are kept.

    >>> str(Form(torch.bfloat16)), str(Form(torch.float32, packed=True))
    ('bfloat16', 'float32 packed')
    """

    dtype: torch.dtype
    packed: bool = False

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") + (" packed" if self.packed else "")

    def options(self, before: Form) -> str:
        """The options of a command that leads from another form to this one.

        >>> Form(torch.bfloat16, packed=True).options(Form(torch.float32))
        '--dtype bfloat16 --pack'
        """
        dtype = [] if self.dtype == before.dtype else [f"--dtype {Form(self.dtype)}"]
        pack = [] if self.packed == before.packed else ["--pack" if self.packed else "no --pack"]
        return " ".join(dtype + pack)


FormCosts = Mapping[Form, Mapping[int, float]]
"""Seconds of a pass's products by form and number of nodes."""


def form_of(backbone: Backbone) -> Form:
    return Form(backbone.dtype, is_packed(backbone.model))


@torch.no_grad()
def measure_forms(backbone: Backbone, batch: int, clock: Clock) -> FormCosts:
    """Seconds by form and number of nodes for a batch of `batch` rows: medians of interleaved rounds.

    Packed forms are measured where this machine can pack the dtype.
    """
    largest = max((p for p in backbone.layers[-1].parameters() if p.ndim == 2), key=lambda p: p.numel())
    weight_OI = unpacked(largest.detach())
    copies = min(backbone.num_layers, math.ceil(BEYOND_CACHES / (4 * weight_OI.numel())))
    tasks: dict[tuple[Form, int], Callable[[], float]] = {}
    forms = [Form(dtype) for dtype in DTYPES]
    forms += [Form(dtype, packed=True) for dtype in DTYPES if not what_stops_packing(weight_OI[:1].to(dtype))]
    for form in forms:
        layers = [layer_of(weight_OI.to(form.dtype, copy=True), form) for _ in range(copies)]
        tasks |= {(form, nodes): timed(layers, batch * nodes, clock) for nodes in NODES}
    found = interleaved_medians(tasks, REPEATS)
    return {form: {nodes: found[form, nodes] for nodes in NODES} for form in forms}


def layer_of(weight_OI: Tensor, form: Form) -> nn.Linear:
    """The linear layer of a weight, packed where the form is."""
    outputs, inputs = weight_OI.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OI, requires_grad=False)
    if form.packed:
        pack_weights(layer)
    return layer


def timed(layers: Sequence[nn.Linear], rows: int, clock: Clock) -> Callable[[], float]:
    """A function that multiplies `rows` rows with each layer's weight, and returns the seconds that it took."""
    weight_OI = layers[0].weight
    x_RI = torch.ones(rows, weight_OI.shape[1], dtype=weight_OI.dtype, device=weight_OI.device)

    @torch.no_grad()
    def run() -> float:
        start = clock()
        for layer in layers:
            layer(x_RI)
        return clock() - start

    return run


def advise(costs: FormCosts, tuned: Form, choices: Sequence[Choice]) -> str:
    """What 8 nodes cost in each form, which form has the flattest passes and which would emit most tokens per second.

    Args:
        tuned: the form of the tuning.
        choices: the trees of the search; their tokens per pass hardly depend on the form.

    >>> flat, steep = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.5, 16: 2.0}, {1: 0.5, 2: 1.0, 4: 2.0, 8: 4.0, 16: 8.0}
    >>> advise({Form(torch.float32): flat, Form(torch.bfloat16): steep}, Form(torch.float32), [])
    'By matrix products alone a pass of 8 nodes costs 1.5 (float32) and 8.0 (bfloat16) plain steps: passes are \
flattest in float32; bfloat16 would be 2.00 × as fast as float32, which was tuned here: try --dtype bfloat16.'
    """
    steps = {form: one[8] / one[1] for form, one in costs.items()}
    told = [f"{cost:.1f} ({form})" for form, cost in steps.items()]
    text = f"By matrix products alone a pass of 8 nodes costs {', '.join(told[:-1])} and {told[-1]} plain steps: "
    text += f"passes are flattest in {min(steps, key=lambda form: steps[form])}; "
    speeds = {form: most_tokens(one, choices) for form, one in costs.items()}
    best = max(speeds, key=lambda form: speeds[form])
    if best == tuned or tuned not in speeds:
        return text + f"{best} would be the fastest here."
    gain = speeds[best] / speeds[tuned]
    return text + f"{best} would be {gain:.2f} × as fast as {tuned}, which was tuned here: try {best.options(tuned)}."


def most_tokens(seconds: Mapping[int, float], choices: Sequence[Choice]) -> float:
    """Tokens per second of a row, by plain steps or by the best tree of a measured size, whichever is more."""
    trees = [one.tokens_per_pass / seconds[one.nodes] for one in choices if one.nodes in seconds]
    return max([1 / seconds[1], *trees])
