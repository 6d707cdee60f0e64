"""What a suite is run on, and what identifies the heads that it measures."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import Opened, default_device, open_heads
from heads.evaluation.runs.rows import Rows
from heads.interface.token_heads import TokenHeads

WITHOUT_EFFECT = ("concurrency", "tries")
"""Options of suites on which no figure depends: how a server is asked. Rows are kept where they alone change."""


@dataclass(kw_only=True)
class SuiteTask:
    """One folder of heads on its backbone, which is loaded when a suite first asks for it.

    Attributes:
        folder: the folder of heads.
        backbone: folder or hub name; None is the one in the heads' own record.
        pack: pack the weights of backbones and heads (heads/products/packed.py).
        rows: finished units of work by name.
        console: for progress bars and remarks, so on stderr.
    """

    folder: Path
    backbone: str | None = None
    dtype: Dtype = "auto"
    pack: bool = False
    rows: Rows = field(default_factory=lambda: Rows(None, {}))
    console: Console = field(default_factory=lambda: Console(stderr=True))

    @cached_property
    def opened(self) -> Opened:
        return open_heads([self.folder], self.backbone, self.dtype, pack=self.pack)

    @property
    def token_heads(self) -> TokenHeads:
        (found,) = self.opened.token_heads.values()
        return found

    @property
    def model(self) -> Any:
        return self.opened.model

    @property
    def tokenizer(self) -> Any:
        return self.opened.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the backbone is loaded; asking does not load it."""
        return torch.device(default_device())


def settings_of(config: Any) -> dict[str, Any]:
    """The fields of a suite's Config that figures depend on."""
    return {name: value for name, value in asdict(config).items() if name not in WITHOUT_EFFECT}


def fingerprint(folder: Path) -> str:
    """Changes with any file of a folder: JSON by its content, tensors by their size and time of writing."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        content = path.read_bytes() if path.suffix == ".json" else f"{stat.st_size} {stat.st_mtime_ns}".encode()
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:16]
