"""Dataclasses that check what they are built from: `huggingface_hub.dataclasses.strict`, with our own sentences.

    @validated
    @dataclass(kw_only=True)
    class Config:
        num_heads: int = within(1, 32, default=4)
        start: Literal["random", "copied"] = "random"

        def validate_start(self) -> None:        # runs after the fields; raises ValueError, in one sentence
            ...

    build(Config, {"num_head": 4}, of="dynamo heads")
    ValueError: 'num_head' is no field of dynamo heads; allowed are num_heads, start. Did you mean 'num_heads'?

`strict` checks types (of list items too), fields as they are assigned, and every method `validate_…`. Added are three
things: deferred annotations, which `strict` lets pass unchecked, are resolved first; a float may be given as an int and
has to be finite; an error is one sentence that says what was given and what is allowed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from huggingface_hub.dataclasses import strict, validated_field
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError

T = TypeVar("T")
SHOWN_CHARACTERS = 80  # of a refused value
VALIDATED: set[type[Any]] = set()
NOUNS = {int: "integers", float: "numbers", str: "texts", bool: "true and false"}


class InvalidFieldError(ValueError):
    """A field has a value that is not allowed.

    >>> str(InvalidFieldError("lora.rank", -1, "integers of at least 0"))
    'lora.rank=-1 was given; allowed are integers of at least 0.'
    """

    def __init__(self, name: str, value: Any, allowed: str) -> None:
        given = repr(value)
        given = given if len(given) <= SHOWN_CHARACTERS else f"{given[:SHOWN_CHARACTERS]}…"
        super().__init__(f"{name}={given} was given; allowed are {allowed}.")
        self.name, self.value, self.allowed = name, value, allowed


@dataclass(frozen=True)
class Range:
    """Numbers that a field takes, in the words of an error; null passes where the field's type has it."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __call__(self, value: Any) -> None:
        if value is not None and not (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        ):
            raise ValueError(str(self))

    def __str__(self) -> str:
        """
        >>> str(Range(1, 32)), str(Range(0, below=1)), str(Range(above=0))
        ('from 1 to 32', 'of at least 0 and below 1', 'above 0')
        """
        if self.low is not None and self.high is not None:
            return f"from {self.low} to {self.high}"
        limits = {"of at least": self.low, "above": self.above, "of at most": self.high, "below": self.below}
        return " and ".join(f"{words} {limit}" for words, limit in limits.items() if limit is not None)


def within(
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
    advice: str = "",
    **field: Any,
) -> Any:
    """A field of a validated dataclass that takes numbers of a range.

    Args:
        advice: follows in the error what is allowed, such as why.
        field: `default` and what else `dataclasses.field` takes.
    """
    return validated_field(Range(low, high, above, below), metadata={"advice": advice}, **field)


def validated(cls: type[T]) -> type[T]:
    """The dataclass, checking its fields whenever one is built or assigned to. Frozen ones cannot be: make it plain.

    Raises (when built):
        InvalidFieldError: a field of another type, or out of its range.
        ValueError: what a method `validate_…` of the class raises.
    """
    if cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__name__} is frozen; strict would not see its fields.")
    hints = get_type_hints(cls)
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    for field in fields:
        field.type = with_ints(hints[field.name])
        field.metadata = MappingProxyType({**field.metadata, "validator": [refuse_infinite, *ranges(field)]})
    strict(cls)
    strict_init, strict_set = cls.__init__, cls.__setattr__
    allowed = {field.name: describe(hints[field.name], field) for field in fields}

    @functools.wraps(strict_init)
    def init(self: T, *args: Any, **values: Any) -> None:
        try:
            strict_init(self, *args, **values)
        except StrictDataclassClassValidationError as error:
            raise ValueError(str(error.__cause__)) from None

    def set_field(self: T, name: str, value: Any) -> None:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value  # a path stands for its text
        try:
            strict_set(self, name, value)
        except StrictDataclassFieldValidationError:
            words = allowed[name] if is_finite(value) else allowed[name].replace("numbers", "finite numbers", 1)
            raise InvalidFieldError(name, value, words) from None

    cls.__init__ = init  # type: ignore[method-assign, assignment]
    cls.__setattr__ = set_field  # type: ignore[method-assign, assignment]
    VALIDATED.add(cls)
    return cls


