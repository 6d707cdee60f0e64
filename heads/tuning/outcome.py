"""From what was measured to what goes into tree.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from heads.decoding.dynamic_tree import DynamicTree
from heads.decoding.lookup import DEFAULT_LOOKUP
from heads.decoding.tree import Tree
from heads.decoding.tuned import TunedTree, name_dtype
from heads.evaluation.tables import describe_machine, versions
from heads.interface import TokenHeads
from heads.tuning.tune import Tuning


def tuned_tree(token_heads: TokenHeads, tuning: Tuning, *, num_prompts: int) -> TunedTree:
    """What goes into tree.json."""
    backbone, kind = token_heads.backbone, tuning.kind
    static = tuning.finalists["static"].tree
    dynamic = tuning.finalists["dynamic"].tree
    assert isinstance(static, Tree)
    assert isinstance(dynamic, DynamicTree)
    return TunedTree(
        kind=kind,
        paths=() if kind == "plain" else static.paths[1:],
        dynamic=dynamic if kind == "dynamic" else None,
        lookup=choose_lookup(tuning),
        prediction=describe_prediction(tuning),
        measured_on={
            **describe_machine(backbone.device),
            "device_type": backbone.device.type,
            "dtype": name_dtype(backbone.dtype),
            "batch": tuning.times.batch,
            "context": tuning.times.context,
            "prompts": num_prompts,
            **dataclasses.asdict(tuning.config),
            "versions": versions(),
        },
        heads_sha256=token_heads.checksum,
    )


def choose_lookup(tuning: Tuning) -> int:
    """The looked-up chain stands beside the tree where it was faster with it, on the prompts that were decoded."""
    alone, beside = ("plain", "lookup alone") if tuning.kind == "plain" else ("tuned tree", "tuned tree, lookup")
    faster = tuning.checked[beside].tokens_per_second > tuning.checked[alone].tokens_per_second
    return DEFAULT_LOOKUP if faster else 0


def describe_prediction(tuning: Tuning) -> dict[str, Any]:
    """Of the heads alone, behind each prompt's own pass."""
    if tuning.kind == "plain":
        best = max(choice.tokens_per_second for choice in tuning.finalists.values())
        return {
            "tokens_per_pass": 1.0,
            "tokens_per_second": round(tuning.plain, 2),
            "ratio_to_plain": 1.0,
            "best_tree_ratio_to_plain": round(best / tuning.plain, 3),
        }
    choice = tuning.finalists[tuning.kind]
    return {
        "tokens_per_pass": round(choice.tokens_per_pass, 3),
        "tokens_per_second": round(choice.tokens_per_second, 2),
        "ratio_to_plain": round(choice.tokens_per_second / tuning.plain, 3),
        "milliseconds_per_pass": round(1000 * choice.seconds_per_pass, 3),
        "lookup": 0,
    }
