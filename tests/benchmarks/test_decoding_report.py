"""Targets are judged from rows as they were measured; limits add up."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks.speed.decoding_report import passes_allow, say_targets, what_limits
from benchmarks.speed.parts import Parts
from heads.evaluation.throughput import MethodResult


def a_row(name: str, speed: float, **more: Any) -> MethodResult:
    fields: dict[str, Any] = {"tokens_per_pass": 1.0, "same_text": "yes"} | more
    return MethodResult(
        name=name, tokens=10, tokens_per_second=speed, ratio=speed / 100, ratio_low=1, ratio_high=1,
        repeated_4grams=0.0, **fields,
    )  # fmt: skip


SPENT = {"prefill": 1.0, "draft": 2.0, "verify": 7.0, "accept": 1.0, "commit": 0.5, "other": 0.0}
PLAIN = a_row("plain", 100.0)
MEDUSA = a_row("medusa", 200.0, tokens_per_pass=2.5, milliseconds=SPENT)
GROUNDED = a_row("grounded", 240.0, tokens_per_pass=3.0, milliseconds=SPENT)
REST = {"plain": 0.5, "medusa": 0.4, "grounded": 0.6}
PARTS = [Parts(name=name, backbone=1.0, heads=1.0, rest=rest) for name, rest in REST.items()]


def said(*, counts: bool) -> str:
    console = Console(file=io.StringIO(), width=400)
    say_targets(console, [PLAIN, MEDUSA, GROUNDED], PARTS, counts=counts)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_what_passes_allow_counts_forwards_alone():
    assert passes_allow(GROUNDED, PLAIN) == pytest.approx(3.0)  # 3 tokens in 10 ms where a step takes 10 ms
    assert "3.00 tokens a pass, a pass costs 0.80 plain steps" in what_limits(GROUNDED, PLAIN)
    assert "so 3.75 × with all else free" in what_limits(GROUNDED, PLAIN)


def test_each_target_has_its_line_and_its_verdict():
    text = said(counts=True)
    assert "best lossless (grounded) ≥ 2.33 × plain: 2.40, reached" in text
    assert "limit of medusa" in text
    assert "limit of grounded" not in text
    assert "grounded ≥ 1.07 × medusa: 1.20, reached" in text
    assert "grounded: ratio ≥ 0.9 × what its passes allow: 0.80 (2.40 of 3.00), not reached" in text
    assert "medusa: time outside forwards ≤ plain's: 0.40 against 0.50 ms, reached" in text
    assert "grounded: time outside forwards ≤ plain's: 0.60 against 0.50 ms, not reached" in text
    assert "2.33" not in said(counts=False)
