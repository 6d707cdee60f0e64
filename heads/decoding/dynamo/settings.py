"""The settings of dynamic decoding (Algorithm 1 of DynaMo), checked."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, get_args

from heads.decoding.dynamo.threshold import Adaptive
from heads.decoding.trees.dynamic import check_integer


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """The settings of Algorithm 1, as `DynamicDecoding` describes them. Temperature and penalty are `generate`'s own.

    Raises:
        ValueError: a value outside its range.
    """

    threshold: float = 0.5
    transparency: float = 1.0
    adaptive: Adaptive | None = "otsu_first"
    blur: int = 1
    top_k: int = 50

    def __post_init__(self) -> None:
        check_number(self.threshold, "threshold")
        check_number(self.transparency, "transparency")
        for name in ("blur", "top_k"):
            object.__setattr__(self, name, check_integer(getattr(self, name), f"{name}={getattr(self, name)!r}"))
        if not 0 <= self.threshold <= 1:
            raise ValueError(
                f"threshold={self.threshold} was given; allowed are 0 (always all tokens) to 1 (always one token)."
            )
        if not 0 <= self.transparency < float("inf"):
            raise ValueError(
                f"transparency={self.transparency} was given; allowed are 0 (no masking) and above, the paper uses 1."
            )
        if self.blur < 1 or self.blur % 2 == 0:
            raise ValueError(f"blur={self.blur} was given; allowed are odd kernel sizes, 1 for no blur.")
        if self.adaptive is not None and self.adaptive not in get_args(Adaptive):
            raise ValueError(
                f"adaptive={self.adaptive!r} was given; allowed are {', '.join(get_args(Adaptive))}, and None for the "
                f"static threshold alone."
            )
        if self.adaptive is None and self.blur > 1:
            raise ValueError(
                f"blur={self.blur} was given with adaptive=None, and nothing is blurred then; give blur=1, or one of "
                f"{', '.join(get_args(Adaptive))}."
            )
        if self.adaptive == "blurred" and self.blur == 1:
            raise ValueError("adaptive='blurred' was given with blur=1, which does not blur; give 3 or more.")
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} was given; allowed are 1 and more candidates a place.")


def check_number(value: Any, name: str) -> None:
    """
    Raises:
        ValueError: `value` is no number; a bool is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r} was given; allowed are numbers.")
