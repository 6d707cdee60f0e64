"""One file, one family; the file name is its name in YAML. Found by name: no table to edit.

>>> families()[:2]
['grounded', 'medusa']
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from heads.backbone import Backbone
from heads.interface import TokenHeads


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


def build_config(family: str, **fields: Any) -> Any:
    """A family's Config from plain values; an unknown field is an error that names the nearest real one."""
    config_class = family_module(family).Config
    known = [field.name for field in dataclasses.fields(config_class)]
    for name in fields:
        if name not in known:
            raise ValueError(
                f"{family} heads have no field {name!r}; allowed are {', '.join(known)}.{_nearest(name, known)}"
            )
    config = config_class(**fields)
    config.check()
    return config


def create(family: str, model: Any, *, num_heads: int = 4, **config: Any) -> TokenHeads:
    """New heads of a family on a causal LM, untrained, in the backbone's dtype.

    Args:
        family: one of `families()`.
        model: a `transformers` causal LM, or a `Backbone` that wraps one already.
        num_heads: K.
        config: further fields of the family's Config.
    """
    backbone = model if isinstance(model, Backbone) else Backbone(model)
    token_heads = family_module(family).Heads(build_config(family, num_heads=num_heads, **config), backbone)
    return token_heads.to(device=backbone.device, dtype=backbone.dtype)


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
