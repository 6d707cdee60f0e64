"""Read a run's config from YAML and command-line overrides; an unknown key is an error that names the nearest one."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace

from heads.validation import build, nearest
from train.config.settings import TrainConfig
from train.config.yaml_files import check_blocks, check_config_files, known_keys, yaml_keys

REFUSED_VALUE = re.compile(
    r'Parser key "([\w.]+)": Expected an? (typing\.Literal\[.*?\]|<class .*?>)\. Got value: (.*)'
)
REFUSED_BY_ALL = re.compile(
    r'Parser key "([\w.]+)": Does not validate .* Subtypes: \[(.*?)\] Errors: .* Given value: (.*)'
)
"""jsonargparse's messages for a value that is not of a field's type, or of none of its types."""
IN_A_LIST = re.compile(r"Parser key \"([\w.]+)\": Problem with given class_path '[\w.]+': (Parser key \")?")
"""What stands before such a message if the field is one of a list's item."""
WORDS = {"int": "integers", "float": "numbers", "str": "texts", "bool": "true and false", "NoneType": "or null"}
WORDS |= {"dict": "names and values", "list": "lists"}


def kinds_in_words(kinds: str) -> str:
    """
    >>> kinds_in_words("typing.Literal['cuda', 'cpu'], <class 'NoneType'>"), kinds_in_words("<class 'int'>")
    ("'cuda', 'cpu', or null", 'integers')
    """
    text = re.sub(r"typing\.Literal\[(.*?)\]", r"\1", kinds)
    return re.sub(r"<class '(\w+)'>", lambda found: WORDS.get(found[1], found[1]), text)


class Parser(ArgumentParser):
    """An argument parser whose errors are one sentence that names the nearest real key."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        if not self.exit_on_error:  # of a list's item: jsonargparse raises this again with the list's name
            super().error(message, ex)
        text = re.sub(r"\s+", " ", str(message)).strip()
        text = IN_A_LIST.sub(lambda found: f'Parser key "{found[1]}.' if found[2] else f"{found[1]}: ", text)
        unknown = re.search(r"(?:[Uu]nrecognized arguments:|Key)\s*'?-*([\w.]+)", text)
        hint = nearest(unknown.group(1), known_keys(TrainConfig)) if unknown else ""
        if (refused := REFUSED_VALUE.search(text)) or (refused := REFUSED_BY_ALL.search(text)):
            name, kinds, value = refused.groups()
            text = f"{name}={value!r} was given; allowed are {kinds_in_words(kinds)}."
        sys.stderr.write(f"{self.prog}: error: {text}{hint}\n")
        sys.exit(2)


def add_run_flags(parser: Parser, skip: set[str] | None = None) -> None:
    """Add `--config` and a flag for every field of a run, except those in `skip`, which the parser has already."""
    parser.add_argument("--config", action="config", help="YAML file of the run; later flags override its keys.")
    parser.add_class_arguments(TrainConfig, fail_untyped=False, skip=skip)


def read_config(arguments: Sequence[str] | None = None, prog: str = "train.py") -> TrainConfig:
    """The run's config from `--config FILE` and overrides such as `--rates.heads 3e-4`, checked.

    Raises:
        SystemExit: on what cannot be parsed, after one sentence on stderr.
        ValueError: on values that cannot train.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    check_config_files(arguments)
    return build_config_of(run_parser(prog).parse_args(empty_lists_first(arguments)))


@functools.cache
def run_parser(prog: str) -> Parser:
    """The parser, cached, since adding a flag for every field takes longer than parsing a command line."""
    parser = Parser(prog=prog, description="Train multi-token prediction heads, or a backbone, from one YAML file.")
    add_run_flags(parser)
    return parser


def build_config_of(namespace: Namespace) -> TrainConfig:
    """Build and check the run's config from parsed values.

    Raises:
        ValueError: on values that cannot train.
    """
    values = namespace.as_dict()
    check_blocks(values, TrainConfig)
    fields = {field.name: values[field.name] for field in dataclasses.fields(TrainConfig)}
    config = build(TrainConfig, fields, of="a run's config")
    config.check()
    return config


def empty_lists_first(arguments: Sequence[str]) -> list[str]:
    """The command line with an empty list before each list of sources, so that it replaces an earlier one.

    The parser merges two lists of the same length entry by entry, so a new source would inherit the old one's fraction
    or format. `--data.train+` and `--data.train.path` still change the list that was given before.

    >>> empty_lists_first(["--data.train", '[{"path": "a"}]', "--seed", "1"])
    ['--data.train=[]', '--data.train', '[{"path": "a"}]', '--seed', '1']
    """
    found: list[str] = []
    for argument, after in pairwise([*arguments, ""]):
        flag, given, value = argument.partition("=")
        if flag == "--config":
            content = yaml.safe_load(Path(value if given else after).read_text(encoding="utf-8-sig"))
            keys = set(yaml_keys(content)) & set(known_lists(TrainConfig))
        else:
            keys = {flag.removeprefix("--")} & set(known_lists(TrainConfig))
        found += [*(f"--{key}=[]" for key in sorted(keys)), argument]
    return found


def known_lists(config_class: Any, prefix: str = "") -> list[str]:
    """
    >>> known_lists(TrainConfig)
    ['data.train', 'data.eval']
    """
    keys: list[str] = []
    for name, hint in get_type_hints(config_class).items():
        if get_origin(hint) is list and any(map(dataclasses.is_dataclass, get_args(hint))):
            keys.append(prefix + name)
        elif dataclasses.is_dataclass(hint):
            keys += known_lists(hint, f"{prefix}{name}.")
    return keys
