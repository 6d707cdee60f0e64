"""Checks of a run's folder before anything is loaded: it can be written, and no link in it leads out of it.

A run writes, moves and removes files in its folder, which may have been downloaded together with checkpoints.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from heads.inside import links_out


def check_run_folder(output_dir: str) -> None:
    """
    Raises:
        ValueError: a file is in its place, it cannot be written, or a link in it leads out of it.
    """
    folder = Path(output_dir)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"output_dir {output_dir} cannot be written ({existing}: {error.strerror or error}); give another one."
        ) from None
    if existing == folder and (links := links_out(folder)):
        raise ValueError(
            f"{links[0]} is a link to {links[0].readlink()}, outside output_dir {output_dir}, where a run writes and "
            f"removes files; put a copy in its place, remove it, or give another output_dir."
        )
