"""The compiled products with microscaling weights on a CPU: cpu_kernel.cpp, built once by this machine's compiler.

The file has no dependency but OpenMP, and PyTorch's own is found by its name, so both share their threads. It is built
into a user's cache at the first product (about 3 s), under a name that says which source, compiler and flags made it.
Up to FUSED_ROWS rows are multiplied as the codes are decoded. More rows are bound by arithmetic: there some outputs'
weights at a time are decoded and handed to PyTorch's product.
"""
# N rows of x, I inputs, O outputs, P bytes of a packed row, G = I / 32 blocks of a row

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
from typing import Any

import torch
from torch import Tensor

from heads.quantization.formats import Format

FUSED_ROWS = 16  # from there PyTorch's product of decoded weights is faster (python -m benchmarks.speed.mx)
DECODED_AT_ONCE = 1 << 20  # weights, 4 MiB: what stays in a processor's caches
SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")


class UnavailableError(Exception):
    """Why there is no compiled product here."""


def multiply_compiled(
    x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None
) -> Tensor:
    """(N, O) float32.

    Args:
        x_NI: float32 or narrower, on a CPU.

    Raises:
        UnavailableError: nothing was compiled, or the processor lacks the instructions.
    """
    library()  # before anything is allocated
    x_NI = x_NI.to(torch.float32).contiguous()
    bias_O = None if bias_O is None else bias_O.to(torch.float32).contiguous()
    codes_OP, scales_OG = codes_OP.contiguous(), scales_OG.contiguous()
    product = few_rows if x_NI.shape[0] <= FUSED_ROWS else many_rows
    return product(x_NI, codes_OP, scales_OG, format, bias_O)


def few_rows(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None) -> Tensor:
    rows, inputs = x_NI.shape
    out_NO = torch.empty(rows, codes_OP.shape[0])
    bias = None if bias_O is None else bias_O.data_ptr()
    entry("few_rows", format)(
        x_NI.data_ptr(), codes_OP.data_ptr(), scales_OG.data_ptr(), bias, out_NO.data_ptr(), rows, inputs, len(codes_OP)
    )
    return out_NO


def many_rows(x_NI: Tensor, codes_OP: Tensor, scales_OG: Tensor, format: Format, bias_O: Tensor | None) -> Tensor:
    """PyTorch's product with decoded weights; both factors in the order that decoding leaves."""
    rows, inputs = x_NI.shape
    ordered_NI = torch.empty_like(x_NI)
    entry("reorder", format)(x_NI.data_ptr(), ordered_NI.data_ptr(), rows, inputs)
    out_NO = torch.empty(rows, len(codes_OP))
    step = max(1, DECODED_AT_ONCE // inputs)
    weight_OI = torch.empty(min(step, len(codes_OP)), inputs)
    for first in range(0, len(codes_OP), step):
        codes, scales = codes_OP[first : first + step], scales_OG[first : first + step]
        entry("decode", format)(codes.data_ptr(), scales.data_ptr(), weight_OI.data_ptr(), inputs, len(codes))
        torch.mm(ordered_NI, weight_OI[: len(codes)].T, out=out_NO[:, first : first + step])
    return out_NO if bias_O is None else out_NO.add_(bias_O)


@functools.cache
def entry(name: str, format: Format) -> Any:
    function = getattr(library(), f"mx_{name}_{format.name}")
    pointers, sizes = {"few_rows": (5, 3), "reorder": (2, 2), "decode": (3, 2)}[name]
    function.argtypes = [ctypes.c_void_p] * pointers + [ctypes.c_int64] * sizes
    function.restype = None
    return function


@functools.cache
def why_unavailable() -> str:
    """Why there is no compiled product here; empty where there is one."""
    try:
        library()
    except UnavailableError as why:
        return str(why)
    return ""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernels, built where this source, compiler and machine have none yet."""
    if platform.machine() not in ("x86_64", "AMD64") or os.name != "posix":
        raise UnavailableError(f"the kernels are for x86-64 processors, and this machine is {platform.machine()}")
    try:
        loaded = ctypes.CDLL(str(built()))
    except OSError as error:
        raise UnavailableError(f"the kernels do not load: {error}") from error
    if not loaded.mx_supported():
        raise UnavailableError("the kernels need a processor with AVX2, FMA and F16C")
    return loaded


def built() -> Path:
    """
    Raises:
        UnavailableError: no compiler, or it failed.
        OSError: the cache cannot be written.
    """
    name = os.environ.get("CXX", "")
    compiler = shutil.which(name) if name else shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise UnavailableError(f"no C++ compiler {name or '(c++, g++, clang++)'} was found")
    made_of = repr((SOURCE.read_text(), compiler, os.stat(compiler).st_mtime, FLAGS))
    file = cache_folder() / f"mx_{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not file.exists():
        compile_to(file, compiler)
    return file


def compile_to(file: Path, compiler: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # several processes may build at once
        made = Path(folder) / file.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(made)]
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
