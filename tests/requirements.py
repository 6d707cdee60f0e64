"""What pyproject.toml asks for."""

from __future__ import annotations

import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared(*extras: str) -> dict[str, Requirement]:
    """What the wheel with some extras asks for, without what comes with those packages."""
    found = dict[str, Requirement]()
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        if requirement.name == PROJECT["name"]:
            found |= declared(*sorted(requirement.extras))
        else:
            found[canonicalize_name(requirement.name)] = requirement
    return found
