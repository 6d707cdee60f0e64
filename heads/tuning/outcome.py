"""From what was measured to what goes into tree.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from heads.decoding.trees.dynamic import DynamicTree
from heads.decoding.trees.static import Tree
from heads.decoding.tuned_file import TunedTree, name_dtype
from heads.evaluation.tables import describe_machine, versions
from heads.interface.token_heads import TokenHeads
from heads.tuning.tune import Tuning


def tuned_tree(token_heads: TokenHeads, tuning: Tuning, *, num_prompts: int) -> TunedTree:
    """What goes into tree.json."""
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


def describe_prediction(tuning: Tuning) -> dict[str, Any]:
    """Behind each prompt's own pass, with lookup where that is used; then tokens a second of what was decoded here."""
    decoded = {name: round(speed.tokens_per_second, 2) for name, speed in tuning.checked.items()}
    if tuning.kind == "plain":
        best = max((choice.tokens_per_second for choice in tuning.finalists.values()), default=None)
        return {
            "tokens_per_pass": 1.0,
            "tokens_per_second": round(tuning.plain, 2),
            "ratio_to_plain": 1.0,
            "best_tree_ratio_to_plain": None if best is None else round(best / tuning.plain, 3),
            "decoded": decoded,
        }
    if tuning.lookup and tuning.beside is not None:
        return {
            "tokens_per_pass": round(tuning.beside.tokens_per_pass, 3),
            "tokens_per_second": round(tuning.beside.tokens_per_second, 2),
            "ratio_to_plain": round(tuning.beside.tokens_per_second / tuning.plain, 3),
            "lookup": tuning.lookup,
            "decoded": decoded,
        }
    choice = tuning.finalists[tuning.kind]
    return {
        "tokens_per_pass": round(choice.tokens_per_pass, 3),
        "tokens_per_second": round(choice.tokens_per_second, 2),
        "ratio_to_plain": round(choice.tokens_per_second / tuning.plain, 3),
        "milliseconds_per_pass": round(1000 * choice.seconds_per_pass, 3),
        "lookup": 0,
        "decoded": decoded,
    }
