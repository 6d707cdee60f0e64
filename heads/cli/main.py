"""The command `headway generate | chat | benchmark | info`: parse, call, print.

What a user can cause ends in one sentence on stderr and exit code 1; HEADWAY_TRACEBACK=1 shows where it came from.
Text goes to stdout; what is said about it goes to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console
from typer.core import TyperGroup

from heads.cli.benchmark import benchmark_command
from heads.cli.count_ngrams import count_ngrams_command
from heads.cli.evaluate import evaluate_command
from heads.cli.info import accuracy_table, describe, facts_table
from heads.cli.merge import merge_command
from heads.cli.options import read_tree_option, use_color
from heads.cli.prune import prune_vocabulary_command
from heads.cli.text import chat_command, generate_command
from heads.cli.tune_tree import tune_tree_command
from heads.extras import MissingExtraError

__all__ = ["OneSentence", "app", "main", "prepare", "read_tree_option", "use_color"]


class OneSentence(TyperGroup):
    """Commands whose errors are one sentence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `headway … | head`: the reader has enough
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


app.command("generate")(generate_command)
app.command("chat")(chat_command)
app.command("benchmark")(benchmark_command)


@app.command()
def info(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that heads were saved to.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """What a folder of heads holds, what the heads can do, and how they were made."""
    description = describe(folder)
    if as_json:
        typer.echo(json.dumps(description, indent=2))
        return
    console = Console()
    console.print(facts_table(description))
    if description["measured_accuracy"]:
        console.print(accuracy_table(description["measured_accuracy"]))


app.command("count-ngrams")(count_ngrams_command)
app.command("evaluate")(evaluate_command)
app.command("merge")(merge_command)
app.command("tune-tree")(tune_tree_command)
app.command("prune-vocabulary")(prune_vocabulary_command)


def main() -> None:
    app()
