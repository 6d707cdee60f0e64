"""Skip and count bad rows; too many of them are an error that says what to do about the first one.

Training on stored rows, training on streamed rows and `headway count-ngrams` share this rule.
"""

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

SHOWN_PROBLEMS = 5  # bad rows of a source that are described; the others are only counted
ADVICE = {
    "not JSON": "repair or remove those lines",
    "has the role": "say what the role stands for: roles: {moderator: user} in the source, or --roles moderator=user",
    "the chat template": "set data.chat_template to one that takes such conversations",
    "loss_mask": "give a loss_mask of 0 and 1 for each token id",
    "token ids": "give lists of token ids from 0 on, or set the source's format and column",
}
"""What to do about the first bad row, by words of its problem."""


def refuse_bad_rows(
    name: str,
    rows: int,
    bad: int,
    problems: Sequence[str],
    max_bad_fraction: float,
    setting: str = "data.max_bad_fraction",
) -> None:
    """
    Args:
        name: the source's name.
        rows: how many rows were read.
        bad: how many of them are bad.
        problems: place and reason of the first bad rows.
        setting: the setting that the user would raise.

    Raises:
        ValueError: more than the share `max_bad_fraction` of the rows are bad.
    """
    if bad > max_bad_fraction * rows:
        raise ValueError(
            f"{bad} of {rows} rows of {name!r} are bad, more than {100 * max_bad_fraction:g}%: {'; '.join(problems)}; "
            f"{advice(problems)}, or raise {setting} to leave them out."
        )


def advice(problems: Sequence[str]) -> str:
    """
    >>> advice(["a.jsonl line 3: not JSON (Expecting value)"])
    'repair or remove those lines'
    >>> advice(["a.jsonl line 3: the text is missing"])
    "repair them, or set the source's format and column"
    """
    fitting = (what for words, what in ADVICE.items() if problems and words in problems[0])
    return next(fitting, "repair them, or set the source's format and column")


def warn_of_bad_rows(name: str, rows: int, bad: int, problems: Sequence[str]) -> None:
    """Log one line for all bad rows of a source, if there are any."""
    if bad:
        more = f"; and {bad - len(problems):,} more" if bad > len(problems) else ""
        logger.warning("%s: %d of %d rows are bad and skipped: %s%s", name, bad, rows, "; ".join(problems), more)


class BadRows:
    """The bad rows of a stream, whose end is not known: the first ones are described, and all are counted.

    Args:
        name: the source's name.
        allowed: share of the rows that may be bad.
    """

    def __init__(self, name: str, allowed: float) -> None:
        self.name, self.allowed = name, allowed
        self.count = 0
        self.problems: list[str] = []

    def add(self, problem: str, rows: int) -> None:
        """Count a bad row. The first few are logged one by one; after that the total is logged at 10, 100, 1,000, …"""
        self.count += 1
        if self.count <= SHOWN_PROBLEMS:
            self.problems.append(problem)
            logger.warning("%s: bad row skipped: %s", self.name, problem)
        elif set(str(self.count)[1:]) == {"0"} and str(self.count)[0] == "1":
            self.tell(rows)

    def refuse(self, rows: int) -> None:
        """
        Raises:
            ValueError: too many of the rows so far are bad.
        """
        refuse_bad_rows(self.name, rows, self.count, self.problems, self.allowed)

    def end(self, rows: int) -> None:
        """At the end of the stream, `refuse`, or log the total if not all bad rows were described."""
        self.refuse(rows)
        if self.count > len(self.problems):
            self.tell(rows)

    def tell(self, rows: int) -> None:
        logger.warning("%s: %d of %d rows so far are bad and skipped", self.name, self.count, rows)
