"""Summarise a folder of heads, or of a run, from its files, without loading the backbone.

A recipe may have any shape. A part of it that training would write otherwise is named and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from heads.checkpoint.opening import find_backbone
from heads.checkpoint.save_load import read_tensors
from heads.checkpoint.schema import DESCRIPTION, RUN_FOLDERS, TENSORS, look_up, read_description
from heads.decoding.tuned_file import TunedTree, UnreadableTree, find_tuned_tree

ODD_RECORD = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
"""The errors of reading a recipe that has another shape than training writes."""
WHAT_RUNS_SAVE = {"best": "the best by tokens per pass", "last": "as the run ended"}


def describe_run(folder: str | Path) -> dict[str, dict[str, Any]]:
    """`describe` of each folder in which a run saved heads, by the folder's name; empty for a folder of heads.

    Raises:
        ValueError: damaged heads.
    """
    if (Path(folder) / DESCRIPTION).is_file():
        return {}
    found = [name for name in RUN_FOLDERS if (Path(folder) / name / DESCRIPTION).is_file()]
    return {name: describe(Path(folder) / name) for name in found}


def list_run(described: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each folder of heads of a run: its name, which heads it holds, their step and tokens per pass.

    >>> heads = {"recipe": {"measured": {"step": 600, "eval_tokens_per_pass": 2.4301}}}
    >>> list_run({"last": heads})
    [{'folder': 'last/', 'heads': 'as the run ended', 'step': '600', 'tokens per pass': '2.43'}]
    """
    rows = []
    for name, heads in described.items():
        per_pass = measured_tokens_per_pass(heads["recipe"])
        rows.append(
            {
                "folder": f"{name}/",
                "heads": WHAT_RUNS_SAVE[name],
                "step": tell(lambda heads=heads: str(heads["recipe"]["measured"]["step"]), "not recorded"),  # type: ignore[misc]
                "tokens per pass": "not measured" if per_pass is None else f"{per_pass:.2f}",
            }
        )
    return rows


def measured_tokens_per_pass(recipe: dict[str, Any] | None) -> float | None:
    """Tokens per pass as the run measured them; None if it did not.

    >>> measured_tokens_per_pass({"measured": {"tokens_per_pass": 2}}), measured_tokens_per_pass({"measured": [1]})
    (2.0, None)
    """
    try:
        measured = (recipe or {})["measured"]
        return float(measured.get("tokens_per_pass", measured.get("eval_tokens_per_pass")))
    except ODD_RECORD:
        return None


def tell(fact: Callable[[], str], otherwise: str) -> str:
    """A fact of a record, or `otherwise` if the record has another shape.

    >>> tell(lambda: {"step": 3}["steps"], "not recorded")
    'not recorded'
    """
    try:
        return fact()
    except ODD_RECORD:
        return otherwise


def describe(folder: str | Path) -> dict[str, Any]:
    """heads.json, with facts from the tensors themselves and the place of the backbone.

    Raises:
        ValueError: the folder holds no heads, or damaged ones.
    """
    description = asdict(read_description(folder))
    path = Path(folder) / TENSORS
    floating = [t for t in read_tensors(path, description["sha256"]).values() if t.is_floating_point()]
    recorded = description["num_parameters"]
    return {
        "folder": str(folder),
        **description,
        "recipe": description["recipe"] or {},
        "num_parameters": sum(t.numel() for t in floating) if recorded is None else recorded,
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in floating}),
        "bytes": path.stat().st_size + (Path(folder) / DESCRIPTION).stat().st_size,
        "backbone_found_at": find_backbone(folder),
        "tuned_tree": describe_tree(find_tuned_tree(folder)),
    }


def describe_tree(tuned: TunedTree | UnreadableTree | None) -> dict[str, Any] | None:
    """tree.json with the number of heads that each tree uses; for an unreadable one the reason."""
    if isinstance(tuned, TunedTree):
        others = {"other_batches": [describe_tree(one) for one in tuned.other_batches]}
        return {**tuned.as_dict(), "heads_used": tuned.heads_used, **(others if tuned.other_batches else {})}
    return None if tuned is None else {"unreadable": tuned.reason}


