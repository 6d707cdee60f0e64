"""One file, one family; the file name is its name in YAML. Found by name: no table to edit.

>>> families()[:2]
['dynamo', 'grounded']
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from heads.backbone.model import Backbone
from heads.interface.token_heads import TokenHeads


def families() -> list[str]:
    """The names of all families, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def family_module(family: str) -> ModuleType:
    """The module of a family: it holds `Config` and `Heads`.

    Raises:
        ValueError: no such family; names the nearest.
    """
    if family not in families():
        raise ValueError(
            f"family={family!r} was given; allowed are {', '.join(families())}.{_nearest(family, families())}"
        )
    return importlib.import_module(f"{__name__}.{family}")


def build_config(family: str, /, **fields: Any) -> Any:
    """A family's Config from plain values.

    Raises:
        ValueError: an unknown field (names the nearest real one), a value of another type, or one that is not allowed.
    """
    config_class = family_module(family).Config
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in fields:
        if name not in known:
            raise ValueError(
                f"{family} heads have no field {name!r}; allowed are {', '.join(known)}.{_nearest(name, known)}"
            )
    hints = get_type_hints(config_class)
    for name, value in fields.items():
        if not any(_fits(value, kind) for kind in _kinds(hints[name])):
            kinds = " or ".join(map(_words, _kinds(hints[name])))
            raise ValueError(f"{family} heads take {kinds} for {name}; {value!r} was given.")
    config = config_class(**fields)
    config.check()
    return config


def create(
    family: str,
    model: Any,
    *,
    num_heads: int | None = None,
    draft_tokens: Tensor | Sequence[int] | None = None,
    **config: Any,
) -> TokenHeads:
    """New heads of a family on a causal LM, untrained, in the backbone's dtype.

    Args:
        family: one of `families()`.
        model: a `transformers` causal LM, or a `Backbone` that wraps one already.
        num_heads: K; the family's default where it is not given.
        draft_tokens: ids of the tokens that the heads score, such as `most_frequent_tokens` gives; all where neither
            they nor `draft_vocabulary`, their number, is given.
        config: further fields of the family's Config.

    Raises:
        ValueError: a value that cannot be built, `draft_vocabulary` without `draft_tokens`, or ids that are none.
    """
    if num_heads is not None:
        config["num_heads"] = num_heads
    if draft_tokens is not None and config.get("draft_vocabulary") is None:
        config["draft_vocabulary"] = len(draft_tokens)
    token_heads = create_unchosen(family, model, **config)
    if draft_tokens is not None:
        token_heads.choose_draft_tokens(draft_tokens)
    elif token_heads.draft_tokens_S is not None:
        raise ValueError(
            f"draft_vocabulary={len(token_heads.draft_tokens_S)} was given without draft_tokens; give the ids, such as "
            f"heads.most_frequent_tokens(counts, {len(token_heads.draft_tokens_S)}) has them, or train with train.py, "
            f"which counts the training data."
        )
    return token_heads


def create_unchosen(family: str, model: Any, **config: Any) -> TokenHeads:
    """New heads that cannot be used before `choose_draft_tokens` was called, where they have a draft vocabulary."""
    backbone = model if isinstance(model, Backbone) else Backbone(model)
    token_heads = family_module(family).Heads(build_config(family, **config), backbone)
    return token_heads.to(device=backbone.heads_device, dtype=backbone.dtype)


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union; anything else stands for itself."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _kinds(member)]
    return [annotation]


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, str, NoneType, bool):
        return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if get_origin(kind) is Literal:  # which of its values: `check` says
        return any(_fits(value, type(allowed)) for allowed in get_args(kind))
    origin = get_origin(kind) or kind  # list[str], dict[str, int]: the container alone
    return not isinstance(origin, type) or isinstance(value, origin)


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    names = {int: "an int", str: "a str", bool: "a bool", float: "a float", NoneType: "null"}
    return names.get(kind) or f"a {getattr(kind, '__name__', kind)}"
