"""Options that commands share, as groups: a dataclass whose fields are typer options.

A command has a group as one parameter, and `with_groups` shows typer a signature with the group's fields instead:

    @with_groups
    def generate_command(heads: Heads, *, loading: LoadingOptions, sampling: SamplingOptions) -> None: ...

so that `headway generate` has the options --backbone, --dtype, --temperature, …, one panel of the help for each group.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_groups(command: Command) -> Command:
    """The same command for typer: each parameter that is a group of options is replaced by the group's fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if dataclasses.is_dataclass(hints[name]):
            groups[name] = hints[name]
            parameters += expand(hints[name])
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def expand(group: type[Any]) -> list[inspect.Parameter]:
    """One keyword parameter for each field; the first line of the group's docstring is the title of its help panel."""
    hints = get_type_hints(group, include_extras=True)
    title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
    found = []
    for field in dataclasses.fields(group):
        (option,) = hints[field.name].__metadata__
        option.rich_help_panel = title
        found.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
        )
    return found
