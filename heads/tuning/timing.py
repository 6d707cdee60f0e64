"""Measure the cost of a pass on this machine: verifying by nodes, drafting by depth and expanding nodes, and the rest.

Verifying and drafting are timed separately, at a given batch size and context length. The rest (acceptance, commit,
Python) is the time of a whole `generate` pass with a reference tree minus these two. Measurements are interleaved,
repeated, and reduced to medians, so that a slow moment of the machine affects all of them alike.
"""
# B row, S context position, N node, M expanding node of one level (over all rows)

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from heads.backbone.model import CommitPlan
from heads.decoding.generate import generate
from heads.decoding.proposers.static_tree import best_tokens
from heads.decoding.tree_decoding import TreeDecoding
from heads.decoding.trees.dynamic import DynamicTree, grow
from heads.decoding.trees.static import Tree, grow_tree
from heads.evaluation.throughput import rotated
from heads.interface.token_heads import TokenHeads
from heads.tuning.pass_times import PassTimes

NODES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
EXPANDING = (1, 2, 4, 8, 16)
WIDTHS = (1, 2, 4, 8)
REFERENCE_NODES, CANDIDATES, TIMED_TOKENS = 8, 4, 24
CHAIN = 6
"""Nodes of the chain that backbones with recurrent layers verify, to compare with the root and siblings below it."""
Clock = Callable[[], float]
TaskKey = TypeVar("TaskKey", bound=Hashable)


def measure_times(
    token_heads: TokenHeads,
    tokens_BS: Tensor,
    *,
    settings: dict[str, Any],
    repeats: int,
    clock: Clock,
    advance: Callable[[], Any] = lambda: None,
) -> PassTimes:
    """Measure each term of a pass after the context `tokens_BS`.

    Args:
        settings: arguments of `generate` for choosing tokens; processors take time in whole passes.
        clock: returns seconds; must wait for an accelerator to finish (`clock_of`).
        advance: called `repeats` + 1 times.
    """
    timer = PassTimer(token_heads, tokens_BS, clock, settings)
    medians = interleaved_medians(timer.tasks(), repeats, advance)
    found: dict[str, dict[Any, float]] = {"verify": {}, "step": {}, "grow": {}, "pass": {}, "chain": {}}
    for (kind, at), seconds in medians.items():
        found[kind][at] = seconds
    modelled = PassTimes(
        batch=len(tokens_BS),
        context=tokens_BS.shape[1],
        plain=found["pass"]["plain"],
        verify=found["verify"],
        step=found["step"],
        grow=found["grow"],
        rest_static=0.0,
        rest_dynamic=0.0,
        grounded=token_heads.grounded,
        level=seconds_per_level(found["chain"], found["verify"]),
    )
    static, dynamic = found["pass"]["static"], found["pass"]["dynamic"]
    rest = {
        "rest_static": max(0.0, static - modelled.static(timer.static)),
        "rest_dynamic": max(0.0, dynamic - modelled.dynamic(timer.dynamic)),
    }
    return PassTimes(**{**vars(modelled), **rest})


def seconds_per_level(chain: Mapping[int, float], verify: Mapping[int, float]) -> float:
    """Seconds that each level beyond the first adds, from a chain and a flat tree of equal size; 0 without a chain.

    >>> seconds_per_level({6: 5.0}, {6: 3.0}), seconds_per_level({}, {6: 3.0})
    (0.5, 0.0)
    """
    return max([0.0, *((seconds - verify[nodes]) / (nodes - 2) for nodes, seconds in chain.items())])


def interleaved_medians(
    tasks: Mapping[TaskKey, Callable[[], float]], repeats: int, advance: Callable[[], Any] = lambda: None
) -> dict[TaskKey, float]:
    """The median of each task's results, in rounds of all tasks, each beginning with another one.

    >>> interleaved_medians({"a": lambda: 1.0, "b": iter([9.0, 2.0, 3.0, 7.0]).__next__}, repeats=3)
    {'a': 1.0, 'b': 3.0}
    """
    found: dict[TaskKey, list[float]] = {key: [] for key in tasks}
    for task in tasks.values():
        task()  # warm-up: the first call allocates memory and chooses kernels
    advance()
    for repeat in range(repeats):
        for key in rotated(list(tasks), repeat):
            found[key].append(tasks[key]())
        advance()
    return {key: statistics.median(seconds) for key, seconds in found.items()}


