"""Wheels for a machine without a network: downloaded on another machine, unpacked there into a folder of their own.

    python3 -m benchmarks.gpu.wheels build/wheels --python 3.12        # or `make gpu-wheels`

The versions are those installed on the downloading machine, where they were tested. torch is not among them: the GPU
machine's own fits its driver. Nothing else is taken for granted there; the wheel of a package that the machine has can
be deleted before the folder travels.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

NEEDED = (
    "accelerate",
    "datasets",
    "jsonargparse",
    "docstring_parser",
    "transformers",
    "typer",
    "pytest-timeout",
    "xxhash",
)
"""What training, decoding and their tests import, and an image with PyTorch may lack or have in another version."""
IN_THE_IMAGE = {"torch"}
"""These, and what only they need, are not downloaded."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def closure(names: Iterable[str]) -> dict[str, str]:
    """These packages and all that they need, as installed here: name to version.

    Raises:
        ValueError: one of them is not installed.
    """
    found, missing = follow(names)
    if missing:
        raise ValueError(f"{', '.join(missing)} is not installed here; `make setup` installs it.")
    return {name: package.version for name, package in found.items()}


def follow(names: Iterable[str]) -> tuple[dict[str, Distribution], list[str]]:
    """These packages and all that they need, but for the image's: what is installed here, and names that are not."""
    from packaging.requirements import Requirement  # one of the packages that a machine may lack
    from packaging.utils import canonicalize_name

    found: dict[str, Distribution] = {}
    missing: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in missing or name in IN_THE_IMAGE:
            continue
        try:
            found[name] = package = distribution(name)
        except PackageNotFoundError:
            missing.add(name)
            continue
        asked = [Requirement(line) for line in package.requires or []]
        waiting += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found, sorted(missing)


def fetch(folder: Path, python: str) -> None:
    """Download the wheels for a version of Python on Linux.

    Raises:
        ValueError: one of them could not be had.
    """
    wanted = [f"{name}=={version}" for name, version in closure(NEEDED).items()]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    if subprocess.run([*command, *wanted], check=False).returncode:
        raise ValueError(f"pip could not download {', '.join(wanted)} for Python {python}; its own message is above.")


def install(folder: Path) -> Path:
    """Unpack a folder of wheels beside them; returns the folder that goes into PYTHONPATH.

    Raises:
        ValueError: it has no wheels, or pip could not unpack them.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ValueError(f"--wheels {folder} has no wheels; `make gpu-wheels` on a machine with a network fills it.")
    target = folder.resolve() / "unpacked"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    if subprocess.run([*command, "--upgrade", "--target", str(target), *map(str, wheels)], check=False).returncode:
        raise ValueError(f"pip could not unpack the wheels in {folder}; its own message is above.")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu.wheels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="where the wheels are stored")
    parser.add_argument("--python", default="3.12", help="the other machine's Python (default: %(default)s)")
    options = parser.parse_args()
    try:
        fetch(options.folder, options.python)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
