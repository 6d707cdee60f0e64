"""Each file here is one foreign format, which is found by the file's name.

A format's file holds

    SUMMARY                       who loads it, in which versions: shown by `headway export --list`
    Config                        @validated dataclass; its fields are the format's options: --version 2
    write(token_heads, folder, config)
                                  into an empty folder; absent where a format is only read
    convert(heads, out, config, backbone=…, overwrite=…)
                                  instead of `write`, where a format is made of the folder of the heads
    write_in_place(token_heads, folder, config)
                                  with --overwrite: change a folder that the format can change, and return a sentence on
                                  what was compared; None for any other folder
    read(folder, backbone)        token heads on the backbone; absent where a format cannot be read back as heads
    recognises(folder)            whether a folder is of this format, for `headway import` without --from
    ROUNDINGS                     the largest difference of logits after reading back, in roundings of the largest
                                  logit; absent where they must be equal
    compare(token_heads, folder, config)
                                  instead of `read`, where what was written is checked in another way; returns a
                                  sentence on how

and a visible table of names (heads/export/names.py). A value that a format cannot say is an error.

>>> "medusa" in formats()
True
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

from heads.checkpoint.schema import DESCRIPTION
from heads.validation import nearest


def formats() -> list[str]:
    """The names of all formats as they are typed, sorted."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def format_module(name: str) -> ModuleType:
    """The module of a format.

    Raises:
        ValueError: no such format; names the nearest.
    """
    typed = name.replace("_", "-")
    if typed not in formats():
        raise ValueError(f"The format {name} was given; allowed are {', '.join(formats())}.{nearest(typed, formats())}")
    return importlib.import_module(f"{__name__}.{typed.replace('-', '_')}")


def recognise(folder: str | Path) -> str:
    """The one format that a folder has.

    Raises:
        ValueError: there is no folder, it holds heads of our own, or no format or several recognise it.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder} is no folder; give one that holds another program's heads.")
    if (Path(folder) / DESCRIPTION).is_file() or (Path(folder) / "heads" / DESCRIPTION).is_file():
        raise ValueError(
            f"{folder} holds heads of our own, which heads.load and every command read; nothing is imported."
        )
    found = [name for name in formats() if reads(name) and format_module(name).recognises(Path(folder))]
    if len(found) != 1:
        readable = ", ".join(name for name in formats() if reads(name))
        raise ValueError(
            f"{folder} is {'of no known format' if not found else 'of ' + ' and '.join(found)}; give "
            f"--from with one of {readable}."
        )
    return found[0]


def reads(name: str) -> bool:
    return hasattr(format_module(name), "recognises")


def writes(name: str) -> bool:
    return hasattr(format_module(name), "write") or hasattr(format_module(name), "convert")
