"""Check that an export is written to a new folder, or replaces an earlier export and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from heads.checkpoint.schema import DESCRIPTION

OWN_FOLDERS = ("heads", "custom_generate")
"""Sub-folders that an export may hold."""


def check_place(out: Path, sources: Iterable[str | Path | None], *, overwrite: bool) -> None:
    """
    Args:
        out: the folder to write.
        sources: folders from which the export is made; names of the hub are ignored.
        overwrite: whether an earlier export may be replaced.

    Raises:
        ValueError: `out` is, holds or lies in a source, exists without `overwrite`, or is no earlier export.
    """
    place = out.resolve()
    for source in (Path(source).resolve() for source in sources if source is not None and Path(source).is_dir()):
        if place == source or place in source.parents or source in place.parents:
            raise ValueError(f"{out} is, holds or lies in {source}, which is exported; give another folder.")
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise ValueError(f"{out} exists; give another folder, or --overwrite to replace it.")
    if out.is_symlink() or not out.is_dir() or not is_export(out):
        raise ValueError(
            f"{out} is no folder that an export has written, and --overwrite replaces nothing else; give another "
            f"folder, or remove it yourself."
        )


def is_export(folder: Path) -> bool:
    """Whether a folder is empty, or has config.json or a .gguf file, no heads of ours, and only folders of exports."""
    found = list(folder.iterdir())
    known = (folder / "config.json").is_file() or any(folder.glob("*.gguf"))
    strange = any(path.is_dir() and path.name not in OWN_FOLDERS for path in found)
    return not found or (known and not strange and not (folder / DESCRIPTION).exists())
