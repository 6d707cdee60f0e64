"""What a backbone is given, pass by pass, as tests count it: at the backbone itself, not by our own statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from heads.backbone.model import Backbone


@contextlib.contextmanager
def reads(backbone: Backbone) -> Iterator[list[int]]:
    """The number of tokens a row of each pass."""
    with shapes(backbone) as seen:
        tokens: list[int] = []
        yield tokens
        tokens += [length for _, length in seen]


@contextlib.contextmanager
def shapes(backbone: Backbone) -> Iterator[list[tuple[int, int]]]:
    """Rows and tokens of each pass."""
    seen: list[tuple[int, int]] = []
    forward = backbone.forward

    def counted(tokens_BT: Tensor, **inputs: Any) -> Any:
        seen.append((tokens_BT.shape[0], tokens_BT.shape[1]))
        return forward(tokens_BT, **inputs)

    backbone.forward = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del backbone.forward
