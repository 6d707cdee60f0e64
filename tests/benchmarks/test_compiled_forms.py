"""Forms of passes side by side: edits are seen where a form sees them, and profiled time goes to its kind of kernel."""

from __future__ import annotations

import torch

from benchmarks.speed import frozen_graphs
from benchmarks.speed.compiled_parts import parts_of
from benchmarks.speed.frozen_graphs import FORMS, main
from benchmarks.speed.real_costs.shapes import WideShape


def test_plain_and_packed_passes_follow_edits(monkeypatch, capsys):
    small = WideShape(name="0.16B", hidden=256, layers=9, intermediate=512, key_value_heads=8)
    monkeypatch.setitem(frozen_graphs.SHAPES, "0.16B", small)
    monkeypatch.setattr(frozen_graphs, "FORMS", {name: FORMS[name] for name in ("plain", "packed")})
    main(["--dtypes", "float32", "--rounds", "1"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[-1]) for row in rows if row and row[0] in FORMS] == [
        ("plain", "noticed"),
        ("packed", "noticed"),
    ]


def test_products_and_attention_are_counted_apart():
    x = torch.ones(1, 1, 64, 64)
    products, attention, calls = parts_of(lambda: x @ x, 2)
    assert (products > 0, attention, calls > 0) == (True, 0.0, True)
    products, attention, _ = parts_of(lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x), 2)
    assert attention > 0
