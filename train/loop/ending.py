"""The end of a run, after its last step or after a signal: save the result and report its quality."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from heads.checkpoint.summary import describe_quality
from train.checkpoint.interruption import EXIT_CODE, set_marker
from train.checkpoint.whole import newest_whole
from train.engine.gathering import whole_weights
from train.engine.process_end import end_together
from train.loop.trainer import HeadsTrainer

logger = logging.getLogger(__name__)


def exit_interrupted(trainer: HeadsTrainer) -> None:
    """End an interrupted run: log the checkpoint to resume from, and leave a marker file for schedulers.

    Raises:
        SystemExit: in a run of one process; `end_together` ends the processes of a larger run with the same code.
    """
    if trainer.args.should_save:
        folder = Path(trainer.args.output_dir)
        last, _ = newest_whole(folder)
        saved = f"{last} is whole: the same command with --resume true resumes from it" if last else "nothing was saved"
        set_marker(folder, f"step {trainer.state.global_step}")
        logger.info(f"ended by {trainer.interruption.received or 'a signal to another process'}; {saved}.")
    end_together(EXIT_CODE)
    sys.exit(EXIT_CODE)


def finish(trainer: HeadsTrainer) -> None:
    """Evaluate after the last step, save the last weights and log where they are.

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
            save_last(trainer, measured)  # first, so that a failing evaluation does not lose the result
            measured |= evaluate_trained(trainer)
        measured |= trainer.backbone_quality(measured, "eval_")
    log_quality(trainer, measured.get("backbone_ppl"))
    save_last(trainer, measured)
    folder = Path(trainer.args.output_dir)
    best = f", the best by tokens per pass ({trainer.best_tokens_per_pass:.2f}) in {folder / 'best'}"
    is_there = trainer.best_tokens_per_pass and (folder / "best").is_dir()  # the folder may have been removed since
    logger.info(f"saved in {folder / 'last'}{best if is_there else ''}")


def evaluate_trained(trainer: HeadsTrainer) -> dict[str, float]:
    """Evaluate what `save_last` saved; a signal to stop ends the run here.

    Raises:
        SystemExit: after a signal.
    """
    interruption = trainer.interruption
    interruption.trained = Path(trainer.args.output_dir) / "last"
    interruption.leave_when_trained()
    try:
        return trainer.evaluate()
    finally:
        interruption.trained = None


def log_quality(trainer: HeadsTrainer, found: dict[str, Any] | None) -> None:
    """Log the backbone's perplexity before and after the run, on the console and as last line of the metrics."""
    if found is not None:
        trainer.log({f"backbone_ppl_{name}": value for name, value in found.items()})
        logger.info(f"PPL1 of the backbone: {describe_quality(found)}")


def save_last(trainer: HeadsTrainer, measured: dict[str, Any]) -> None:
    """Save the run's result; if its folder cannot be written, save into a temporary one, which the error names.

    Raises:
        OSError: the folder could not be written.
    """
    with whole_weights(trainer.model) as writes:  # once for both attempts: other processes cannot see the first fail
        if not writes:
            return
        try:
            trainer.write_heads("last", measured)
        except (OSError, RuntimeError) as error:  # an accelerator may be out of memory
            elsewhere = tempfile.mkdtemp(prefix="headway-")
            trainer.write_heads(elsewhere, measured)  # an absolute path replaces the run's folder
            raise OSError(f"{error} The trained weights are in {elsewhere}.") from error
