"""The paper's parameter counts, from shapes alone: names of the suite, overhead, and every variant of figure 12."""

from __future__ import annotations

import pytest

from benchmarks.paper.dynamo_counts import SHAPES, VARIANTS, build_backbone, count, count_heads, main, rounded

LAYER_70M = 3_152_384  # 4 · 512² + 8 · 512² of matrices, 9 · 512 + 4 · 512 of biases and norms
UNEMBEDDING_70M = 50304 * 512


@pytest.mark.parametrize("name", SHAPES)
def test_backbones_have_pythias_published_sizes_and_the_suite_its_names(name: str) -> None:
    shape = SHAPES[name]
    backbone = build_backbone(shape)
    assert count(backbone.model) == shape.parameters
    assert {parameter.device.type for parameter in backbone.model.parameters()} == {"meta"}
    assert rounded(shape.parameters + count_heads(backbone, num_heads=2)) == shape.paper


def test_the_overhead_of_the_largest() -> None:
    """5.87 % more parameters (section 6)."""
    backbone = build_backbone(SHAPES["6.9b"])
    extra = count_heads(backbone, num_heads=2)
    assert extra == 402_759_680
    assert f"{extra / count(backbone.model):.2%}" == "5.87%"


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("96M-T2", UNEMBEDDING_70M),
        ("74M-T2 (C)", LAYER_70M),
        ("70M-T2 (LoRA)", 65_536),
        ("99M-T2", LAYER_70M + UNEMBEDDING_70M),
        ("74M-T2 (NP)", LAYER_70M),
        ("74M-T2", LAYER_70M),
        ("77M-T2", 2 * LAYER_70M),
        ("77M-T3", 2 * LAYER_70M),
    ],
)
def test_variants_add_what_the_paper_says(name: str, extra: int) -> None:
    config, millions = VARIANTS[name]
    backbone = build_backbone(SHAPES["70m"])
    assert count_heads(backbone, **config) == extra
    assert round((count(backbone.model) + extra) / 10**6) == millions


def test_every_variant_is_tested() -> None:
    tested = {"96M-T2", "74M-T2 (C)", "70M-T2 (LoRA)", "99M-T2", "74M-T2 (NP)", "74M-T2", "77M-T2", "77M-T3"}
    assert tested == set(VARIANTS)


def test_the_command_prints_ours_beside_the_papers(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    for said in ("402,759,680", "5.87%", "7.3B", "65,536", "32,768", "2.67 %", "3.31%"):
        assert said in printed
