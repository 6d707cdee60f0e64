"""A new run refuses a folder that holds an earlier run, unless `overwrite` allows it to remove that run.

The folder is checked before anything is loaded. `overwrite` removes files just before the first step, so that a new run
that cannot start removes nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

from accelerate import PartialState

from train.checkpoint.whole import checkpoints, remove
from train.config import TrainConfig

logger = logging.getLogger(__name__)

RESULTS = ("last", "best", "metrics.jsonl")
"""What a run leaves beside its checkpoints; other files in the folder are ignored."""


def left_by_a_run(folder: str | Path) -> list[Path]:
    """Checkpoints, heads and metrics of an earlier run; empty where the folder is missing or holds other things."""
    results = [Path(folder) / name for name in RESULTS]
    return [*checkpoints(folder), *(path for path in results if path.exists())]


def refuse_used_folder(config: TrainConfig) -> None:
    """
    Raises:
        ValueError: a new run would destroy an earlier one, or `overwrite` would remove files that it reads.
    """
    found = left_by_a_run(config.output_dir)
    if config.resume or not found:
        return
    names = ", ".join(path.name for path in found)
    if not config.overwrite:
        ended = not checkpoints(config.output_dir) and (Path(config.output_dir) / "last").exists()
        resume = "it has no checkpoint for --resume true; add" if ended else "add --resume true to continue it,"
        raise ValueError(
            f"output_dir {config.output_dir} holds {names} of an earlier run: {resume} --overwrite true to remove them "
            f"and start a new run, or give another output_dir."
        )
    for name, path in started_from(config).items():
        if any(lies_in(path, one) for one in found):
            raise ValueError(
                f"{name} {path} lies in output_dir {config.output_dir}, from which overwrite removes {names}; give "
                f"another output_dir."
            )


def starts_again_in(config: TrainConfig) -> Path | None:
    """The run's folder, if `--resume true` would do there what this run is to do, should it stop before its first step.

    It would continue the earlier run that `overwrite` is to remove, and a folder that is missing is not resumed from.
    """
    folder = Path(config.output_dir)
    return folder if (folder.is_dir() if config.resume else not left_by_a_run(folder)) else None


def started_from(config: TrainConfig) -> dict[str, str]:
    """What a run reads, by the name of its setting."""
    backbone = config.backbone
    found = {"init_from": config.init_from, "backbone.name_or_path": backbone.name_or_path}
    found |= {"backbone.tokenizer": backbone.tokenizer}
    for part, sources in (("train", config.data.train), ("eval", config.data.eval)):
        found |= {f"data.{part}.{i}.path": source.path for i, source in enumerate(sources)}
    return {name: str(path) for name, path in found.items() if path is not None}


def lies_in(path: str | Path, folder: Path) -> bool:
    """
    >>> lies_in("runs/a/last", Path("runs/a")), lies_in("runs/ab", Path("runs/a"))
    (True, False)
    """
    return Path(path).resolve().is_relative_to(folder.resolve())


def remove_earlier_run(config: TrainConfig) -> None:
    """With `overwrite` and without `resume`, remove what an earlier run left. All processes call it."""
    if config.resume or not config.overwrite:
        return
    if PartialState().is_main_process and (found := left_by_a_run(config.output_dir)):
        for path in found:
            remove(path)
        logger.warning(
            "overwrite: %s of an earlier run removed from %s.", ", ".join(p.name for p in found), config.output_dir
        )
    PartialState().wait_for_everyone()
