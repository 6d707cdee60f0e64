"""Training on hybrid backbones: packed documents are read as if each stood alone, in values and in gradients."""

import pytest
import torch
from tiny import HYBRIDS, VOCAB, tiny_model

from heads.backbone.model import Backbone
from heads.families import create
from train.objective.model import TrainedModel

DOCUMENTS = torch.tensor([[0] * 10 + [1] * 14, [0] * 3 + [1] * 3 + [2] * 18])
ROUNDING = 1e-5  # of recurrences and rotations in float32, where weights are float64; a leaking state changes 3


def blocks(seed=0):
    tokens_BT = torch.randint(3, VOCAB, DOCUMENTS.shape, generator=torch.Generator().manual_seed(seed))
    return tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool)


def hybrid(name, dtype=torch.float32):
    return tiny_model(name, dtype=dtype)


def trained(name, family="medusa", dtype=torch.float32, **config):
    backbone = Backbone(hybrid(name, dtype))
    torch.manual_seed(1)
    return TrainedModel(backbone, create(family, backbone, num_heads=2, **config))


def last_attending(model):
    """The last layer whose cache would hold keys and values alone."""
    kinds = model.backbone.config.layer_types
    return max(i for i, kind in enumerate(kinds) if kind == "full_attention")


@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_documents_are_read_as_if_each_stood_alone(name):
    model = trained(name, dtype=torch.float64)
    tokens_BT, _ = blocks()
    packed = model.hidden_states(tokens_BT, DOCUMENTS)
    for row, ids in zip(range(2), DOCUMENTS, strict=True):
        for document in ids.unique():
            own = (ids == document).nonzero()[:, 0]
            alone, _ = model.backbone.forward(tokens_BT[row : row + 1, own], use_cache=False)
            assert torch.allclose(packed[row, -1, own], alone[0], atol=ROUNDING)
    model.attend_across_documents = True  # the other way is told apart
    assert not torch.allclose(model.hidden_states(tokens_BT, DOCUMENTS), packed, atol=1.0)


@pytest.mark.parametrize("name", HYBRIDS)
def test_no_gradient_reaches_another_document(name):
    backbone = Backbone(hybrid(name))
    model = TrainedModel(backbone, create("grounded", backbone, num_heads=2), trains_backbone=True)
    tokens_BT, _ = blocks()
    tokens_BT[0] = torch.arange(3, 27)  # every token once
    supervised = (DOCUMENTS == 1) & (torch.arange(2)[:, None] == 0)
    model(tokens_BT[:1], supervised[:1], DOCUMENTS[:1])["loss"].backward()
    reached_V = backbone.model.get_input_embeddings().weight.grad.norm(dim=1)
    if backbone.model.get_output_embeddings().weight is not backbone.model.get_input_embeddings().weight:
        assert (reached_V[3:13] == 0).all()
    assert (reached_V[13:24] > 0).all()


FAMILIES = [
    ("grounded", {"prefix_layers": 1}),
    ("gru", {"prefix_layers": 1}),
    ("dynamo", {}),
    ("dynamo", {"start": "copied"}),
    ("dynamo", {"lora_rank": 2, "lora_targets": ["o_proj", "out_proj"]}),
]


@pytest.mark.parametrize(("family", "config"), FAMILIES[:3])
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "falcon_h1"])
def test_layers_of_heads_are_of_the_last_layer_that_attends(name, family, config):
    model = trained(name, family, **config)
    copied = model.backbone.layers[last_attending(model)]
    own = model.token_heads.prefix[0] if family != "dynamo" else model.token_heads.layers[0][0]
    assert type(own) is type(copied)
    assert {n: p.shape for n, p in own.named_parameters()} == {n: p.shape for n, p in copied.named_parameters()}
    tokens_BT, supervised = blocks()
    whole = model(tokens_BT, supervised, DOCUMENTS)
    counts = model.count_labels(tokens_BT, supervised, DOCUMENTS)
    parts = torch.zeros(2)
    for row, ids in zip(range(2), DOCUMENTS, strict=True):
        for document in ids.unique():
            own_T = ids == document
            alone = tokens_BT[row, own_T][None]
            one = torch.ones_like(alone, dtype=torch.bool)
            parts += model(alone, one, torch.zeros_like(alone), counts_K=counts)["loss_sums_K"]
    assert torch.allclose(whole["loss_sums_K"], parts, rtol=1e-5)
    whole["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in own.parameters() if p.ndim == 2)


def test_layers_of_heads_that_keep_a_state_are_refused():
    for family, config in FAMILIES:
        with pytest.raises(
            ValueError,
            match=r"Every layer of FalconH1ForCausalLM keeps a recurrent state, and so would the heads' layers",
        ):
            trained("falcon_h1", family, **config)


def test_a_lora_on_the_last_layer_that_attends():
    model = trained("granitemoehybrid", *FAMILIES[4][:1], lora_rank=2, lora_targets=["o_proj"])
    assert any("o_proj" in name for name, _ in model.token_heads.named_parameters())
    tokens_BT, supervised = blocks()
    model(tokens_BT, supervised, DOCUMENTS)["loss"].backward()


def test_a_first_layer_that_sees_ahead_is_refused():
    with pytest.raises(ValueError, match="it has no mask that could let it see ahead"):
        TrainedModel(Backbone(hybrid("lfm2")), None, lookahead=0.5)
