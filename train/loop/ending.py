"""How a run ends: after its last step, or after a signal; what was trained is saved and what it is like is said."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from heads.checkpoint.summary import describe_quality
from train.checkpoint.interruption import EXIT_CODE, set_marker
from train.checkpoint.whole import newest_whole
from train.engine.engine import end_together
from train.engine.gathering import whole_weights
from train.loop.trainer import HeadsTrainer

logger = logging.getLogger(__name__)


def leave(trainer: HeadsTrainer) -> None:
    """Say where the run resumes, for people and for schedulers.

    Raises:
        SystemExit: always.
    """
    if trainer.args.should_save:
        folder = Path(trainer.args.output_dir)
        last, _ = newest_whole(folder)
        saved = f"{last} is whole: the same command with --resume true goes on from it" if last else "nothing was saved"
        set_marker(folder, f"step {trainer.state.global_step}")
        logger.info(f"ended by {trainer.interruption.received or 'a signal to another process'}; {saved}.")
    end_together()
    sys.exit(EXIT_CODE)


def finish(trainer: HeadsTrainer) -> None:
    """Evaluate the last step, save the last weights, say where they are.

    Raises:
        ValueError: the weights are not finite.
    """
    if not trainer.weights_are_finite():
        last, _ = newest_whole(trainer.args.output_dir)
        raise ValueError(
            f"The trained weights are not finite and are not saved; the last whole checkpoint is {last}; lower the "
            f"rates and train again."
        )
    measured: dict[str, Any] = {"step": trainer.state.global_step}
    if trainer.eval_dataset is not None:
        evaluated = [entry for entry in trainer.state.log_history if "eval_backbone_loss" in entry]
        if evaluated and evaluated[-1]["step"] == trainer.state.global_step:
            measured |= evaluated[-1]
        else:
            save_last(trainer, measured)  # first: what fails in an evaluation does not cost the run
            measured |= trainer.evaluate()
        measured |= trainer.backbone_quality(measured, "eval_")
    tell_quality(trainer, measured.get("backbone_ppl"))
    save_last(trainer, measured)
    folder = Path(trainer.args.output_dir)
    best = f", the best by tokens per pass ({trainer.best_tokens_per_pass:.2f}) in {folder / 'best'}"
    logger.info(f"saved in {folder / 'last'}{best if trainer.best_tokens_per_pass else ''}")


def tell_quality(trainer: HeadsTrainer, found: dict[str, Any] | None) -> None:
    """What the run did to the backbone: one line, and the same figures as the last line of the metrics."""
    if found is not None:
        trainer.log({f"backbone_ppl_{name}": value for name, value in found.items()})
        logger.info(f"PPL1 of the backbone: {describe_quality(found)}")


def save_last(trainer: HeadsTrainer, measured: dict[str, Any]) -> None:
    """The run's result. Where its folder cannot be written, it goes to a temporary one and the error says where.

    Raises:
        OSError: the folder could not be written.
    """
    with whole_weights(trainer.model) as writes:  # once: the other processes do not learn of a full disk
        if not writes:
            return
        try:
            trainer.write_heads("last", measured)
        except (OSError, RuntimeError) as error:  # an accelerator may be out of memory
            elsewhere = tempfile.mkdtemp(prefix="headway-")
            trainer.write_heads(elsewhere, measured)  # an absolute path: the run's folder does not come before it
            raise OSError(f"{error} What was trained lies in {elsewhere}.") from error
