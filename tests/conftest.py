"""Lets every test import `tiny` and `throwaway_families`, keeps one thread, and puts the repository root before tests/.

tests/ holds folders named `heads` and `train`; without the root in front, `import heads` could find those.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent
below = {file.parent for file in TESTS.rglob("test_*.py")}
for folder in (*sorted(below), TESTS, TESTS.parent):  # the last one inserted comes first
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))

torch.set_num_threads(1)
