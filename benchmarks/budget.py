"""A benchmark's budget of minutes: a part begins only if one as long as the longest so far would end in time.

The benchmark names the parts that it leaves out, so that a shorter table says what is missing.
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
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.minutes, self.clock = minutes, clock
        self.started, self.longest = clock(), 0.0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """The context in which each part runs, so that its duration is known."""
        began = self.clock()
        try:
            yield
        finally:
            self.longest = max(self.longest, self.clock() - began)

    def is_spent(self) -> bool:
        """Whether a part as long as the longest one would end too late."""
        return self.minutes is not None and self.clock() + self.longest > self.started + 60 * self.minutes

    def describe(self) -> str:
        return f"its share of the run, {self.minutes:g} minutes, is over"
