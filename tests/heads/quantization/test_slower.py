"""The warning where packed weights cost time: by what was measured, once a kind of weight."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from heads.quantization import slower
from heads.quantization.codec import Packed, pack
from heads.quantization.formats import find_format
from heads.quantization.multiply import multiply, multiply_plainly, why_plain

FORMAT = find_format("mxfp6_e2m3")


@pytest.fixture
def small(monkeypatch) -> Packed:
    """A weight that counts as a large one, with nothing measured so far."""
    monkeypatch.setattr(slower, "SMALLEST", 1)
    monkeypatch.setattr(slower, "CACHES", 4)
    monkeypatch.setattr(slower, "measured", set())
    return pack(torch.ones(8, 64), FORMAT)


def warned(run, packed: Packed, times: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            slower.warn_once_where_slower(run, torch.ones(1, 64), packed, FORMAT)
    return [str(one.message) for one in caught]


def slow(*given):
    time.sleep(0.005)
    return multiply_plainly(*given)


def test_a_kernel_that_takes_longer_than_bfloat16_is_said_once(small):
    (said,) = warned(slow, small)
    assert said.startswith("with mxfp6_e2m3 weights one row on a layer of 64 × 8 takes ")
    assert said.endswith(
        "as long as with bfloat16 weights on this machine: here packed weights save memory, and no time."
    )


def test_a_kernel_that_is_as_fast_is_not_warned_of(small, monkeypatch):
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: (time.sleep(0.005), linear(*given))[1])
    assert warned(lambda x_NI, codes, scales, format: x_NI, small) == []
    assert len(slower.measured) == 1


def test_layers_within_the_caches_are_not_measured(small, monkeypatch):
    monkeypatch.setattr(slower, "SMALLEST", 8 * 64 + 1)
    assert warned(slow, small) == []
    assert not slower.measured


@pytest.mark.skipif(bool(why_plain("cpu")), reason=why_plain("cpu") or "there is a kernel")
def test_products_of_one_row_are_what_is_measured(small, monkeypatch):
    asked = []
    monkeypatch.setattr(slower, "times_as_long", lambda *given: asked.append(given[1].shape) or 1.0)
    for rows in (2, 1, 1):
        multiply(torch.ones(rows, 64), *small, FORMAT)
    assert asked == [(1, 64)]
