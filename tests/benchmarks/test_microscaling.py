"""Speculation on packed weights: every method on every kind of weights is measured, and its text is plain's."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from benchmarks.speed.real_costs.microscaling import Row, describe_product, main, packed_copy
from benchmarks.speed.real_costs.shapes import SHAPES, WideShape
from heads.checkpoint.opening import open_backbone
from heads.quantization.linear import MXLinear

SMALL = WideShape(name="0.16B", hidden=384, layers=8, intermediate=512, key_value_heads=12)


def test_every_method_is_measured_and_writes_plain_text_on_its_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "0.16B", SMALL)
    asked = ["--quick", "--prompts", "1", "--new-tokens", "4", "--formats", "mxfp6_e2m3"]
    main([*asked, "--json", str(tmp_path / "found.json"), "--picture", str(tmp_path / "found.png")])
    rows = json.loads((tmp_path / "found.json").read_text())
    kinds, methods = ["bfloat16", "float32", "mxfp6_e2m3"], ["plain", "draft model", "heads"]
    assert [(row["weights"], row["method"]) for row in rows] == [(kind, name) for kind in kinds for name in methods]
    assert all(row["same_text"].startswith("yes") for row in rows)
    assert all(row["to_own_plain"] == 1 for row in rows if row["method"] == "plain")
    sixteen, wide, packed = (rows[i]["mebibytes"] for i in (0, 3, 6))
    assert wide == 2 * sixteen
    assert 6.25 / 16 < packed / sixteen < 0.6  # embeddings keep 16 bits
    assert "whose product is" in capsys.readouterr().out
    assert (tmp_path / "found.png").stat().st_size


def test_a_packed_copy_leaves_the_original_and_its_unembedding():
    model = open_backbone("checkpoints/demo/base").model
    packed = packed_copy(model, "mxfp4_e2m1")
    assert not any(isinstance(module, MXLinear) for module in model.modules())
    assert sum(isinstance(module, MXLinear) for module in packed.modules()) == 8 * 7
    assert packed.lm_head.weight is model.lm_head.weight
    assert isinstance(packed.lm_head, torch.nn.Linear)


@pytest.mark.parametrize(
    ("float32", "expected"), [(0.5, "3.00 × the faster plain, bfloat16"), (3.0, "1.00 × the faster plain, float32")]
)
def test_the_gain_is_that_over_the_faster_plain_one(float32, expected, capsys):
    """Where a processor has no products in bfloat16, a ratio to them alone would flatter."""
    found = {("bfloat16", "plain"): 1.0, ("float32", "plain"): float32, ("mxint8", "plain"): 1.5}
    found |= {(kind, name): 3.0 for kind in ("bfloat16", "mxint8") for name in ("draft model", "heads")}
    rows = [
        Row(
            weights=kind, method=name, mebibytes=1, tokens_per_pass=1, tokens_per_second=1, ratio=ratio,
            interval=(1, 1), to_own_plain=1, same_text="yes",
        )
        for (kind, name), ratio in found.items()
    ]  # fmt: skip
    describe_product(Console(width=300), rows)
    assert expected in capsys.readouterr().out
