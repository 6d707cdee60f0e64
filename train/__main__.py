"""`python -m train inspect-data | plan | regenerate-data --config configs/X.yaml`: what is done before a run."""

from __future__ import annotations

import argparse
import sys

from heads.backbone.loading import load_tokenizer, read_vocab_size
from train.config import read_config
from train.run import explain_errors, main

COMMANDS = {
    "inspect-data": "show samples with supervised tokens coloured, and what was dropped, split or empty",
    "plan": "print parameters, memory, steps, hours and disk of a run, and warn of what will not fit",
    "regenerate-data": "write the training data as the backbone itself would say it (docs/data.md)",
    "run": "train, as `accelerate launch train.py` does",
}


def inspect_data(arguments: list[str]) -> None:
    """Arguments are those of train.py and `--samples N`."""
    from train.data.inspect import run  # imports rich and datasets only for this command

    parser = argparse.ArgumentParser(add_help=False)  # jsonargparse's own knows no rest
    parser.add_argument("--samples", type=int, default=3, help="documents to show")
    options, rest = parser.parse_known_args(arguments)
    config = read_config(rest, prog="python -m train inspect-data [--samples N]")
    tokenizer = load_tokenizer(config.backbone)
    run(
        config.data,
        tokenizer,
        num_heads=config.num_heads,
        vocab_size=read_vocab_size(config.backbone),
        samples=options.samples,
    )


def plan(arguments: list[str]) -> None:
    """Arguments are those of train.py and flags about the machine."""
    from train.plan.command import plan as run  # imports what builds and counts only for this command

    run(arguments)


def regenerate_data(arguments: list[str]) -> None:
    """Arguments are those of train.py and flags about what is written."""
    from train.regenerate.command import regenerate as run  # imports what decodes only for this command

    run(arguments)


def dispatch(arguments: list[str]) -> None:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command == "inspect-data":
        explain_errors(lambda: inspect_data(rest))
    elif command == "plan":
        explain_errors(lambda: plan(rest))
    elif command == "regenerate-data":
        explain_errors(lambda: regenerate_data(rest))
    elif command == "run":
        main(rest)
    else:
        lines = "\n".join(f"  {name:17}{text}" for name, text in COMMANDS.items())
        asked = command in ("-h", "--help")
        wrong = "" if asked else f"error: unknown command {command!r}; allowed are {', '.join(COMMANDS)}.\n"
        (sys.stdout if asked else sys.stderr).write(
            f"{wrong}usage: python -m train COMMAND --config FILE [--help]\n{lines}\n"
        )
        sys.exit(0 if asked else 2)


if __name__ == "__main__":
    dispatch(sys.argv[1:])
