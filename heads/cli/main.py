"""The command `headway`: all of its subcommands, and their error messages.

An error that a user can cause ends in one sentence on stderr and exit code 1, and Ctrl-C in one line and exit code 130;
HEADWAY_TRACEBACK=1 shows the traceback. A warning is one sentence, too. Results go to stdout and remarks to stderr, so
that a pipe gets only the results.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import transformers

from heads.extras import MissingExtraError, needs_extra

try:
    with needs_extra("cli", "The command headway was called"):
        import rich  # noqa: F401 - tables and progress bars
        import typer
        from typer.core import TyperGroup
except MissingExtraError as error:
    sys.exit(f"error: {error}")

from heads.cli.evaluate import evaluate_command
from heads.cli.export import export_command, import_command, push_command
from heads.cli.folders import info_command, merge_command, prune_vocabulary_command
from heads.cli.hub import fetching_heads
from heads.cli.measure import benchmark_command, tune_tree_command
from heads.cli.ngrams import count_ngrams_command
from heads.cli.quantize import quantize_command
from heads.cli.race.command import race_command
from heads.cli.suites import compare_command
from heads.cli.verify_lossless import verify_lossless_command
from heads.cli.writing.autocomplete import autocomplete_command
from heads.cli.writing.text import chat_command, generate_command

COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate_command,
    "chat": chat_command,
    "autocomplete": autocomplete_command,
    "benchmark": benchmark_command,
    "evaluate": evaluate_command,
    "compare": compare_command,
    "tune-tree": tune_tree_command,
    "race": race_command,
    "verify-lossless": verify_lossless_command,
    "quantize": quantize_command,
    "info": info_command,
    "export": export_command,
    "import": import_command,
    "push": push_command,
    "merge": merge_command,
    "prune-vocabulary": prune_vocabulary_command,
    "count-ngrams": count_ngrams_command,
}


OWN_OPTIONS = {name: {"allow_extra_args": True, "ignore_unknown_options": True} for name in ("evaluate", "export")}
"""Commands that read further options themselves: those of a suite or a format."""


class OneSentence(TyperGroup):
    """Commands whose errors are one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if os.environ.get("HEADWAY_TRACEBACK") == "1":
                raise
            typer.echo("interrupted: ended before it was done.", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `headway … | head`: the reader has closed the pipe
            raise
        except (ValueError, OSError, MissingExtraError) as error:
            if os.environ.get("HEADWAY_TRACEBACK") == "1":
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(cls=OneSentence, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def prepare() -> None:
    """Multi-token prediction heads: generate faster with them, exactly as before."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def unwrap(text: str) -> str:
    """Join the lines of each paragraph, since typer keeps the source's line breaks."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


for name, command in COMMANDS.items():
    described = app.command(name, help=unwrap(command.__doc__ or ""), context_settings=OWN_OPTIONS.get(name))
    described(fetching_heads(command))


def main() -> None:
    warnings.formatwarning = format_warning
    app()


def format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning without the place in the code that gave it, which says nothing to someone who typed a command.

    >>> format_warning(UserWarning("tree.json is not used."), UserWarning, "heads/decoding/defaults.py", 107)
    'warning: tree.json is not used.\\n'
    """
    return f"warning: {' '.join(str(message).split())}\n"
