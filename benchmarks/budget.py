"""A benchmark's budget of minutes: a part begins only if one as long as the longest so far would end in time.

Parts may have sizes, such as the parameters of a model: the longest is then that with the most seconds for its size,
and a larger part is expected to take proportionally longer. The benchmark names the parts that it leaves out, so that a
shorter table says what is missing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Budget:
    """The minutes of all parts together; None sets no limit.

    >>> now = iter([0.0, 0.0, 40.0, 40.0, 65.0, 65.0])
    >>> budget = Budget(1.5, clock=lambda: next(now))
    >>> with budget.one(): pass             # of 40 seconds
    >>> budget.is_spent()                   # 40 more end at 80 of 90 seconds
    False
    >>> budget.is_spent(), budget.describe()
    (True, 'its share of the run, 1.5 minutes, is over')
    >>> now = iter([0.0, 0.0, 20.0, 20.0, 20.0])
    >>> budget = Budget(1, clock=lambda: next(now))
    >>> with budget.one(size=1.0): pass     # of 20 seconds
    >>> budget.is_spent(size=2.0), budget.is_spent(size=2.1)
    (False, True)
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.minutes, self.clock = minutes, clock
        self.started, self.longest = clock(), 0.0

    @contextlib.contextmanager
    def one(self, size: float = 1.0) -> Iterator[None]:
        """The context in which each part runs, so that its seconds for its size, in any unit, are known."""
        began = self.clock()
        try:
            yield
        finally:
            self.longest = max(self.longest, (self.clock() - began) / size)

    def is_spent(self, size: float = 1.0) -> bool:
        """Whether a part of this size, as long for its size as the longest one, would end too late."""
        return self.minutes is not None and self.clock() + size * self.longest > self.started + 60 * self.minutes

    def describe(self) -> str:
        return f"its share of the run, {self.minutes:g} minutes, is over"
