"""One file, one suite of `headway evaluate --suite NAME`; the file's name is the suite's. Found by name: no table.

A suite's file holds three names, and `compare` where its runs can be held against each other:

    Config                          @validated dataclass; its fields are the command's options: --max-new-tokens 64
    run(task, config)               a SuiteTask (heads/evaluation/runs/task.py) to plain figures, which JSON can hold;
                                    each unit of work is kept in `task.rows`, so that an interrupted run is resumed;
                                    "failed": True makes the command's exit code 1
    sections(results)               what report.html and the terminal show of these figures (heads/evaluation/report)
    compare(runs)                   sections about several runs by name, for `headway compare RUN RUN …`

>>> "speed" in suites()
True
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from heads.validation import nearest


def suites() -> list[str]:
    """The names of all suites as they are typed, sorted: lm-eval is the file lm_eval.py."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def suite_module(name: str) -> ModuleType:
    """The module of a suite.

    Raises:
        ValueError: no such suite; names the nearest.
    """
    typed = name.replace("_", "-")
    if typed not in suites():
        raise ValueError(f"--suite {name} was given; allowed are {', '.join(suites())}.{nearest(typed, suites())}")
    return importlib.import_module(f"{__name__}.{typed.replace('-', '_')}")
