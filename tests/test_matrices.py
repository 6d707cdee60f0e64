"""What is left out of a matrix is marked, and every value of every axis stays."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from matrices import covering


def parts(mark: pytest.MarkDecorator) -> tuple[list[Any], list[Any]]:
    """The rows that always run, and the wide ones."""
    rows = mark.args[1]
    always = [row for row in rows if not hasattr(row, "marks")]
    marked = [row for row in rows if hasattr(row, "marks")]
    assert all([mark.name for mark in row.marks] == ["wide"] for row in marked)
    return always, [row.values for row in marked]


@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("axes", [("abcd", "xy"), ("abcdefghi", "klmnopqrs", "xy"), ("abc", "uv", "xyzw")], ids=str)
def test_every_value_runs_always_and_every_combination_once(axes, repeats):
    names = [f"axis{i}" for i in range(len(axes))]
    always, marked = parts(covering(repeats=repeats, **dict(zip(names, axes, strict=True))))
    assert sorted([*always, *marked]) == sorted(itertools.product(*axes))
    assert len(always) == min(repeats * max(map(len, axes)), len([*always, *marked]))
    for i, axis in enumerate(axes):
        for value in axis:
            assert any(row[i] == value for row in always), value


def test_further_rows_bring_other_pairs():
    always, _ = parts(covering(repeats=3, one="abcdefghi", other="klmnopqrs", third="xy"))
    assert len({row[:2] for row in always}) >= 26


def test_what_interacts_is_never_left_out():
    always, marked = parts(covering(always=lambda one, other: other == "x", one="abc", other="xyz"))
    assert {("a", "x"), ("b", "x"), ("c", "x")} <= set(always)
    assert all(row[1] != "x" for row in marked)


def test_wide_tests_are_left_out_by_default(pytestconfig):
    assert pytestconfig.getini("addopts")[-2:] == ["-m", "not wide"]
