"""Trainings of `benchmarks.gpu.learn`: their steps are foreseen from a few, which leave the run's folder unused."""

from __future__ import annotations

import json

from repository import ROOT

from benchmarks.gpu.learn import TINY, make_backbone_folder, train
from benchmarks.shared import wide_console


def test_a_backbone_and_heads_are_trained_for_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)  # tests run side by side
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "heads").rglob("*.py"))[:40]]
    for name, part in (("train", texts[:36]), ("unseen", texts[36:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    make_backbone_folder(tmp_path, TINY)
    backbone = train(tmp_path, "backbone", None, TINY, 4.0, wide_console())
    assert (backbone / "config.json").is_file()
    heads = train(tmp_path, "grounded", backbone, TINY, 4.0, wide_console())
    assert (heads / "heads.json").is_file()
    assert (heads.parent / "best").is_dir(), "what a probe in the same folder would leave too"
    said = capsys.readouterr().out
    for name in ("backbone", "grounded"):
        assert f"{name}: " in said
        assert " ms a step of 256 tokens" in said
