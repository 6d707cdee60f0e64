"""Summarize what a folder of heads holds, from its files alone: the backbone is not loaded."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads.checkpoint.opening import find_backbone
from heads.checkpoint.save_load import read_tensors
from heads.checkpoint.schema import DESCRIPTION, TENSORS, read_description
from heads.decoding.tuned_file import TunedTree, UnreadableTree, find_tuned_tree


def describe(folder: str | Path) -> dict[str, Any]:
    """heads.json, with what the tensors themselves say and where the backbone was found.

    Raises:
        ValueError: no heads there, or damaged ones.
    """
    description = asdict(read_description(folder))
    path = Path(folder) / TENSORS
    tensors = read_tensors(path, description["sha256"])
    return {
        "folder": str(folder),
        **description,
        "recipe": description["recipe"] or {},
        "num_parameters": sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values() if t.is_floating_point()}),
        "bytes": path.stat().st_size + (Path(folder) / DESCRIPTION).stat().st_size,
        "backbone_found_at": find_backbone(folder),
        "tuned_tree": describe_tree(find_tuned_tree(folder)),
    }


def describe_tree(tuned: TunedTree | UnreadableTree | None) -> dict[str, Any] | None:
    """tree.json as it stands, with the number of heads that each tree asks; of a damaged one the reason."""
    if isinstance(tuned, TunedTree):
        others = {"other_batches": [describe_tree(one) for one in tuned.other_batches]}
        return {**tuned.as_dict(), "heads_used": tuned.heads_used, **(others if tuned.other_batches else {})}
    return None if tuned is None else {"unreadable": tuned.reason}


def list_facts(description: dict[str, Any]) -> dict[str, str]:
    """The description in words: what, and how much of it or which."""
    backbone, recipe = description["backbone"], description["recipe"]
    return {
        "family": description["family"],
        "config": ", ".join(f"{name} {value}" for name, value in description["config"].items()),
        "parameters": f"{description['num_parameters']:,} in {', '.join(description['dtypes'])}",
        "size": f"{description['bytes'] / 2**20:.2f} MiB",
        "backbone": f"{backbone['name']} ({backbone['architecture'] or 'architecture not recorded'}, hidden size "
        f"{backbone['hidden_size']}, vocabulary {backbone['vocab_size']})",
        **vocabulary_facts(description),
        **trained_facts(description["trained_backbone"]),
        **tree_facts(description["tuned_tree"], description["config"].get("num_heads")),
        **recipe_facts(recipe),
    }


def vocabulary_facts(description: dict[str, Any]) -> dict[str, str]:
    """How many tokens the heads score, if not all, and which share of the training data these are."""
    scored = description["config"].get("draft_vocabulary")
    if scored is None:
        return {}
    covered = (description["recipe"].get("draft_vocabulary") or {}).get("coverage")
    share = "" if covered is None else f", {covered:.1%} of the training set's"
    return {"draft vocabulary": f"scores {scored:,} of {description['backbone']['vocab_size']:,} tokens{share}"}


def trained_facts(trained: dict[str, Any] | None) -> dict[str, str]:
    """The backbone that was trained with the heads, if one was."""
    if trained is None:
        return {}
    what = "LoRA adapter on the backbone" if trained["adapter"] else "changed backbone"
    return {"trained with them": f"the {what}, in {trained['folder']}; load both with heads.load_with_backbone"}


def tree_facts(tuned: dict[str, Any] | None, num_heads: int | None) -> dict[str, str]:
    """What tree.json chose, how many of the heads that asks, and where it was measured.

    >>> tuned = {"kind": "static", "paths": [[0], [1]], "lookup": 0, "heads_used": 1, "measured_on": {"batch": 4}}
    >>> tree_facts(tuned, 4)
    {'tuned tree': 'static, 3 nodes, uses 1 of 4 heads, no lookup; measured on batch 4'}
    """
    if tuned is None:
        return {}
    if "unreadable" in tuned:
        return {"tuned tree": tuned["unreadable"]}
    trees = [tuned, *tuned.get("other_batches", ())]
    name = "tuned tree" if len(trees) == 1 else "tuned trees"
    return {name: "\n".join(describe_use(one, num_heads) for one in trees)}


def describe_use(tuned: dict[str, Any], num_heads: int | None) -> str:
    nodes = tuned["dynamic"]["nodes"] if tuned["kind"] == "dynamic" else 1 + len(tuned["paths"])
    size = [] if tuned["kind"] == "plain" else [f"{nodes} nodes"]
    used = f"uses {tuned['heads_used']} of {num_heads or '?'} heads"
    lookup = f"lookup {tuned['lookup']}" if tuned["lookup"] else "no lookup"
    places = {name: tuned["measured_on"].get(name) for name in ("batch", "device_type", "dtype")}
    where = ", ".join(f"{name.removesuffix('_type')} {value}" for name, value in places.items() if value is not None)
    return ", ".join([tuned["kind"], *size, used, lookup]) + f"; measured on {where or 'nothing'}"


def recipe_facts(recipe: dict[str, Any]) -> dict[str, str]:
    """How the heads were trained, as far as it was recorded."""
    if not recipe:
        return {"made by": "not recorded"}
    facts: dict[str, str] = {}
    measured = recipe.get("measured") or {}
    if "step" in measured:
        facts["steps"] = str(measured["step"])
    if quality := measured.get("backbone_ppl"):
        facts["PPL1 of the backbone"] = describe_quality(quality)
    with contextlib.suppress(KeyError, TypeError):
        facts["data"] = ", ".join(source["path"] for source in recipe["config"]["data"]["train"])
    with contextlib.suppress(KeyError, TypeError):
        facts["loss"] = describe_loss(recipe["config"])
    if command := recipe.get("command"):
        facts["command"] = " ".join(command)
    facts["commit"] = str(recipe.get("commit") or "not recorded")
    if versions := recipe.get("versions"):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    return facts


def describe_quality(found: dict[str, Any]) -> str:
    """What training with heads did to the backbone's own predictions.

    >>> describe_quality({"before": 9.2166, "after": 9.15, "tokens": 12240, "kl_to_original": 0.0123})
    '9.22 before, 9.15 after (held-out, 12,240 tokens; KL from the teacher 0.0123)'
    """
    drift = found.get("kl_to_original")
    further = "" if drift is None else f"; KL from the teacher {drift:.4f}"
    return f"{found['before']:.2f} before, {found['after']:.2f} after (held-out, {found['tokens']:,} tokens{further})"


def describe_loss(config: dict[str, Any]) -> str:
    """What a run's config trains heads on.

    >>> describe_loss({"loss": {"hard": 0.0, "soft": 1.0, "temperature": 2.0}, "head_decay": 0.8})
    "1 × the backbone's distribution (cross-entropy, T 2); head k weighted 0.8^(k - 1)"
    """
    loss = config["loss"]
    words = [f"{loss['hard']:g} × true tokens"] if loss.get("hard", 1.0) else []
    if loss.get("soft"):
        how = ["KL" if loss.get("divergence") == "kl" else "cross-entropy", f"T {loss.get('temperature', 1.0):g}"]
        how += [f"its {loss['top_n']} best tokens"] if loss.get("top_n") else []
        words.append(f"{loss['soft']:g} × the backbone's distribution ({', '.join(how)})")
    if loss.get("regression"):
        words.append(f"{loss['regression']:g} × distance of hidden states")
    text = " + ".join(words)
    if weights := loss.get("head_weights"):
        text += f"; heads weighted {', '.join(f'{w:g}' for w in weights)}"
    elif config.get("head_decay", 1.0) != 1.0:
        text += f"; head k weighted {config['head_decay']:g}^(k - 1)"
    return text
