"""The result of tuning: all measurements, the fastest method, and the content of tree.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import Kind, TunedTree, name_dtype
from heads.evaluation.methods import penalty_used
from heads.evaluation.tables import describe_machine, versions
from heads.interface.token_heads import TokenHeads
from heads.products.packed import is_packed
from heads.tuning.acceptance_rates import RankCounts
from heads.tuning.config import TuneConfig
from heads.tuning.decoding_speed import Speed
from heads.tuning.pass_times import PassTimes
from heads.tuning.replay import Replay
from heads.tuning.search import Choice, pays_from
from heads.tuning.tree_with_lookup import TreeWithLookup

PLAIN, LOOKUP_ALONE, TREE, TREE_AND_LOOKUP = "plain", "lookup alone", "tuned tree", "tree with lookup"
"""The methods that are decoded after the search."""
COMPILED = ", compiled"
"""Suffix of a method whose passes are compiled."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """All measurements, and what follows from them.

    Attributes:
        replays: the texts on which acceptance was measured.
        static, dynamic: every tree of the search, with its predicted times.
        finalists: the fastest tree of each kind, by timed whole passes; none for a kind whose drafts are never
            accepted.
        plain: tokens per second of plain `generate`, timed in the same rounds as the finalists.
        with_lookup: the static tree that is predicted to be fastest beside prompt lookup; None for larger batches.
        calibration: for the fastest static tree, the seconds of a whole pass over the sum of its parts. It differs from
            1 because parts that are timed separately have warmer caches, and because a machine's speed changes.
        decoded: measured speeds by method, on the first prompts; trees are those predicted to be fastest.
    """

    config: TuneConfig
    replays: Sequence[Replay]
    times: PassTimes
    static: Sequence[Choice]
    dynamic: Sequence[Choice]
    finalists: dict[Kind, Choice]
    plain: float
    decoded: dict[str, Speed]
    with_lookup: TreeWithLookup | None = None
    calibration: float = 1.0

    @property
    def counts(self) -> RankCounts:
        return RankCounts([replay.ranks_PK for replay in self.replays])

    @property
    def num_heads(self) -> int:
        """K, even if the tree uses fewer heads."""
        return int(self.replays[0].ranks_PK.shape[1])

    @property
    def heads_pay_from(self) -> dict[int, int | None]:
        """For each head the smallest number of nodes from which every fastest static tree uses it; None: never.

        Trees are those of heads alone, without lookup.
        """
        return {head: pays_from(self.static, head) for head in range(1, 1 + self.num_heads)}

    @property
    def predicted(self) -> Kind:
        """The kind of the faster finalist, or "plain" if no finalist is faster than plain `generate`."""
        return predict_kind(self.finalists, self.plain)

    @property
    def fastest(self) -> str:
        """The fastest method that was decoded, the simplest one among equals."""
        return max(self.decoded, key=lambda name: self.decoded[name].tokens_per_second)

    @property
    def method(self) -> str:
        """The fastest method, without the suffix for compiled passes."""
        return self.fastest.removesuffix(COMPILED)

    @property
    def compile(self) -> bool:
        return self.fastest.endswith(COMPILED)

    @property
    def kind(self) -> Kind:
        """The kind of the tree of the fastest method."""
        if self.method == TREE_AND_LOOKUP:
            return "static" if self.with_lookup is not None else self.predicted
        return self.predicted if self.method == TREE else "plain"

    @property
    def lookup(self) -> int:
        return DEFAULT_LOOKUP if self.method in (LOOKUP_ALONE, TREE_AND_LOOKUP) else 0

    @property
    def tree(self) -> Tree | DynamicTree:
        if self.kind == "plain":
            return Tree.root_only()
        if self.method == TREE_AND_LOOKUP and self.with_lookup is not None:
            return self.with_lookup.choice.tree
        return self.finalists[self.kind].tree


def predict_kind(finalists: dict[Kind, Choice], plain: float) -> Kind:
    best = max(finalists, key=lambda kind: finalists[kind].tokens_per_second, default=None)
    return "plain" if best is None or finalists[best].tokens_per_second <= plain else best


def build_tuned_tree(token_heads: TokenHeads, tuning: Tuning, *, num_prompts: int) -> TunedTree:
    """The content of tree.json."""
    backbone, kind = token_heads.backbone, tuning.kind
    trees = {name: choice.tree for name, choice in tuning.finalists.items()}
    static, dynamic = trees.get("static"), trees.get("dynamic")
    if kind == "static":
        static = tuning.tree
    return TunedTree(
        kind=kind,
        paths=static.paths[1:] if isinstance(static, Tree) and kind != "plain" else (),
        dynamic=dynamic if isinstance(dynamic, DynamicTree) and kind == "dynamic" else None,
        lookup=tuning.lookup,
        compile=tuning.compile,
        packed=is_packed(backbone.model) and not tuning.compile,  # compiled passes use plain weights
        prediction=describe_prediction(tuning),
        measured_on={
            **describe_machine(backbone.device),
            "device_type": backbone.device.type,
            "dtype": name_dtype(backbone.dtype),
            "batch": tuning.times.batch,
            "context": tuning.times.context,
            "prompts": num_prompts,
            **dataclasses.asdict(tuning.config),
            "repetition_penalty": penalty_used(backbone.model, tuning.config.repetition_penalty),
            "versions": versions(),
        },
        heads_sha256=token_heads.checksum,
    )


def join_batches(made: Sequence[TunedTree], token_heads: TokenHeads) -> tuple[TunedTree, list[int]]:
    """One tree.json of the new trees, and of those in the heads' present file for other batch sizes.

    Trees in the present file that were fitted to other weights, or to another device or dtype, are dropped.

    Returns:
        The tree of the smallest batch size, which holds the others; and the batch sizes taken from the present file.
    """
    before = token_heads.tuned_tree
    known = before.entries if isinstance(before, TunedTree) else ()
    sizes = {one.batch for one in made}
    older = [one for one in known if one.batch and one.batch not in sizes and one.why_unusable(token_heads) is None]
    alone = [dataclasses.replace(one, other_batches=()) for one in (*made, *older)]
    first, *others = sorted(alone, key=lambda one: one.batch or 0)
    return dataclasses.replace(first, other_batches=tuple(others)), sorted(one.batch or 0 for one in older)


def describe_prediction(tuning: Tuning) -> dict[str, Any]:
    """Predictions for the passes after the prompt's, and measured tokens per second.

    `lookup` is the length of the looked-up chain that the predictions are for. It is left out where a tree is chosen
    with lookup for a batch above 1: what lookup adds is not predicted there, and the figures are of the heads alone.
    `heads_used` is the number of heads that draft; `heads_pay_from` as in `Tuning`, one entry for each head.
    """
    used = {"heads_used": tuning.tree.depth, "heads_pay_from": list(tuning.heads_pay_from.values())}
    return predict_speed(tuning) | used


def predict_speed(tuning: Tuning) -> dict[str, Any]:
    decoded = {name: round(speed.tokens_per_second, 2) for name, speed in tuning.decoded.items()}
    if tuning.kind == "plain":
        best = max((choice.tokens_per_second for choice in tuning.finalists.values()), default=None)
        return {
            "tokens_per_pass": 1.0,
            "tokens_per_second": round(tuning.plain, 2),
            "ratio_to_plain": 1.0,
            "best_tree_ratio_to_plain": None if best is None else round(best / tuning.plain, 3),
            "decoded": decoded,
        }
    if tuning.lookup and tuning.with_lookup is not None:
        return {
            "tokens_per_pass": round(tuning.with_lookup.tokens_per_pass, 3),
            "tokens_per_second": round(tuning.with_lookup.tokens_per_second, 2),
            "ratio_to_plain": round(tuning.with_lookup.tokens_per_second / tuning.plain, 3),
            "lookup": tuning.lookup,
            "decoded": decoded,
        }
    choice = tuning.finalists[tuning.kind]
    return {
        "tokens_per_pass": round(choice.tokens_per_pass, 3),
        "tokens_per_second": round(choice.tokens_per_second, 2),
        "ratio_to_plain": round(choice.tokens_per_second / tuning.plain, 3),
        "milliseconds_per_pass": round(1000 * choice.seconds_per_pass, 3),
        **({} if tuning.lookup else {"lookup": 0}),
        "decoded": decoded,
    }
