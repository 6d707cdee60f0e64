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
    """Are the tensors that both models have equal, and both without an adapter that the other lacks?

    Codes of quantised weights are left out: a copy with microscaling weights has the embeddings and norms of the
    model, and no other tensor. Most models differ in the first one that has their shape.
    """
    ours, theirs = a.state_dict(), b.state_dict()
    if any("lora_" in name for name in ours.keys() ^ theirs.keys()):
        return False
    pairs = [(ours[name], theirs[name]) for name in ours if name in theirs]
    pairs = [pair for pair in pairs if all(tensor.is_floating_point() for tensor in pair)]
    return bool(pairs) and all(same_tensor(*pair) for pair in pairs)


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Equal values; rounded to bfloat16 where the types differ, since one model may be loaded in another type.

    >>> exact = torch.tensor([0.1, 0.2])
    >>> same_tensor(exact, exact.bfloat16()), same_tensor(exact, exact + 0.1)
    (True, False)
    """
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    if a.dtype != b.dtype:
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    return torch.equal(a, b.to(a.device))
