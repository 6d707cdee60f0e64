"""C++ beside Python: a file with no dependency but OpenMP, built once by this machine's compiler, and loaded.

PyTorch's own OpenMP is found by its name, so both share their threads. A file is built into a user's cache (about 3 s),
under a name that says which source, compiler and flags made it, so several versions can lie there side by side.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")


class UnavailableError(Exception):
    """Why there is no compiled product here."""


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The functions of a C++ file, built where this source, compiler and machine have none yet.

    Args:
        source: exports `int supported()`, whether this processor has the instructions that it uses.

    Raises:
        UnavailableError: another kind of machine, no compiler, or it failed.
    """
    if platform.machine() not in ("x86_64", "AMD64") or os.name != "posix":
        raise UnavailableError(f"the kernels are for x86-64 processors, and this machine is {platform.machine()}")
    try:
        loaded = ctypes.CDLL(str(built(source)))
    except OSError as error:
        raise UnavailableError(f"the kernels do not load: {error}") from error
    if not loaded.supported():
        raise UnavailableError("the kernels need a processor with AVX2, FMA and F16C")
    return loaded


@functools.cache
def why_unavailable(source: Path) -> str:
    """Why the functions of this file are not to be had here; empty where they are."""
    try:
        load(source)
    except UnavailableError as why:
        return str(why)
    return ""


def built(source: Path) -> Path:
    """
    Raises:
        UnavailableError: no compiler, or it failed.
        OSError: the cache cannot be written.
    """
    name = os.environ.get("CXX", "")
    compiler = shutil.which(name) if name else shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnavailableError(f"no C++ compiler {name or '(c++, g++, clang++)'} was found")
    made_of = repr((source.read_text(), compiler, os.stat(compiler).st_mtime, FLAGS))
    file = cache_folder() / f"{source.stem}_{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not file.exists():
        compile_to(file, source, compiler)
    return file


def compile_to(file: Path, source: Path, compiler: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # several processes may build at once
        made = Path(folder) / file.name
        command = [compiler, *FLAGS, str(source), "-o", str(made)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{compiler} took more than 300 s") from error
        if ran.returncode:
            raise UnavailableError(f"{compiler} failed: {(ran.stderr.strip().splitlines() or ['without a word'])[0]}")
        os.replace(made, file)


def cache_folder() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return (Path(given) if given else Path.home() / ".cache") / "headway"
