"""Environments that see only some of the installed packages, which are linked into them: nothing is downloaded."""

from __future__ import annotations

import sysconfig
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_environment(folder: Path, names: Iterable[str]) -> Path:
    """A virtual environment that holds these distributions and all that they need; returns its Python."""
    venv.create(folder, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    for name in sorted(closure(names)):
        link_distribution(name, site)
    return folder / "bin" / "python"


def closure(names: Iterable[str]) -> set[str]:
    """Distributions and all that these need, by the metadata of this environment."""
    found, waiting = set[str](), set(names)
    while waiting:
        name = waiting.pop()
        found.add(name)
        needed = map(Requirement, metadata.requires(name) or [])
        here = {line.name for line in needed if line.marker is None or line.marker.evaluate({"extra": ""})}
        waiting |= set(map(canonicalize_name, here)) - found
    return found


def link_distribution(name: str, site: Path) -> None:
    """The files and folders of an installed distribution, seen from another environment."""
    distribution = metadata.distribution(name)
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        target = Path(str(distribution.locate_file(top)))
        if target.exists() and not (site / top).exists():
            (site / top).symlink_to(target, target_is_directory=target.is_dir())
