"""The families of heads, one file each. The file name is the family's name in YAML; no table lists them.

>>> families()[:2]
['dynamo', 'eagle']
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from heads.backbone.model import Backbone
from heads.interface.draft_vocabulary import as_numbers
from heads.interface.token_heads import TokenHeads
from heads.validation import build, is_validated, nearest


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
            f"family={family!r} was given; allowed are {', '.join(families())}.{nearest(family, families())}"
        )
    return importlib.import_module(f"{__name__}.{family}")


def build_config(family: str, /, **fields: Any) -> Any:
    """A family's Config from plain values.

    Raises:
        ValueError: an unknown field (names the nearest real one), a value of another type, or one that is not allowed.
    """
    config_class = family_module(family).Config
    if not is_validated(config_class):
        raise TypeError(f"{config_class.__module__}.Config checks nothing; put @validated above its @dataclass.")
    return build(config_class, fields, of=f"{family} heads")


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
        ValueError: a value that is not allowed, `draft_vocabulary` without `draft_tokens`, or invalid ids.
    """
    if num_heads is not None:
        config["num_heads"] = num_heads
    if draft_tokens is not None and config.get("draft_vocabulary") is None:
        draft_tokens = as_numbers(draft_tokens, "draft_tokens")
        config["draft_vocabulary"] = draft_tokens.numel()
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
    """As `create`, but heads with a draft vocabulary cannot be used before `choose_draft_tokens` was called."""
    backbone = model if isinstance(model, Backbone) else Backbone(model)
    token_heads = family_module(family).Heads(build_config(family, **config), backbone)
    return token_heads.to(device=backbone.heads_device, dtype=backbone.dtype)
