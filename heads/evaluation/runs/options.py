"""Options of a suite or a format: words of the command line, such as `--max-new-tokens 64`, as fields of its Config."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from heads.validation import build, describe, members, nearest

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def read_options(config: type[Any], words: Sequence[str], of: str) -> Any:
    """A Config from words; a flag may stand without a value.

    Raises:
        ValueError: an unknown option (names the nearest), one without a value, or a value that is not allowed.

    >>> @dataclasses.dataclass(kw_only=True)
    ... class Config:
    ...     new_tokens: int = 8
    ...     tasks: list[str] = dataclasses.field(default_factory=list)
    >>> read_options(Config, ["--new-tokens=4", "--tasks", "arc,copa"], "--suite speed").tasks
    ['arc', 'copa']
    """
    hints = get_type_hints(config)
    values: dict[str, Any] = {}
    left = list(words)
    while left:
        name, _, text = left.pop(0).partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or field not in hints:
            known = [option(field) for field in hints]
            raise ValueError(f"{name} is no option of {of}; allowed are {', '.join(known)}.{nearest(name, known)}")
        if not text and bool in members(hints[field]) and (not left or left[0].startswith("--")):
            text = "true"
        elif not text:
            if not left:
                raise ValueError(f"{name} of {of} was given without a value; write {name} VALUE.")
            text = left.pop(0)
        values[field] = read_value(hints[field], text, name)
    return build(config, values, of=of)


def read_value(hint: Any, text: str, name: str) -> Any:
    """A text as the type of its field.

    >>> read_value(list[int], "1,2", "--batches"), read_value(float | None, "none", "--cap")
    ([1, 2], None)
    """
    kinds = [kind for kind in members(hint) if kind is not NoneType]
    if len(kinds) < len(members(hint)) and text.lower() in ("none", "null"):
        return None
    kind = kinds[0]
    if get_origin(kind) in (list, tuple):
        return [read_value(get_args(kind)[0], part.strip(), name) for part in text.split(",") if part.strip()]
    if kind is bool:
        if text.lower() not in (*YES, *NO):
            raise ValueError(f"{name} {text} was given; allowed are {' and '.join((YES[0], NO[0]))}.")
        return text.lower() in YES
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(
                f"{name} {text} was given; allowed are {'integers' if kind is int else 'numbers'}."
            ) from None
    if get_origin(kind) is Literal:
        return next((value for value in get_args(kind) if str(value) == text), text)
    return text


def describe_options(config: type[Any]) -> list[tuple[str, str, str]]:
    """(option, what it takes, its default) of each field."""
    hints = get_type_hints(config)
    return [(option(field.name), describe(hints[field.name], field), default_of(field)) for field in fields_of(config)]


def option(field: str) -> str:
    """
    >>> option("new_tokens")
    '--new-tokens'
    """
    return "--" + field.replace("_", "-")


def about(config: type[Any]) -> str:
    """A Config's docstring, and those of the Configs that it extends."""
    return "\n".join(inspect.cleandoc(vars(one)["__doc__"]) for one in config.__mro__ if dataclasses.is_dataclass(one))


def fields_of(config: type[Any]) -> Iterable[dataclasses.Field[Any]]:
    found: Iterable[dataclasses.Field[Any]] = dataclasses.fields(config)
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return "none" if field.default is None else str(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return ",".join(map(str, field.default_factory())) or "none"
    return "required"
