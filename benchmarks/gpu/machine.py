"""What the figures were made with, and what the machine's Python holds of what the commands import: their first lines.

The commit, the GPUs and each package's version are printed, with those of the folder of wheels apart, then in a
sentence what is older or newer than pyproject.toml asks for, since tests ran on those versions alone. What is missing
ends the commands before the first of them begins.
"""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from benchmarks.gpu.wheels import NEEDED, follow

ROOT = Path(__file__).resolve().parent.parent.parent
FIND_GPUS = """
import torch
for i in range(torch.cuda.device_count()):
    gpu = torch.cuda.get_device_properties(i)
    print(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
"""


def describe(unpacked: Path | None = None) -> str:
    """The first lines; the unpacked wheels come before the machine's own packages from here on.

    Raises:
        ValueError: the machine lacks what the commands import.
    """
    if unpacked is not None:
        sys.path.insert(0, str(unpacked))
        importlib.invalidate_caches()
    found = found_packages()
    lines = [f"Python {platform.python_version()}, {named(found, unpacked, travelled=False)}"]
    if unpacked is not None:
        lines.append(f"from {unpacked.parent}: {named(found, unpacked, travelled=True)}")
    return "\n".join([*lines, *differences(found)])


def found_packages() -> dict[str, Distribution]:
    """torch, what the commands import and all that this needs.

    Raises:
        ValueError: some of it is missing.
    """
    try:
        found = {"torch": distribution("torch")}
    except PackageNotFoundError as error:
        raise ValueError("This Python has no PyTorch; give `make gpu` the one that has it, as PYTHON=….") from error
    try:
        more, missing = follow(NEEDED)
    except ModuleNotFoundError as error:  # what reads the packages' own metadata
        more, missing = {}, [str(error.name)]
    if missing:
        raise ValueError(
            f"This Python lacks {', '.join(missing)}; `make gpu-wheels` on a machine with a network fills "
            "build/wheels, from which `make gpu` takes them here."
        )
    return found | more


def named(found: Mapping[str, Distribution], unpacked: Path | None, *, travelled: bool) -> str:
    """Name and version of the packages that came with the wheels, or of the others."""
    chosen = {
        name: one.version
        for name, one in found.items()
        if travelled == (unpacked is not None and Path(str(one.locate_file(""))).resolve() == unpacked.resolve())
    }
    torch_first = sorted(chosen, key=lambda name: (name != "torch", name))
    return ", ".join(f"{name} {chosen[name]}" for name in torch_first)


def differences(found: Mapping[str, Distribution]) -> Iterator[str]:
    """A sentence for each package that is not in the range that pyproject.toml asks for."""
    from packaging.requirements import Requirement  # a machine may lack it, which ends earlier
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for asked in map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["train"]]):
        here = found.get(canonicalize_name(asked.name))
        if here is not None and not asked.specifier.contains(here.version, prereleases=True):
            yield (
                f"{asked.name} {here.version} is here and Headway's tests ran with {asked.specifier}: a part that "
                f"fails may need that{'' if asked.name == 'torch' else ', which `make gpu-wheels` brings'}."
            )


def describe_gpus(environment: Mapping[str, str]) -> str:
    """A line for each GPU that PyTorch finds in another process, so that this one leaves them free.

    Raises:
        ValueError: it finds none.
    """
    command = [sys.executable, "-c", FIND_GPUS]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if found := done.stdout.strip():
        return found
    reason = (done.stderr.strip().splitlines() or [""])[-1]
    raise ValueError(
        f"PyTorch {distribution('torch').version} finds no GPU here{f' ({reason})' if reason else ''}; give `make gpu` "
        "a Python whose PyTorch finds one, as PYTHON=…, or try the programs on a CPU with --tiny."
    )


def describe_commit() -> str:
    """
    >>> describe_commit().startswith("commit ")
    True
    """
    from train.loop.provenance import commit  # train imports what a machine may lack, which ends earlier

    return f"commit {commit() or 'unknown: git finds no checkout'}"
