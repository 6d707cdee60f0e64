"""Heads with a draft vocabulary: what they say, save and measure is what full heads say of the scored tokens."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from safetensors.torch import load_file
from throwaway_families import FAMILIES, make_heads
from tiny import VOCAB, random_tokens, shared_model, tiny_model
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows
from typer.testing import CliRunner

import heads
from heads.backbone.draft_vocabulary import DraftVocabulary
from heads.backbone.model import Backbone
from heads.backbone.projection import Projection
from heads.cli.main import app
from heads.evaluation.accuracy import HeadAccuracy
from heads.evaluation.lossy.dynamic_perplexity import measure_dynamic
from heads.evaluation.perplexity import measure_perplexity
from heads.evaluation.predictions import Block
from heads.families import create_unchosen
from heads.interface.token_heads import HeadsConfig
from heads.ngrams.counting import count_ngrams

FEW = [2, 3, 5, 7, 11, 13, 17, 19, 23]
OWN = {"medusa": {}, "grounded": {}, "dynamo": {"unembedding": "own"}}
SHARED = {"medusa": {"unembedding": "shared"}, "grounded": {"unembedding": "shared"}, "dynamo": {}}
# GPT-J's and CodeGen's unembeddings have a bias, Gemma 2 caps, Granite scales.
ARCHITECTURES = ("llama", "codegen", "gemma2", "granite")


def backbone_of(name: str = "llama", **options: Any) -> Backbone:
    return Backbone(shared_model(name, "eager", **options))


def hidden(backbone: Backbone, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, backbone.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# --- projections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kind", [OWN, SHARED], ids=["own", "shared"])
@pytest.mark.parametrize("family", OWN)
@torch.no_grad()
def test_logits_are_those_of_full_heads_at_the_scored_tokens(family, kind, name):
    full = make_heads(family, backbone_of(name), num_heads=2, **kind[family])
    few = heads.prune_vocabulary(full, FEW[::-1])
    h = hidden(full.backbone)
    for k in (1, 2):
        head = few.projection(k)
        # The same products over fewer columns; float64 rounds them apart by 1e-15 of logits of some units.
        torch.testing.assert_close(head(h), full.projection(k)(h)[:, FEW], rtol=1e-12, atol=1e-12)
        assert head.ids(torch.arange(len(FEW))).tolist() == FEW


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_heeds_it_and_starts_from_the_scored_rows(family):
    backbone = backbone_of()
    new = make_heads(family, backbone, num_heads=2, draft_tokens=FEW)
    assert new.num_scored == len(FEW)
    for k in (1, 2):
        assert len(new.projection(k).weight) == len(FEW)
        assert new.projection(k).vocabulary.tokens_S.tolist() == FEW
    if family in ("medusa", "grounded"):
        token_heads = heads.create(family, backbone, draft_tokens=FEW)
        assert torch.equal(token_heads.projection(3).weight, backbone.projection.weight[FEW])
        assert all(len(FEW) == len(p) for p in token_heads.unembeddings.parameters()), "no row more is stored"


def test_a_family_that_does_not_heed_it_is_refused():
    class Heedless(type(make_heads("own_output", backbone_of()))):  # type: ignore[misc]
        def projection(self, k: int) -> Projection:
            return self.backbone.projection.without_norm()

    token_heads = Heedless(HeadsConfig(num_heads=2, draft_vocabulary=len(FEW)), backbone_of())
    with pytest.raises(ValueError, match=r"know no draft vocabulary; leave it out"):
        token_heads.choose_draft_tokens(FEW)


def test_shared_rows_are_gathered_once_and_follow_the_backbone():
    backbone = Backbone(tiny_model("llama"))
    token_heads = heads.create("medusa", backbone, unembedding="shared", draft_tokens=FEW)
    source = backbone.projection.weight.requires_grad_(False)
    first = token_heads.projection(1).weight
    assert token_heads.projection(2).weight is first
    assert [name for name in token_heads.state_dict() if "embedding" in name] == []
    with torch.inference_mode():
        assert not token_heads.projection(1).weight.is_inference()
    with torch.no_grad():
        source[FEW[0]] += 1
    assert torch.equal(token_heads.projection(1).weight, source[FEW])
    source.requires_grad_(True)
    token_heads.projection(1)(hidden(backbone)).sum().backward()
    assert source.grad is not None
    touched = source.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert touched == FEW


def test_from_ids_and_back():
    few = DraftVocabulary(tokens_S=torch.tensor(FEW), size=VOCAB)
    everything = torch.arange(VOCAB)
    entries, scored = few.find(everything)
    assert everything[scored].tolist() == FEW
    assert torch.equal(few.ids(entries[scored]), everything[scored])
    values = torch.randn(2, 3, len(FEW))
    spread = few.spread(values, -1.0)
    assert torch.equal(spread[..., FEW], values)
    assert (spread[..., ~scored] == -1).all()


# --- saving, copies, cutting -----------------------------------------------------------------------------------------


@pytest.fixture
def wide():
    """More tokens than bfloat16 can count."""
    return tiny_model("llama", dtype=torch.float32, vocab_size=600)


@pytest.mark.parametrize("kind", [OWN, SHARED], ids=["own", "shared"])
@pytest.mark.parametrize("family", OWN)
def test_ids_survive_saving_copies_and_dtypes(family, kind, wide, tmp_path):
    ids = [3, 257, 311, 599]
    token_heads = heads.create(family, wide, num_heads=2, draft_tokens=ids, **kind[family])
    heads.save(token_heads, tmp_path, dtype=torch.bfloat16)
    assert load_file(tmp_path / "heads.safetensors")["draft_tokens_S"].tolist() == ids
    loaded = heads.load(tmp_path, wide)
    assert loaded.config == token_heads.config
    assert json.loads((tmp_path / "heads.json").read_text())["num_parameters"] == sum(
        p.numel() for p in token_heads.parameters()
    )
    for same in (loaded, loaded.in_dtype(torch.float16), copy.deepcopy(loaded, {id(loaded.backbone): loaded.backbone})):
        assert same.draft_tokens_S.dtype == torch.long
        assert same.projection(2).ids(torch.arange(4)).tolist() == ids
        assert len(same.projection(2).weight) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_twice_is_cutting_once(family):
    full = make_heads(family, backbone_of(), num_heads=2)
    once = heads.prune_vocabulary(full, FEW[2:6])
    twice = heads.prune_vocabulary(heads.prune_vocabulary(full, FEW), FEW[2:6])
    assert once.state_dict().keys() == twice.state_dict().keys()
    for name, tensor in once.state_dict().items():
        assert torch.equal(twice.state_dict()[name], tensor), name
    assert full.num_scored == VOCAB, "the given heads stay as they are"
    with pytest.raises(ValueError, match="do not score token 4"):
        heads.prune_vocabulary(once, [4])


def test_info_says_how_many_tokens_are_scored(wide, tmp_path):
    token_heads = heads.create("medusa", wide, num_heads=1, draft_tokens=range(512))
    heads.save(token_heads, tmp_path, recipe={"draft_vocabulary": {"tokens": 512, "coverage": 0.9712}})
    said = CliRunner().invoke(app, ["info", str(tmp_path)]).output
    assert "scores 512 of 600 tokens, 97.1% of the training set's" in " ".join(said.split())
    assert "int64" not in said


def test_the_command_cuts_heads_to_what_was_counted(tmp_path):
    tiny_model("llama", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(tmp_path / "base")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "base")
    model = heads.load_backbone(heads.BackboneConfig(name_or_path=str(tmp_path / "base")))
    full = heads.create("medusa", model, num_heads=1)
    heads.save(full, tmp_path / "full", recipe={"step": 3}, dtype=torch.bfloat16)
    texts = [tokenizer("abcabcabcd", add_special_tokens=False).input_ids]
    count_ngrams(texts, folder=tmp_path / "table", order=2, vocab_size=len(tokenizer), tokenizer=tokenizer)
    options = ["--ngrams", str(tmp_path / "table"), "--tokens", "3"]
    done = CliRunner().invoke(
        app, ["prune-vocabulary", str(tmp_path / "full"), *options, "--out", str(tmp_path / "few")]
    )
    assert done.exit_code == 0, done.output
    few = heads.load(tmp_path / "few", model)
    assert few.draft_tokens_S.tolist() == sorted(texts[0][:3])
    assert torch.equal(few.projection(1).weight, full.projection(1).weight[few.draft_tokens_S].bfloat16().float())
    recipe = json.loads((tmp_path / "few/heads.json").read_text())["recipe"]
    assert recipe == {
        "step": 3,
        "draft_vocabulary": {"tokens": 3, "coverage": pytest.approx(0.9), "counted_tokens": 10},
    }
    same = CliRunner().invoke(
        app, ["prune-vocabulary", str(tmp_path / "full"), *options, "--out", str(tmp_path / "full")]
    )
    assert "give another one" in same.output
    again = CliRunner().invoke(
        app, ["prune-vocabulary", str(tmp_path / "full"), *options, "--out", str(tmp_path / "few")]
    )
    assert "holds heads, which would be lost" in " ".join(again.output.split())


# --- measuring -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_token_that_is_not_scored_counts_as_wrong():
    full = make_heads("grounded", backbone_of(), num_heads=1)
    few = heads.prune_vocabulary(full, FEW)
    h, labels, choices = hidden(full.backbone, 200), random_tokens(200, seed=1), random_tokens(200, seed=2)
    meter = HeadAccuracy()
    meter.update(few.projection(1), h, labels, choices)
    masked = torch.full((200, VOCAB), -torch.inf)
    masked[:, FEW] = full.projection(1)(h)[:, FEW].float()
    ranked, inside = masked.argsort(dim=1, descending=True), torch.isin(labels, torch.tensor(FEW))
    assert 0 < int(inside.sum()) < 200
    assert meter.top1 == float((ranked[:, 0] == labels).float().mean().double().round(decimals=6))
    assert meter.top5_hits == int((ranked[:, :5] == labels[:, None])[inside].sum())
    assert meter.agreements_by_rank[:9] == [int((ranked[:, r] == choices).sum()) for r in range(9)]
    assert meter.agreements_by_rank[9] == 0, "nine tokens have nine ranks"
    assert meter.coverage == float(inside.double().mean())
    assert meter.loss == pytest.approx(float(F.cross_entropy(masked[inside], labels[inside])), rel=1e-5)  # float32
    assert HeadAccuracy.from_sums(meter.as_sums()) == meter


def test_perplexity_is_refused():
    few = make_heads("medusa", backbone_of(), num_heads=1, draft_tokens=FEW)
    blocks = [Block(random_tokens(9), 0)]
    with pytest.raises(ValueError, match=r"score 9 of 29 tokens .* perplexity is infinite; measure accuracy"):
        measure_perplexity(few, blocks)
    with pytest.raises(ValueError, match="perplexity is infinite"):
        measure_dynamic(few, blocks, [0.5])


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"draft_vocabulary": 4},
            r"without draft_tokens; .* heads\.most_frequent_tokens\(counts, 4\)",
        ),
        ({"draft_vocabulary": 0}, "allowed are integers of at least 1, or null"),
        ({"draft_vocabulary": 30}, "draft_vocabulary=30 was given; allowed are 1 to 29, the backbone's tokens"),
        ({"draft_vocabulary": 3, "draft_tokens": [1, 2]}, "2 draft_tokens were given and draft_vocabulary=3"),
        ({"draft_tokens": [1, 1]}, "some token twice"),
        ({"draft_tokens": [1, 29]}, "from 1 to 29 were given; the backbone's ids are 0 to 28"),
        ({"draft_tokens": [-1, 2]}, "from -1 to 2 were given"),
        ({"draft_tokens": torch.tensor([0.5])}, "allowed is a list of token ids"),
        ({"draft_tokens": torch.tensor([[1, 2]])}, "allowed is a list of token ids"),
        ({"draft_vocabulary": True}, "draft_vocabulary=True was given; allowed are integers of at least 1, or null"),
    ],
)
def test_what_cannot_be_chosen_is_said(config, sentence):
    with pytest.raises(ValueError, match=sentence):
        heads.create("medusa", backbone_of(), **config)


def test_heads_that_score_everything_have_nothing_to_choose():
    token_heads = heads.create("medusa", backbone_of())
    assert token_heads.draft_vocabulary is None
    assert "draft_tokens_S" not in token_heads.state_dict()
    with pytest.raises(ValueError, match="score every token"):
        token_heads.choose_draft_tokens(FEW)


def test_heads_whose_tokens_were_not_chosen_refuse_every_use():
    token_heads = create_unchosen("medusa", backbone_of(), draft_vocabulary=3)
    with pytest.raises(ValueError, match="heads are not chosen; call choose_draft_tokens"):
        token_heads.projection(1)
    token_heads.load_state_dict(heads.create("medusa", backbone_of(), draft_tokens=[4, 5, 6]).state_dict())
    assert token_heads.projection(1).ids(torch.arange(3)).tolist() == [4, 5, 6]


@pytest.mark.parametrize("count", [0, 5])
def test_the_most_frequent_are_among_those_counted(count):
    with pytest.raises(ValueError, match="allowed are 1 to 4"):
        heads.most_frequent_tokens([3, 1, 2, 0], count)
