"""Dataclasses as options of the command line, which typer reads: groups that commands share, and a suite's Config.

A command has a group as one parameter, and `with_groups` shows typer a signature with the group's fields instead:

    @with_groups
    def generate_command(heads: Heads, *, loading: LoadingOptions, sampling: SamplingOptions) -> None: ...

so that `headway generate` has the options --backbone, --dtype, --temperature, …, one panel of the help for each group,
and Python calls it with any of them by name.
A suite or a format is known only when the command runs; `read_config` reads the words that are left then.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from docstring_parser import parse as parse_docstring

from heads.validation import Range, build, members, ranges

T = TypeVar("T")
CommandFunction = Callable[..., None]
NULLS = ("none", "null")


def with_groups(command: CommandFunction) -> CommandFunction:
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
            fields = {field.name for field in dataclasses.fields(group)} & set(given)
            given[name] = group(**{field: given.pop(field) for field in fields})
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
        kind, option = get_args(hints[field.name])
        option = copy.copy(option)  # an option that groups share stands in the panel of each
        option.rich_help_panel = title
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=or_empty(field.default),
                annotation=Annotated[kind, option],
            )
        )
    return found


def or_empty(default: Any) -> Any:
    """A field's default as a parameter's: an option without one is required."""
    return inspect.Parameter.empty if default is dataclasses.MISSING else default


def read_config(config: type[T], words: Sequence[str], program: str, help_option: str = "--help") -> T:
    """A Config from words of the command line, `new_tokens` as --new-tokens; `help_option` shows all and ends.

    A list is one word with commas, or several words, each after its option. none and null stand for None.

    Raises:
        ValueError: a value that the Config's own checks refuse; typer reports all other mistakes.

    >>> @dataclasses.dataclass(kw_only=True)
    ... class Config:
    ...     new_tokens: int = 8
    ...     tasks: list[str] = dataclasses.field(default_factory=list)
    >>> read_config(Config, ["--new-tokens=4", "--tasks", "arc,copa", "--tasks=rte"], "headway evaluate HEADS")
    Config(new_tokens=4, tasks=['arc', 'copa', 'rte'])
    """

    def command(**given: Any) -> None: ...

    about = parse_docstring(config.__doc__ or "").description
    command.__signature__ = inspect.Signature(config_options(config))  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command(help=about, context_settings={"help_option_names": [help_option]})(command)
    given, nulls = take_nulls(config, words)
    parsed = typer.main.get_command(app).make_context(program, given).params
    values = {name: joined(value) for name, value in parsed.items()}
    return build(config, values | nulls, of=program)


def given_options(context: typer.Context, names: Sequence[str]) -> list[str]:
    """Those of the command's parameters that were given, as they are typed: json_file as --json."""
    return ["--" + name.removesuffix("_file").replace("_", "-") for name in names if was_given(context, name)]


def was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def take_nulls(config: type[Any], words: Sequence[str]) -> tuple[list[str], dict[str, None]]:
    """The words without options that may be None and are given as none or null, and the fields of these options.

    >>> @dataclasses.dataclass(kw_only=True)
    ... class Config:
    ...     tree: str | None = "a.json"
    ...     lookup: int | None = None
    >>> take_nulls(Config, ["--tree", "none", "--lookup=3"])
    (['--lookup=3'], {'tree': None})
    """
    hints = get_type_hints(config)
    fields = {"--" + name.replace("_", "-"): name for name, hint in hints.items() if NoneType in members(hint)}
    others: list[str] = []
    nulls: dict[str, None] = {}
    left = iter(words)
    for word in left:
        option, equals, value = word.partition("=")
        if option not in fields:
            others.append(word)
            continue
        rest = [] if equals else list(islice(left, 1))
        if (rest or [value])[0].lower() in NULLS:
            nulls[fields[option]] = None
        else:
            nulls.pop(fields[option], None)  # given again, and the last one counts
            others += [word, *rest]
    return others, nulls


def config_options(config: type[Any]) -> list[inspect.Parameter]:
    """A keyword parameter for each field; its help is the field's line among the docstring's attributes."""
    hints, found = get_type_hints(config), []
    bases = [one for one in reversed(config.__mro__) if dataclasses.is_dataclass(one)]
    said = [attribute for one in bases for attribute in parse_docstring(one.__doc__ or "").params]
    helps = {attribute.arg_name: sentence(attribute.description or "") for attribute in said}
    for field in dataclasses.fields(config):
        limits = next(iter(ranges(field)), Range())
        hint, default = hints[field.name], field.default
        of_items: dict[str, Any] = {}
        if get_origin(hint) is list:
            of_items = {"parser": partial(read_list, get_args(hint)[0]), "metavar": "X,X,…"}
            default = list(map(str, field.default_factory()))  # type: ignore[operator]
        option = typer.Option(min=limits.low, max=limits.high, help=helps.get(field.name), **of_items)
        found.append(
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=or_empty(default),
                annotation=Annotated[hint, option],
            )
        )
    return found


def joined(value: Any) -> Any:
    """The words of a list option as one list; any other value as it is.

    >>> joined([["arc", "copa"], ["rte"]]), joined("arc")
    (['arc', 'copa', 'rte'], 'arc')
    """
    return list(chain.from_iterable(value)) if isinstance(value, list | tuple) else value


def read_list(kind: Callable[[str], T], text: str) -> list[T]:
    """
    >>> read_list(int, "1, 2"), read_list(str, "")
    ([1, 2], [])
    """
    return [kind(part.strip()) for part in text.split(",") if part.strip()]


def sentence(text: str) -> str:
    """
    >>> sentence("most tokens of an answer.")
    'Most tokens of an answer.'
    """
    return text[:1].upper() + text[1:]