def is_validated(cls: type[Any]) -> bool:
    """Whether `validated` decorates this very class."""
    return cls in VALIDATED


def build(cls: type[T], values: Mapping[str, Any], *, of: str, prefix: str = "") -> T:
    """A validated dataclass, and those inside it, from plain values such as a file holds.

    Args:
        of: whose fields they are, in an error: "grounded heads".
        prefix: stands before each name in an error: "lora.".

    Raises:
        ValueError: a field that does not exist (names the nearest), one that is missing, or a value not allowed.
    """
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls)  # type: ignore[arg-type]
    hints, known = get_type_hints(cls), [field.name for field in fields if field.init]
    for name in values:
        if name not in known:
            raise ValueError(
                f"{prefix + str(name)!r} is no field of {of}; allowed are {', '.join(known)}.{nearest(name, known)}"
            )
    for field in fields:
        if field.name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(
                f"The field {prefix}{field.name} of {of} was not given and has no default; allowed are "
                f"{describe(hints[field.name], field)}."
            )
    built = {name: build_inner(hints[name], value, of, f"{prefix}{name}") for name, value in values.items()}
    try:
        return cls(**built)
    except InvalidFieldError as error:
        raise InvalidFieldError(prefix + error.name, error.value, error.allowed) from None


def build_inner(hint: Any, value: Any, of: str, name: str) -> Any:
    """What a field holds where it is a dataclass, or a list of them; any other value as it is."""
    for kind in members(hint):
        if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
            return build(cast("type[Any]", kind), value, of=of, prefix=f"{name}.")
        if isinstance(value, list) and get_origin(kind) is list:
            (inner,) = get_args(kind)
            return [build_inner(inner, item, of, f"{name}.{i}") for i, item in enumerate(value)]
    return value


def nearest(name: Any, known: Iterable[str]) -> str:
    """
    >>> nearest("medussa", ["grounded", "medusa"])
    " Did you mean 'medusa'?"
    """
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union; anything else stands for itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def with_ints(hint: Any) -> Any:
    """The type with ints where it has floats: 1 is written for 1.0.

    >>> with_ints(list[float]), with_ints(float | None)
    (list[float | int], typing.Union[float, int, NoneType])
    """
    if hint is float:
        return float | int
    if not get_args(hint) or get_origin(hint) is Literal:
        return hint
    inner = tuple(map(with_ints, get_args(hint)))
    return Union[inner] if get_origin(hint) is UnionType else get_origin(hint)[inner]  # noqa: UP007


def refuse_infinite(value: Any) -> None:
    """NaN passes every comparison's negation, so a range alone would let it through."""
    if not is_finite(value):
        raise ValueError


def is_finite(value: Any) -> bool:
    """Whether neither a value nor an item of a list is NaN or infinite.

    >>> is_finite(1.5), is_finite("text"), is_finite([0.0, float("inf")])
    (True, True, False)
    """
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def ranges(field: dataclasses.Field[Any]) -> list[Range]:
    return [check for check in field.metadata.get("validator", []) if isinstance(check, Range)]


def describe(hint: Any, field: dataclasses.Field[Any]) -> str:
    """What a field takes, in words.

    >>> describe(int | None, within(1)), describe(list[float], within())
    ('integers of at least 1, or null', 'lists of numbers')
    """
    limits = "".join(f" {limits}" for limits in map(str, ranges(field)) if limits)
    words = [noun(kind) + (limits if kind in (int, float) else "") for kind in members(hint) if kind is not NoneType]
    advice = field.metadata.get("advice", "")
    return ", or ".join([*words, *["null"] * (NoneType in members(hint))]) + (f"; {advice}" if advice else "")


def noun(kind: Any) -> str:
    if get_origin(kind) is Literal:
        *others, last = map(repr, get_args(kind))
        return f"{', '.join(others)} and {last}" if others else last
    if get_origin(kind) in (list, tuple):
        return f"lists of {noun(get_args(kind)[0])}"
    return NOUNS.get(get_origin(kind) or kind, "mappings")