def list_facts(description: dict[str, Any]) -> dict[str, str]:
    """The description as names and values for people."""
    backbone, recipe = description["backbone"], description["recipe"]
    return {
        "family": description["family"],
        "config": ", ".join(f"{name} {value}" for name, value in description["config"].items()),
        "parameters": f"{description['num_parameters']:,} in {', '.join(description['dtypes'])}",
        "size": f"{description['bytes'] / 2**20:.2f} MiB",
        "backbone": f"{backbone['name']} ({backbone['architecture'] or 'architecture not recorded'}, hidden size "
        f"{backbone['hidden_size']}, vocabulary {backbone['vocab_size']})",
        **packed_facts(description["packed_layers"]),
        **vocabulary_facts(description),
        **trained_facts(description["trained_backbone"]),
        **tree_facts(description["tuned_tree"], description["config"].get("num_heads")),
        **recipe_facts(recipe),
    }


def packed_facts(layers: dict[str, str] | None) -> dict[str, str]:
    """The microscaling formats of packed layers, and the layers of each.

    >>> packed_facts({"bodies.0.linear": "mxfp4_e2m1", "bodies.1.linear": "mxfp4_e2m1"})
    {'packed': 'mxfp4_e2m1: bodies.0.linear, bodies.1.linear'}
    """
    if not layers:
        return {}
    formats = dict.fromkeys(layers.values())
    lines = [f"{format}: {', '.join(name for name in layers if layers[name] == format)}" for format in formats]
    return {"packed": "\n".join(lines)}


def vocabulary_facts(description: dict[str, Any]) -> dict[str, str]:
    """The number of tokens that the heads score, if not all, and their share of the training data."""
    scored = description["config"].get("draft_vocabulary")
    if scored is None:
        return {}
    covered = tell(lambda: f"{description['recipe']['draft_vocabulary']['coverage']:.1%}", "")
    share = f", {covered} of the training set's" if covered else ""
    return {"draft vocabulary": f"scores {scored:,} of {description['backbone']['vocab_size']:,} tokens{share}"}


def trained_facts(trained: dict[str, Any] | None) -> dict[str, str]:
    """The backbone that was trained with the heads, if any."""
    if trained is None:
        return {}
    what = "LoRA adapter on the backbone" if trained["adapter"] else "changed backbone"
    return {"trained with them": f"the {what}, in {trained['folder']}; load both with heads.load_with_backbone"}


def tree_facts(tuned: dict[str, Any] | None, num_heads: int | None) -> dict[str, str]:
    """The choice in tree.json, the number of heads that it uses, and where it was measured.

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
    """How the heads were trained, if it was recorded.

    >>> recipe_facts({"commit": "1f", "versions": [3], "measured": {"step": 7}})
    {'steps': '7', 'commit': '1f', 'versions': 'recorded in a shape that is not known: [3]'}
    """
    if not recipe:
        return {"made by": "not recorded"}
    facts: dict[str, str] = {}
    recorded: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "steps": (look_up(recipe, "measured", "step"), str),
        "PPL1 of the backbone": (look_up(recipe, "measured", "backbone_ppl"), describe_quality),
        "data": (look_up(recipe, "config", "data", "train"), lambda sources: ", ".join(s["path"] for s in sources)),
        "loss": (look_up(recipe, "config", "loss"), lambda loss: describe_loss(recipe["config"])),
        "command": (recipe.get("command"), " ".join),
        "commit": (recipe.get("commit") or "not recorded", str),
        "versions": (recipe.get("versions"), lambda all: ", ".join(f"{name} {one}" for name, one in all.items())),
    }
    for name, (value, describe_value) in recorded.items():
        if value is not None:
            odd = f"recorded in a shape that is not known: {value!r:.60}"
            facts[name] = tell(lambda value=value, describe_value=describe_value: describe_value(value), odd)  # type: ignore[misc]
    return facts


def describe_quality(found: dict[str, Any]) -> str:
    """The change of the backbone's own predictions by training with heads.

    >>> describe_quality({"before": 9.2166, "after": 9.15, "tokens": 12240, "kl_to_original": 0.0123})
    '9.22 before, 9.15 after (held-out, 12,240 tokens; KL from the teacher 0.0123)'
    """
    drift = found.get("kl_to_original")
    further = "" if drift is None else f"; KL from the teacher {drift:.4f}"
    return f"{found['before']:.2f} before, {found['after']:.2f} after (held-out, {found['tokens']:,} tokens{further})"


def describe_loss(config: dict[str, Any]) -> str:
    """The heads' loss in a run's config, in words.

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
