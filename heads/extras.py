"""Optional packages: a missing one ends in a sentence that names the extra to install.

The wheel requires only what decoding with heads needs. Other packages come with an extra (`headway[cli]`, `[train]`,
`[lora]`, `[plots]`; pyproject.toml has the lists) and are imported where they are used, inside `needs_extra`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

OURS = ("heads", "train")


class MissingExtraError(ImportError):
    """A package of an extra is used and is not installed."""


@contextmanager
def needs_extra(extra: str, use: str) -> Iterator[None]:
    """Within the context, packages of an extra are imported.

    Args:
        extra: its name in pyproject.toml.
        use: what the packages are needed for, as the beginning of a sentence.

    Raises:
        MissingExtraError: a package is not installed; the sentence names the extra that brings it.

    >>> with needs_extra("lora", "This folder holds a LoRA adapter"):
    ...     import a_package_that_is_missing
    Traceback (most recent call last):
    heads.extras.MissingExtraError: This folder holds a LoRA adapter, which needs the package \
a_package_that_is_missing; pip install "headway[lora]".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", *OURS):  # our own bug, which no extra would fix
            raise
        raise MissingExtraError(
            f'{use}, which needs the package {package}; pip install "headway[{extra}]".', name=package
        ) from None
