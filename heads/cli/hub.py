"""Where a command takes a folder of heads, it takes their name on the hub too: they are fetched before it runs.

    headway generate organisation/name --revision v2 --prompt "def "

A parameter is marked `BY_NAME`; `fetching_heads` gives its command the option --revision and hands it the folder in
huggingface_hub's cache. A folder of that name comes first, as in `heads.load`.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from heads.checkpoint.remote import HUB_NAME, NESTED, find_heads
from heads.cli.option_groups import CommandFunction

REVISION = "revision"
RevisionOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of heads that are named as on the hub.")
]


@dataclass(frozen=True)
class ByName:
    """Marks a parameter whose folders of heads may be names on the hub.

    Args:
        with_backbone: a backbone that lies with the heads is needed, unless --backbone names another.
    """

    with_backbone: bool = True


BY_NAME, BY_NAME_ALONE = ByName(), ByName(with_backbone=False)


def fetching_heads(command: CommandFunction) -> CommandFunction:
    """The same command for typer, with --revision, if a parameter of it is marked; else the command itself."""
    hints = get_type_hints(command, include_extras=True)
    extras = [(name, extra) for name, hint in hints.items() for extra in getattr(hint, "__metadata__", ())]
    marked = {name: extra for name, extra in extras if isinstance(extra, ByName)}
    if not marked:
        return command
    signature = inspect.signature(command)
    option = inspect.Parameter(REVISION, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=RevisionOption)

    @functools.wraps(command)
    def fetching(**given: Any) -> None:
        revision = given.pop(REVISION)
        check_revision(revision, [given[name] for name in marked])
        for name, mark in marked.items():
            with_backbone = mark.with_backbone and given.get("backbone") is None
            given[name] = local(given[name], revision, with_backbone=with_backbone)
        command(**given)

    own = [p.replace(kind=p.KEYWORD_ONLY, annotation=hints[name]) for name, p in signature.parameters.items()]
    fetching.__signature__ = inspect.Signature([*own, option])  # type: ignore[attr-defined]
    fetching.__annotations__ = {p.name: p.annotation for p in (*own, option)}
    return fetching


def is_hub_name(folder: Path) -> bool:
    return not folder.is_dir() and HUB_NAME.fullmatch(str(folder)) is not None


def check_revision(revision: str | None, given: list[Any]) -> None:
    """
    Raises:
        ValueError: a revision, and no heads on the hub that it could be of.
    """
    paths = [path for one in given for path in (one if isinstance(one, list) else [one]) if path is not None]
    if revision is not None and not any(map(is_hub_name, paths)):
        raise ValueError(
            f"--revision {revision} was given, which belongs to heads on the hub; leave it out, or give their name: "
            f"organisation/name."
        )


def local(given: Any, revision: str | None, *, with_backbone: bool) -> Any:
    """What a parameter was given, with folders of the cache in place of names on the hub."""
    if isinstance(given, list):
        return [local(one, revision, with_backbone=with_backbone) for one in given]
    if given is None or not is_hub_name(given):
        return given
    found = find_heads(str(given), revision=revision, with_backbone=with_backbone)
    return found.parent if found.name == NESTED else found
