"""The benchmark of microscaling products measures every place, counts the bytes that it reads, and names its target."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks.speed.mx import Product, describe_aim, main, turns
from heads.quantization.formats import FORMATS


def test_every_place_is_measured_and_bytes_are_those_of_the_format(tmp_path, capsys):
    arguments = ["--widths", "64", "--rows", "1", "20", "--rounds", "1", "--rotate", "1"]
    main([*arguments, "--json", str(tmp_path / "mx.json"), "--picture", str(tmp_path / "mx.png")])
    found = json.loads((tmp_path / "mx.json").read_text())
    kinds = ["bfloat16", "float32", *FORMATS]
    assert [(one["rows"], one["kind"]) for one in found] == [(rows, kind) for rows in (1, 20) for kind in kinds]
    for one in found:
        bits = {"bfloat16": 16, "float32": 32}.get(one["kind"]) or FORMATS[one["kind"]].bits_per_weight
        assert one["read"] == 64 * 64 * bits / 8
        beside = next(x for x in found if (x["rows"], x["kind"]) == (one["rows"], "bfloat16"))
        assert one["times_bfloat16"] == pytest.approx(beside["seconds"] / one["seconds"])
    assert "mxfp4_e2m1" in capsys.readouterr().out
    assert (tmp_path / "mx.png").stat().st_size


def test_weights_in_turn_exceed_the_caches():
    assert turns(256 << 20, 8 << 20) == 32
    assert turns(256 << 20, 300 << 20) == 2


@pytest.mark.parametrize(
    ("times", "words"), [(1.3, ["1.28: holds"]), (1.2, ["does not hold"]), (0.9, ["does not hold", "slower"])]
)
def test_the_aim_is_half_of_the_ratio_of_bytes(times, words, capsys):
    read = 4096 * 4096 * 6.25 / 8  # 2.56 times fewer bytes
    one = Product(
        width=4096, rows=1, kind="mxfp6_e2m3", seconds=1, read=read, limit=1, times_bfloat16=times, times_float32=1
    )
    describe_aim(Console(width=200), [one])
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
    assert ("slower" in printed) == (times < 1)
