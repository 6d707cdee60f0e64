"""Refuses a judge that wrote some of the texts itself: a model finds its own repetitions likely.

The same model may come under several names (a relative and an absolute path, a copy of its folder), and names may be
absent, so weights are compared too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def refuse_own_texts(judge: Any, *writers: Any) -> None:
    """
    Args:
        judge: the model that judges.
        writers: the models that wrote the texts, the baseline's among them.

    Raises:
        ValueError: the judge is one of the writers.
    """
    if any(same_model(judge, writer) for writer in writers):
        raise ValueError(
            f"{name_of(judge) or 'The decoded model'} was given as the judge of its own texts, whose repetitions it "
            f"finds likely; give another model."
        )


def same_model(a: Any, b: Any) -> bool:
    """One object, one place on disk, one name, or equal weights."""
    return a is b or (bool(name_of(a)) and place_of(a) == place_of(b)) or same_weights(a, b)


def name_of(model: Any) -> str:
    return str(getattr(model.config, "_name_or_path", ""))


def place_of(model: Any) -> str:
    """The model's folder without links, or its name where that is no folder."""
    name = name_of(model)
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def same_weights(a: Any, b: Any) -> bool:
    """Do both models have the same tensors? Most models differ in the first one that has their shape."""
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(same_tensor(ours[name], theirs[name]) for name in ours)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Equal values, after rounding to the coarser type, since one model may be loaded in another type than the other.

    >>> exact = torch.tensor([0.1, 0.2])
    >>> same_tensor(exact, exact.bfloat16()), same_tensor(exact, exact + 0.1)
    (True, False)
    """
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    coarser = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(a.to(coarser), b.to(a.device, coarser))
