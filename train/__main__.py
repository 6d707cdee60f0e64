"""`python -m train COMMAND --config configs/X.yaml`: inspect data, plan, regenerate data, or train.

A command's flags are the fields of its dataclass, `top_p` as `--top-p`, and all flags of train.py.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

from docstring_parser import parse as parse_docstring

from train.config import Parser, add_run_flags, build_config_of, check_config_files, empty_lists_first
from train.data.inspect import InspectFlags, inspect_data
from train.plan.command import plan
from train.plan.costs import Machine
from train.regenerate.command import regenerate
from train.regenerate.config import RegenerateFlags
from train.run import explain_errors, run_to_the_end


@dataclass(kw_only=True)
class NoFlags:
    """A command that has no flags of its own."""


class Command(NamedTuple):
    """A command: its help, its flags, and the function that takes a run's config and the flags."""

    help: str
    flags: Any
    action: Callable[[Any, Any], Any]


COMMANDS = {
    "inspect-data": Command(
        "show samples with supervised tokens coloured, and what was dropped, split or empty", InspectFlags, inspect_data
    ),
    "plan": Command(
        "print parameters, memory, steps, time and disk of a run, and warn of what will not fit", Machine, plan
    ),
    "regenerate-data": Command(
        "replace answers and ends of texts by what the backbone generates (docs/data.md)",
        RegenerateFlags,
        regenerate,
    ),
    "run": Command("train, as `accelerate launch train.py` does", NoFlags, lambda config, _: run_to_the_end(config)),
}


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    explain_errors(lambda: run_command(arguments))


def run_command(arguments: list[str]) -> None:
    """Parse and do what a command line asks for.

    Raises:
        SystemExit: on what cannot be parsed, after one sentence on stderr.
        ValueError: on values that the command cannot work with.
    """
    check_config_files(arguments)
    parsers = {name: command_parser(name, command) for name, command in COMMANDS.items()}
    parser = Parser(
        prog="python -m train", description="Inspect data, plan, regenerate data, or train.", allow_abbrev=False
    )
    subcommands = parser.add_subcommands(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subcommands.add_subcommand(name, parsers[name], help=command.help)
        parsers[name].prog = f"python -m train {name}"
    if not arguments:
        return parser.print_help()
    found = parser.parse_args(empty_lists_first(arguments))
    values, command = found[found.command], COMMANDS[found.command]
    flags = command.flags(**{field.name: values[field.name] for field in dataclasses.fields(command.flags)})
    if command.flags is RegenerateFlags and not isinstance(values["heads"], dict):
        values["heads"] = {}  # --heads of this command is a folder; in a run's config `heads` has the family's fields
    command.action(build_config_of(values), flags)


def command_parser(name: str, command: Command) -> Parser:
    """The parser of the command's own flags, explained by its dataclass, and of a run's other flags."""
    usage = f"python -m train {name} --config FILE [flags]"
    parser = Parser(description=command.help, usage=usage, allow_abbrev=False)
    documented = [parse_docstring(kind.__doc__ or "") for kind in command.flags.__mro__]
    help_of = {found.arg_name: found.description for doc in documented for found in doc.params}
    hints, fields = get_type_hints(command.flags), dataclasses.fields(command.flags)
    for field in fields:
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=hints[field.name], default=field.default, help=help_of[field.name])
    add_run_flags(parser, skip={field.name for field in fields})
    return parser


if __name__ == "__main__":
    main()
