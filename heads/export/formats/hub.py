"""A model folder in which `transformers serve` and `generate` decode with the heads; heads/export/hub/ writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from heads.export.hub.folder import export_to_hub_folder
from heads.validation import validated

SUMMARY = "transformers 5.23: serve and generate, all families (written; heads.load reads it)"


@validated
@dataclass(kw_only=True)
class Config:
    """Backbone, heads, model card and custom_generate/generate.py in one folder.

    Attributes:
        measured: files of `headway benchmark --json` or `headway evaluate`, with commas between them, whose figures the
            model card shows; none: measured.json beside the heads.
        license: identifier on the hub, such as apache-2.0; none is the one in the backbone's own model card.
    """

    measured: list[str] = field(default_factory=list)
    license: str | None = None


def convert(heads: Path, out: Path, config: Config, *, backbone: str | None, overwrite: bool) -> str:
    """Write the folder from a folder of heads; the sentence says what was checked."""
    export_to_hub_folder(
        heads, out, measured=config.measured, license=config.license, backbone=backbone, overwrite=overwrite
    )
    return f"loaded back and decoded with; transformers serve {out} --trust-remote-code"
