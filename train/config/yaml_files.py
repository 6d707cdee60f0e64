"""YAML files of runs, checked before they are parsed: keys that are known and stand once, aliases that stay small."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from heads.validation import nearest
from train.config.settings import TrainConfig

FREE_NAMES = ("heads.", "trainer.", "backbone.quantization.", "data.train.roles.", "data.eval.roles.")
MAX_VALUES = 100_000  # in a YAML file, after its aliases are expanded


def check_config_files(arguments: Sequence[str]) -> None:
    """Raise ValueError on a YAML file that does not exist, or that has an unknown key."""
    for path in config_files(arguments):
        check_yaml_keys(path)


def config_files(arguments: Sequence[str]) -> list[Path]:
    """The YAML files named on the command line.

    Raises:
        ValueError: one does not exist, or the flag stands without one.
    """
    names = [after for flag, after in pairwise([*arguments, ""]) if flag == "--config"]
    names += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    for name in names:
        if not name:
            raise ValueError("--config was given without a file; runs are described in configs/*.yaml.")
        if not Path(name).is_file():
            problem = "is a folder" if Path(name).is_dir() else "does not exist"
            raise ValueError(f"--config {name} {problem}; runs are described in configs/*.yaml.")
    return [Path(name) for name in names]


def check_yaml_keys(path: Path) -> None:
    """Check that every key of a YAML file is a field; the error names the nearest one.

    Raises:
        ValueError: an unknown key, one that is given twice, or a file that is no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        check_aliases(node, {})
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or no real date
        raise ValueError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values at its top, such as `family: grounded`.")
    for name, lines in doubled_keys(node):
        raise ValueError(
            f"{path} has the key {name!r} twice, in lines {' and '.join(map(str, lines))}, and only the last would "
            f"count; keep one of them."
        )
    known = known_keys(TrainConfig)
    for key in yaml_keys(content):
        if key not in known and not key.startswith(FREE_NAMES):
            raise ValueError(f"{path} has the unknown key {key!r}.{nearest(key, known)}")


def doubled_keys(node: Any, prefix: str = "") -> Iterator[tuple[str, list[int]]]:
    """Keys that a mapping has twice, in dotted form, and their lines.

    >>> list(doubled_keys(yaml.compose("data:\\n  seed: 1\\n  path: x\\n  seed: 2")))
    [('data.seed', [2, 4])]
    """
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from doubled_keys(item, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, list[int]] = {}
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        lines.setdefault(name, []).append(key.start_mark.line + 1)
        yield from doubled_keys(value, f"{name}.")
    yield from ((name, found) for name, found in lines.items() if len(found) > 1)


def check_aliases(node: Any, sizes: dict[int, int]) -> int:
    """Count the values below a YAML node, aliases expanded; `sizes` keeps the counts, 0 while a node is being visited.

    >>> check_aliases(yaml.compose("{a: &a [1, 2], b: [*a, *a]}"), {})
    13

    Raises:
        ValueError: an alias contains itself, or the node has far more values than any config.
    """
    if id(node) not in sizes:
        sizes[id(node)] = 0
        items = node.value if isinstance(node, yaml.CollectionNode) else []
        inner = [part for item in items for part in (item if isinstance(item, tuple) else (item,))]  # keys and values
        sizes[id(node)] = 1 + sum(check_aliases(part, sizes) for part in inner)
    elif not sizes[id(node)]:
        raise ValueError("an alias contains itself")
    if sizes[id(node)] > MAX_VALUES:
        raise ValueError(f"its aliases stand for more than {MAX_VALUES:,} values")
    return sizes[id(node)]


def check_blocks(values: dict[str, Any], config_class: Any, prefix: str = "") -> None:
    """Check that keys with fields below them have a mapping, or null where their type allows it.

    Raises:
        ValueError: such a key has no value, or one that is no mapping.
    """
    for name, hint in get_type_hints(config_class).items():
        value, key, kinds = values.get(name), f"{prefix}{name}", (hint, *get_args(hint))
        is_block = dataclasses.is_dataclass(hint) or any(get_origin(kind) is dict for kind in kinds)
        if not is_block or name not in values or (value is None and NoneType in kinds):
            continue
        if not isinstance(value, dict) or not all(isinstance(field, str) for field in value):
            given = "nothing below it" if value is None else repr(value)
            raise ValueError(
                f"{key} was given with {given}; it takes names and values{such_as(hint)}: give some, or leave it out."
            )
        if dataclasses.is_dataclass(hint):
            check_blocks(value, hint, f"{key}.")


def such_as(hint: Any) -> str:
    """
    >>> from train.config.settings import RatesConfig
    >>> such_as(RatesConfig)
    ' (heads, base, heads_to_base)'
    """
    return f" ({', '.join(f.name for f in dataclasses.fields(hint))})" if dataclasses.is_dataclass(hint) else ""


def known_keys(config_class: Any, prefix: str = "") -> list[str]:
    """All dotted keys of a config dataclass; the entries of lists go without an index."""
    keys: list[str] = []
    for name, hint in get_type_hints(config_class).items():
        keys.append(prefix + name)
        for inner in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(inner):
                keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def yaml_keys(content: Any, prefix: str = "") -> list[str]:
    if isinstance(content, list):
        return [key for item in content for key in yaml_keys(item, prefix)]
    if not isinstance(content, dict):
        return []
    found: list[str] = []
    for name, value in content.items():
        found.append(f"{prefix}{name}")
        found += yaml_keys(value, f"{prefix}{name}.")
    return found
