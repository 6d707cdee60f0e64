"""A table of the native names of tensors and their names in a foreign format, for reading and writing.

    NAMES = Names({"bodies.{k}.{l}.linear.weight": "{k}.{l}.linear.weight"})

Words in braces stand for numbers, the same ones on both sides. A tensor without a name on the other side is an error,
since a head that lacks one of its tensors would draft badly without a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

SHOWN = 6


class Names:
    """The table.

    Args:
        native_to_foreign: the foreign pattern of each native one.
        not_read: patterns of foreign tensors that are no part of the heads and are skipped, such as a copy of the
            backbone's embedding.

    >>> names = Names({"bodies.{k}.0.weight": "medusa_head.{k}.0.weight"})
    >>> names.foreign("bodies.3.0.weight"), names.native("medusa_head.3.0.weight")
    ('medusa_head.3.0.weight', 'bodies.3.0.weight')
    """

    def __init__(self, native_to_foreign: Mapping[str, str], *, not_read: Sequence[str] = ()) -> None:
        self.pairs = dict(native_to_foreign)
        self.not_read = tuple(not_read)

    def foreign(self, native: str) -> str | None:
        """The foreign name of one of our tensors; None where it has none."""
        return first_match(native, self.pairs.items())

    def native(self, foreign: str) -> str | None:
        return first_match(foreign, ((theirs, ours) for ours, theirs in self.pairs.items()))

    def to_foreign(self, tensors: Mapping[str, Tensor], format: str) -> dict[str, Tensor]:
        """The tensors under their foreign names.

        Raises:
            ValueError: tensors without a name in the format; the sentence lists them.
        """
        named = {name: self.foreign(name) for name in tensors}
        refuse_homeless([name for name, found in named.items() if found is None], f"in the format {format}")
        return {str(named[name]): tensor.detach().contiguous() for name, tensor in tensors.items()}

    def to_native(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """The tensors under their native names.

        Args:
            where: the folder, for messages.

        Raises:
            ValueError: tensors without a native name, which the sentence lists, or two with the same one.
        """
        kept = [name for name in tensors if first_match(name, ((pattern, "") for pattern in self.not_read)) is None]
        named = {name: self.native(name) for name in kept}
        refuse_homeless([name for name, found in named.items() if found is None], f"in heads read from {where}")
        if len(set(named.values())) < len(named):
            raise ValueError(f"{where} holds tensors twice, under two names of one place; give a folder of one format.")
        return {str(named[name]): tensors[name] for name in kept}


def first_match(name: str, pairs: Iterable[tuple[str, str]]) -> str | None:
    """The second pattern of the first pair whose first pattern is the name, with its numbers put in.

    >>> first_match("a.2.b", [("{k}.b", "no"), ("a.{k}.b", "{k}/b")])
    '2/b'
    """
    for pattern, other in pairs:
        if found := re.fullmatch(as_expression(pattern), name):
            return str(other.format(**found.groupdict()))
    return None


def as_expression(pattern: str) -> str:
    parts = re.split(r"\{(\w+)\}", pattern)
    seen: set[str] = set()
    expression = ""
    for i, part in enumerate(parts):
        if i % 2 == 0:
            expression += re.escape(part)
        else:
            expression += f"(?P={part})" if part in seen else rf"(?P<{part}>\d+)"
            seen.add(part)
    return expression


def refuse_homeless(names: Sequence[str], where: str) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise ValueError(f"No place {where} for {', '.join(names[:SHOWN])}{more}; nothing was written.")