class PassTimer:
    """A backbone and its heads after a context, ready to time each stage of a pass."""

    def __init__(self, token_heads: TokenHeads, tokens_BS: Tensor, clock: Clock, settings: dict[str, Any]) -> None:
        self.token_heads, self.backbone = token_heads, token_heads.backbone
        self.tokens_BS, self.clock, self.settings = tokens_BS, clock, settings
        self.projections = [token_heads.projection(k) for k in range(1, token_heads.num_heads + 1)]
        self.static = grow_tree(min(REFERENCE_NODES, 1 + token_heads.num_scored), token_heads.num_heads)
        width = WIDTHS[2] if token_heads.grounded else 1
        self.dynamic = DynamicTree(nodes=REFERENCE_NODES, depth=token_heads.num_heads, width=width)
        valid_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        with torch.no_grad():
            self.state, output = self.backbone.prefill(tokens_BS, valid_BS, token_heads.taps)
            self.drafting = token_heads.commit(
                None, output.tokens_BN, output.taps, output.positions_BN, CommitPlan.whole(valid_BS)
            )

    def tasks(self) -> dict[tuple[str, Any], Callable[[], float]]:
        """The measurements by name; each returns seconds."""
        heads_range = range(1, self.token_heads.num_heads + 1)
        grounded = self.token_heads.grounded
        found: dict[tuple[str, Any], Callable[[], float]] = {("verify", n): self.verify(n) for n in NODES}
        if self.backbone.recurrence is not None:
            found["chain", CHAIN] = self.verify(CHAIN, Tree([[0] * depth for depth in range(1, CHAIN)]))
        for k in heads_range:
            for expanding in EXPANDING if grounded and k > 1 else EXPANDING[:1]:
                found["step", (k, expanding)] = self.step(k, expanding)
            for width in WIDTHS if grounded else WIDTHS[:1]:
                found["grow", (k, width)] = self.grow(k, width)
        found["pass", "plain"] = lambda: self.seconds_per_pass(None)
        for name, tree in (("static", self.static), ("dynamic", self.dynamic)):
            found["pass", name] = self.whole_pass(tree)
        return found

    def timed(self, function: Callable[[], Any]) -> Callable[[], float]:
        @torch.no_grad()
        def run() -> float:
            start = self.clock()
            function()
            return self.clock() - start

        return run

    def verify(self, nodes: int, tree: Tree | None = None) -> Callable[[], float]:
        """A pass over `nodes` nodes: those of the tree, by default the root with siblings below it."""
        if tree is None:
            tree = Tree([[rank] for rank in range(nodes - 1)]) if nodes > 1 else Tree.root_only()
        device = self.tokens_BS.device
        back_N = -1 - torch.arange(nodes, device=device) % self.tokens_BS.shape[1]
        tokens_BN = self.tokens_BS[:, back_N]  # different tokens, since a mixture of experts reads the experts they use
        depth_N, sees_NN = tree.depth_tensor(device), tree.sees_NN(device)

        def run() -> None:
            output = self.backbone.verify(self.state, tokens_BN, depth_N, sees_NN, self.token_heads.taps)
            self.backbone.logits(output.final_BND)

        return self.timed(run)

    @torch.no_grad()
    def step(self, k: int, expanding: int) -> Callable[[], float]:
        """Head k's step over `expanding` nodes of each row, with its projection and the search for candidates."""
        heads, rows_B = self.token_heads, torch.arange(len(self.tokens_BS), device=self.tokens_BS.device)
        level, parents_M, tokens_M = heads.first_level(self.drafting), rows_B, self.tokens_BS[:, -1]
        for above in range(1, k):
            _, level = heads.step(above, level, tokens_M, parents_M)
            if above == 1:
                tokens_M, parents_M = (x_M.repeat_interleave(expanding) for x_M in (tokens_M, parents_M))
            else:
                parents_M = torch.arange(len(tokens_M), device=tokens_M.device)
        at, inputs = level, (tokens_M, parents_M)

        def run() -> None:
            hidden_MD, _ = heads.step(k, at, *inputs)
            best_tokens(self.projections[k - 1], hidden_MD, CANDIDATES)

        return self.timed(run)

    def grow(self, depth: int, width: int) -> Callable[[], float]:
        tree = DynamicTree(nodes=self.dynamic.nodes, depth=depth, width=width)
        root_B = self.tokens_BS[:, -1]
        return self.timed(lambda: grow(self.token_heads, self.projections, self.drafting, root_B, tree).shapes())

    def whole_pass(self, tree: Tree | DynamicTree) -> Callable[[], float]:
        decoding = TreeDecoding(self.token_heads, tree, lookup=0)
        return lambda: self.seconds_per_pass(decoding)

    def seconds_per_pass(self, decoding: TreeDecoding | None) -> float:
        """Mean seconds of the passes inside a `generate` call, before any row ends; None is plain `generate`."""
        stamps = Timestamps(self.clock)
        output = generate(
            self.backbone.model,
            decoding,
            input_ids=self.tokens_BS,
            attention_mask=torch.ones_like(self.tokens_BS),
            max_new_tokens=TIMED_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            streamer=stamps,
            **self.settings,
        )
        if decoding is None:
            return stamps.mean(TIMED_TOKENS - 1, rows=1)
        passes = min(drafted.count(False) for drafted in output.stats.drafted) - 1
        return stamps.mean(max(1, passes - 1), rows=len(self.tokens_BS))


class Timestamps:
    """A streamer that records when the tokens of each pass arrive."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.seconds: list[float] = []
        self.prompt_seen = False

    def put(self, _: Tensor) -> None:
        if self.prompt_seen:
            self.seconds.append(self.clock())
        self.prompt_seen = True

    def end(self) -> None:
        """Nothing is left to record."""

    def mean(self, passes: int, rows: int) -> float:
        """Mean seconds of the first `passes` passes after the prompt's; each pass has recorded `rows` times.

        >>> stamps = Timestamps(iter([1.0, 1.5, 3.0, 3.5, 5.0, 5.5]).__next__)
        >>> for _ in range(7):
        ...     stamps.put(torch.zeros(1))
        >>> stamps.mean(2, rows=2)
        2.0
        """
        first, last = self.seconds[rows - 1], self.seconds[rows - 1 + passes * rows]
        return (last - first) / passes
