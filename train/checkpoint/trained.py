"""Write and read the trained weights: heads, with the trained backbone if there is one, or a backbone alone."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from heads.checkpoint import save_load, schema, summary
from heads.checkpoint.backbone import read_model, write_model
from heads.checkpoint.shapes import check_shapes
from train.objective.model import TrainedModel

UNREADABLE = (
    *(SafetensorError, RuntimeError, EOFError, FileNotFoundError, pickle.UnpicklingError),
    *(TypeError, LookupError, AttributeError, OverflowError, ValueError),
)


def write_trained(
    model: TrainedModel, folder: Path, *, dtype: torch.dtype, recipe: dict[str, Any], tokenizer: Any
) -> None:
    """Write a folder that `heads.load` reads. Call it inside `whole_weights`, in the process that it chooses.

    Args:
        recipe: stored with heads: how they were made and what was measured.
    """
    if model.token_heads is None:
        write_model(model.model, folder, dtype=dtype, tokenizer=tokenizer)
    else:
        save_load.save(model.token_heads, folder, dtype=dtype, recipe=recipe, tokenizer=tokenizer)


def read_trained(model: TrainedModel, folder: Path) -> None:
    """Load the weights that `write_trained` wrote into the model.

    Raises:
        ValueError: a file is missing or cut short, or the weights belong to another model.
    """
    with explained_damage(folder):
        if model.token_heads is None:
            read_model(model.model, folder)
            return
        tensors = load_file(folder / schema.TENSORS)
        if (backbone := save_load.named_backbone(folder)) is not None:
            read_model(model.model, backbone)
        elif model.trains_backbone:
            raise FileNotFoundError("the trained backbone")
    found = {name: tensor.shape for name, tensor in tensors.items()}
    check_shapes(found, model.token_heads.state_dict(), folder)
    model.token_heads.load_state_dict(tensors)


@contextlib.contextmanager
def explained_damage(folder: Path) -> Iterator[None]:
    """Within the context, errors of reading a damaged file become one sentence.

    Raises:
        ValueError: a file is missing, cut short or holds something else.
    """
    try:
        yield
    except UNREADABLE as error:
        is_sentence = isinstance(error, (RuntimeError, FileNotFoundError))
        problem = str(error) if is_sentence else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{folder} cannot be resumed from, a file in it is missing, cut short or holds something else "
            f"({' '.join(problem.split())}); remove that folder and resume from the checkpoint before it."
        ) from error


def measured_tokens_per_pass(folder: Path) -> float:
    """Tokens per pass recorded with the heads in a folder, such as best/; 0 if it holds none."""
    if not (folder / schema.DESCRIPTION).is_file():
        return 0.0
    return summary.measured_tokens_per_pass(schema.read_description(folder).recipe) or 0.0
