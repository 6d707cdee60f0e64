"""The heat maps show what decoding would decide from, and their labels can be read for any token."""

from __future__ import annotations

import io
import itertools
import warnings
from pathlib import Path

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from throwaway_families import make_heads
from tiny import random_tokens, tiny_model

from heads.backbone.model import Backbone
from heads.decoding.dynamo.candidates import take_candidates
from heads.evaluation.lossy import joint_picture
from heads.evaluation.lossy.joint_picture import (
    draw_joint_maps,
    draw_maps,
    joint_maps,
    predict_two,
    show_text,
    show_token,
)
from heads.interface.token_heads import TokenHeads
from heads.ngrams.counting import count_ngrams
from heads.ngrams.table import NgramTable

PROMPT = "Please explain"


@pytest.fixture(scope="module")
def token_heads() -> TokenHeads:
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    return make_heads("dynamo", Backbone(model), num_heads=2)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> NgramTable:
    texts = [random_tokens(5000, seed=seed, vocab=NUM_TOKENS).tolist() for seed in range(4)]
    folder = tmp_path_factory.mktemp("ngrams") / "table"
    return count_ngrams(texts, folder=folder, order=2, vocab_size=NUM_TOKENS)


def test_candidates_are_the_backbones_and_head_1s_likeliest(token_heads: TokenHeads) -> None:
    tokens_1T = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    first, second = predict_two(token_heads, tokens_1T)
    with torch.no_grad():
        probs_1V = token_heads.backbone.model(tokens_1T).logits[:, -1].softmax(dim=-1)
    assert first.tokens_Bk.tolist() == probs_1V.topk(10).indices.tolist()
    assert second.tokens_Bk.shape == (1, 10)
    assert second.tokens_Bk.tolist() != first.tokens_Bk.tolist()


def test_maps_are_the_masked_and_thresholded_joint(table: NgramTable) -> None:
    generator = torch.Generator().manual_seed(0)
    places = [take_candidates(torch.rand(1, NUM_TOKENS, generator=generator) ** 4, 10) for _ in range(2)]
    maps = joint_maps(places, table)
    product = places[0].probs_Bk[0, :, None] * places[1].probs_Bk[0]
    ratio = table.cooccurrence([place.tokens_Bk[0] for place in places])
    assert torch.allclose(maps["(a) vanilla"][0], product / product.sum())
    for name, power in (("(b) CO-0.5", 0.5), ("(c) CO", 1.0)):
        masked = product * ratio**power
        assert torch.allclose(maps[name][0], masked / masked.sum())
    for name in ("(e) AT", "(f) AT + G-3"):
        kept = maps[name][0] > 0
        assert 0 < kept.sum() < kept.numel()
        assert torch.equal(maps[name][0][kept], maps["(a) vanilla"][0][kept])
        assert maps["(a) vanilla"][0][kept].min() > maps["(a) vanilla"][0][~kept].max()


def test_the_picture_has_six_labelled_maps_with_penalized_repetitions(
    token_heads: TokenHeads, table: NgramTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = {}
    monkeypatch.setattr(joint_picture, "draw_maps", lambda maps, labels, *_: drawn.update(maps=maps, labels=labels))
    draw_joint_maps(token_heads, byte_tokenizer(), PROMPT, table, tmp_path / "joint.png")
    tokens_1T = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    places = predict_two(token_heads, tokens_1T)
    plain = joint_maps(places, table)["(a) vanilla"][0]
    seen = set(tokens_1T[0].tolist())
    for i, first in enumerate(places[0].tokens_Bk[0].tolist()):
        for j, second in enumerate(places[1].tokens_Bk[0].tolist()):
            times = (first in seen) + (second in seen or second == first)
            assert float(drawn["maps"]["(a) vanilla"][i, j]) == pytest.approx(float(plain[i, j]) / 100**times)
    assert [len(labels) for labels in drawn["labels"]] == [10, 10]
    assert len(drawn["maps"]) == 6


def test_any_token_can_be_a_label(tmp_path: Path) -> None:
    """Dollars are no formulas, and every sign has a glyph."""
    labels = [["$x_", "$", "␣", "↵␣×8", "→", "□", "^{", "\\alpha", "…", "_"]] * 2
    maps = dict.fromkeys("abcdef", torch.rand(10, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_maps(maps, labels, "behind '$x$'", tmp_path / "maps.png")
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


def test_labels_of_tokens() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer("a é")["input_ids"]
    assert [show_token(tokenizer, token) for token in tokens[:2]] == ["a", "␣"]
    assert all(show_token(tokenizer, token).isprintable() for token in tokens)
    assert show_text("\n" * 2 + " " * 8 + "if", 12) == "↵↵␣×8if"
    assert show_text("\x00", 12) == "□"


def test_what_cannot_be_drawn_is_refused(token_heads: TokenHeads, table: NgramTable) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        draw_joint_maps(token_heads, byte_tokenizer(), "", table, "never.png")
    grounded = make_heads("grounded", token_heads.backbone, num_heads=2)
    with pytest.raises(ValueError, match="grounded"):
        draw_joint_maps(grounded, byte_tokenizer(), PROMPT, table, "never.png")


def test_labels_do_not_overlap() -> None:
    """Tick labels of neighbours stand apart in the drawn figure."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 3)[0][0]
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    joint_picture.draw_map(axes, torch.rand(10, 10), [["supercalifr…"] * 10] * 2, norm)
    figure.savefig(io.BytesIO(), dpi=150)
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        boxes = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
