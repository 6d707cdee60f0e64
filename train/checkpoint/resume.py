"""What `--resume` starts from: the newest whole checkpoint, the same one in every process.

The main process chooses it, warns of unfinished or damaged ones, removes those, and sends its choice to the others.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from train.checkpoint.progress import fits, read_progress
from train.checkpoint.trained import explained_damage
from train.checkpoint.whole import newest_whole, read_facts, remove, step_of
from train.config import TrainConfig
from train.engine.engine import Engine

logger = logging.getLogger(__name__)

SECONDS_TO_APPEAR = 10  # a network file system may show a new file late


def choose_checkpoint(config: TrainConfig, arguments: TrainingArguments, engine: Engine) -> Path | None:
    """The folder to resume from; None starts at the beginning. All processes call it.

    Raises:
        ValueError: there is nothing to resume, or the chosen checkpoint's state was not written by a run.
    """
    if not config.resume:
        return None
    found: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            found[0] = choose_and_clean(config, arguments, engine)
        except ValueError as error:
            found[1] = str(error)
    broadcast_object_list(found)
    if found[1] is not None:
        raise ValueError(found[1])
    return found[0]


def choose_and_clean(config: TrainConfig, arguments: TrainingArguments, engine: Engine) -> Path | None:
    """Choose the checkpoint, warn of newer, damaged ones and remove those; only the main process does this."""
    folder = Path(config.output_dir)
    chosen, damaged = newest_whole(folder)
    if chosen is None:
        refuse_nothing_to_resume(config, damaged)
    outcome = f"the run resumes from {chosen.name}" if chosen else "the run starts from the beginning"
    removed = "; ".join(f"{path.name} is skipped and removed, {wrong}" for path, wrong in damaged.items())
    if removed or chosen is None:
        logger.warning("%s: %s; %s.", folder, removed or "no checkpoint was saved yet", outcome)
    for path in damaged:
        remove(path)
    for path in folder.glob("*/.*.tmp"):  # begun by a process that was killed
        path.unlink(missing_ok=True) if path.is_file() else remove(path)
    if chosen is not None:
        check_state(chosen)
        warn_of_differences(read_facts(chosen), present_facts(arguments, engine))
    return chosen


def check_state(folder: Path) -> None:
    """Check progress.json and the Trainer's state before weights are loaded.

    Raises:
        ValueError: one of them is not what a run wrote.
    """
    read_progress(folder)
    with explained_damage(folder):
        state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
        for name, wanted in (("global_step", int), ("train_batch_size", int | None), ("log_history", list[dict])):
            if not fits(getattr(state, name), wanted):
                raise ValueError(f"{TRAINER_STATE_NAME} has {name} {str(getattr(state, name))[:80]}")
        if state.global_step != step_of(folder):
            raise ValueError(f"{TRAINER_STATE_NAME} is of step {state.global_step}")


def refuse_nothing_to_resume(config: TrainConfig, damaged: dict[Path, str]) -> None:
    """
    Raises:
        ValueError: no run started in the folder, its run has ended, or whole checkpoints were damaged afterwards.
    """
    folder = Path(config.output_dir)
    if any(read_facts(path) for path in damaged):
        raise ValueError(
            f"{folder} holds no checkpoint that is whole: "
            + "; ".join(f"{path.name}: {wrong}" for path, wrong in damaged.items())
            + "; copy them again, or remove them and start without --resume."
        )
    if not folder.is_dir() or (folder / "last").is_dir():
        raise ValueError(
            f"resume was asked for, but {folder} holds no checkpoint-* folder; checkpoints are written "
            f"every save_every_steps steps (now {config.save_every_steps}). Start without --resume; --overwrite true "
            f"removes the results of an earlier run."
        )


def present_facts(arguments: TrainingArguments, engine: Engine) -> dict[str, Any]:
    """What a checkpoint records of its run, beside the step."""
    processes = PartialState().num_processes
    blocks = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * processes
    return {
        "processes": processes,
        "engine": engine.value,
        "blocks_per_step": blocks,
        "seed": arguments.seed,
    }


def warn_of_differences(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Warn where the run will differ from one that never stopped; what a checkpoint lacks counts as unchanged."""
    then = now | {name: value for name, value in then.items() if type(value) is type(now.get(name))}
    if then["processes"] != now["processes"]:
        logger.warning(
            "The checkpoint was saved by %d processes and is resumed by %d: weights, optimizer and schedule are "
            "restored; random states belong to a process, so dropout and lookahead get new random numbers.",
            *(then["processes"], now["processes"]),
        )
    if then["engine"] != now["engine"]:
        logger.warning("The engine was %s and is %s: sums are rounded differently.", then["engine"], now["engine"])
    if then["blocks_per_step"] != now["blocks_per_step"]:
        logger.warning(
            "A step took %d blocks and takes %d: the place in the data is counted in steps, so blocks of this epoch "
            "are skipped or seen twice; keep batch size x accumulation x processes to resume exactly.",
            *(then["blocks_per_step"], now["blocks_per_step"]),
        )
    if then["seed"] != now["seed"]:
        logger.warning("The seed was %d and is %d: the order of blocks changes.", then["seed"], now["seed"])


def make_run_folder(config: TrainConfig) -> None:
    """Make the run's folder, from which a run that is killed before its first checkpoint starts again.

    Every process must see it, since all write checkpoints and the main one lists their files.

    Raises:
        ValueError: a process does not see it; the sentence names its machine.
    """
    if PartialState().is_main_process:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    if PartialState().num_processes == 1:
        return
    probe = [f".shared-{uuid.uuid4().hex}"]
    broadcast_object_list(probe)
    path = Path(config.output_dir) / probe[0]
    if PartialState().is_main_process:
        path.touch()
    PartialState().wait_for_everyone()
    blind = gather_object([] if appears(path) else [socket.gethostname()])
    if PartialState().is_main_process:
        path.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"output_dir {config.output_dir} of the main process is not seen on {', '.join(sorted(set(blind)))}; put "
            f"it on a disk that all machines share: without one no checkpoint holds every process's part."
        )


def appears(path: Path) -> bool:
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
