"""Attention by documents against dense masks: states, losses, gradients; where it stands back, and says why."""

import itertools

import pytest
import torch
from tiny import random_tokens, tiny_model

from heads.backbone.model import Backbone
from heads.families import create
from train.objective import document_attention as by_document
from train.objective.document_attention import document_attention, mask_by_documents
from train.objective.model import TrainedModel

LENGTH = 24
ONE, MANY = [[0] * LENGTH] * 2, [[0] * 7 + [1] * 17, [0] * 12 + [1] + [2] * 11]


@pytest.fixture(autouse=True)
def short_documents_are_worth_it(monkeypatch):
    monkeypatch.setattr(by_document, "LEAST_TOKENS", {"cpu": 1})


def build(architecture, dtype=torch.float64, family="medusa", **settings):
    backbone = Backbone(tiny_model(architecture, attn="sdpa", dtype=dtype))
    token_heads = create(family, backbone, num_heads=2, unembedding="own") if family else None
    return TrainedModel(backbone, None if token_heads is None else token_heads.to(dtype), **settings).train()


def make_batch(documents):
    tokens_BT = random_tokens(2, LENGTH)
    return {
        "input_ids": tokens_BT,
        "loss_mask": torch.ones_like(tokens_BT, dtype=torch.bool),
        "document_ids": torch.tensor(documents),
    }


def loss_and_gradients(model, batch):
    loss = model(**batch)["loss"]
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize("documents", [ONE, MANY], ids=["one document", "several"])
@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3", "phi3", "gemma3", "granite"])
def test_it_is_attention_with_a_dense_mask(architecture, documents):
    """A backbone that is trained: states, loss and all gradients, in float64."""
    model, batch = build(architecture, trains_backbone=True), make_batch(documents)
    dense, expected = loss_and_gradients(model, batch)
    with document_attention(model, compiled=False) as chosen:
        assert chosen.startswith("each document by itself")
        assert model.attention(batch["document_ids"])[2] is not None
        fast, found = loss_and_gradients(model, batch)
    torch.testing.assert_close(fast, dense, rtol=1e-12, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_layers_that_are_computed_again_in_backward_attend_as_before():
    model, batch = build("llama", trains_backbone=True), make_batch(MANY)
    _, expected = loss_and_gradients(model, batch)
    model.model.gradient_checkpointing_enable()
    with document_attention(model, compiled=False):
        _, found = loss_and_gradients(model, batch)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_heads_that_run_layers_attend_as_the_backbone_does():
    model, batch = build("llama", family=None), make_batch(MANY)
    heads = create("dynamo", model.backbone, num_heads=2).double()
    model = TrainedModel(model.backbone, heads).train()
    dense, expected = loss_and_gradients(model, batch)
    with document_attention(model, compiled=False):
        fast, found = loss_and_gradients(model, batch)
    torch.testing.assert_close(fast, dense, rtol=1e-12, atol=0)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_in_bfloat16_both_round_alike():
    model, batch = build("llama", torch.bfloat16), make_batch(MANY)
    with torch.no_grad():
        dense = model.hidden_states(batch["input_ids"], batch["document_ids"]).float()
        with document_attention(model, compiled=False) as chosen:
            fast = model.hidden_states(batch["input_ids"], batch["document_ids"]).float()
    assert chosen.startswith("each document by itself")
    assert (fast - dense).norm() < 2**-6 * dense.norm()  # 8 bits of mantissa, three layers


@pytest.mark.parametrize(("given", "reason"), [("eager", "attn_implementation is eager"), ("sdpa", "compiled")])
def test_it_stands_back(given, reason):
    model = TrainedModel(Backbone(tiny_model("llama", attn=given)), None)
    with document_attention(model, compiled=given == "sdpa") as chosen:
        assert chosen.startswith("with dense masks")
        assert reason in chosen
        assert not model.attends_by_document


def test_a_backbone_whose_layers_give_something_else_keeps_dense_masks(monkeypatch):
    """As if documents were not cut: the second one sees the first."""
    plain = by_document.sdpa_attention_forward

    def uncut(module, query, key, value, mask, **settings):
        return plain(module, query, key, value, mask if hasattr(mask, "documents") is False else None, **settings)

    monkeypatch.setattr(by_document, "sdpa_by_documents", uncut)
    model = TrainedModel(Backbone(tiny_model("llama", attn="sdpa")), None)
    with document_attention(model, compiled=False) as chosen:
        assert "would give something else" in chosen
        assert not model.attends_by_document


def test_a_layer_that_reads_its_mask_itself_keeps_dense_masks():
    backbone = Backbone(tiny_model("llama", attn="sdpa"))
    backbone.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "attention_mask": kwargs["attention_mask"].clone()}), with_kwargs=True
    )
    model = TrainedModel(backbone, None)
    with document_attention(model, compiled=False) as chosen:
        assert "read their masks in another way" in chosen


def test_windows_and_short_documents_have_dense_masks(monkeypatch):
    ids_BT = torch.tensor(MANY)
    assert mask_by_documents(ids_BT, 17).documents == [[7, 17], [12, 1, 11]]
    assert mask_by_documents(ids_BT, 16) is None
    monkeypatch.setattr(by_document, "LEAST_TOKENS", {"cpu": 10})
    assert mask_by_documents(ids_BT, None) is None  # 48 tokens in 5 documents
    assert mask_by_documents(ids_BT[:1], None) is not None


def test_outside_nothing_is_changed():
    model, batch = build("llama"), make_batch(MANY)
    with document_attention(model, compiled=False):
        pass
    assert model.attention(batch["document_ids"])[2].shape == (2, 1, LENGTH, LENGTH)
    mask = mask_by_documents(batch["document_ids"], None)
    with pytest.raises(RuntimeError):  # nobody understands the mask
        model.backbone.forward(batch["input_ids"], attention_mask=mask, use_cache=False)


def varlen_by_hand(query, key, value, borders, key_borders, longest, longest_key, *, scale, window_size, enable_gqa):
    """What `torch.nn.attention.varlen.varlen_attn` returns, which runs on a GPU alone: document by document."""
    assert (borders.dtype, window_size) == (torch.int32, (-1, 0))
    assert borders is key_borders
    assert longest == longest_key == int(borders.diff().max())
    assert int(borders[-1]) == len(query)
    found = [
        torch.nn.functional.scaled_dot_product_attention(
            *(tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)),
            is_causal=True, scale=scale, enable_gqa=enable_gqa,
        )[0].transpose(0, 1)
        for start, end in itertools.pairwise(borders.tolist())
    ]  # fmt: skip
    return torch.cat(found)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3"])
def test_one_kernel_gets_the_documents_of_all_blocks_end_to_end(architecture, monkeypatch):
    """With the kernel's mathematics in float64 on a CPU: states, loss and gradients are those of a dense mask."""
    model, batch = build(architecture, trains_backbone=True), make_batch(MANY)
    dense, expected = loss_and_gradients(model, batch)
    calls = []

    def kernel(*tensors, **settings):
        calls.append(tensors[3].tolist())
        return varlen_by_hand(*tensors, **settings)

    monkeypatch.setattr(by_document, "may_use_one_kernel", lambda backbone: True)
    monkeypatch.setattr(by_document, "varlen_attn", kernel)
    with document_attention(model, compiled=False) as chosen:
        assert chosen == "each document by itself, without a mask"
        fast, found = loss_and_gradients(model, batch)
    assert [0, 7, 24, 36, 37, 48] in calls
    torch.testing.assert_close(fast, dense, rtol=1e-12, atol=0)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


def test_a_kernel_that_gives_something_else_leaves_documents_piece_by_piece(monkeypatch):
    model, batch = build("llama"), make_batch(MANY)
    dense, _ = loss_and_gradients(model, batch)
    monkeypatch.setattr(by_document, "may_use_one_kernel", lambda backbone: True)
    monkeypatch.setattr(by_document, "varlen_attn", lambda query, *rest, **settings: torch.zeros_like(query))
    with document_attention(model, compiled=False) as chosen:
        assert chosen.startswith("each document by itself")
        assert not model.one_kernel
        fast, _ = loss_and_gradients(model, batch)
    torch.testing.assert_close(fast, dense, rtol=1e-12, atol=0)


def test_one_kernel_is_tried_on_gpus_alone():
    assert not by_document.may_use_one_kernel(build("llama", torch.bfloat16).backbone)
    assert by_document.least_tokens(torch.device("cuda"), True) == 1
    assert by_document.least_tokens(torch.device("cuda"), False) == 1024


def test_layers_are_compared_in_the_dtype_of_autocast(monkeypatch):
    seen, usual = set(), by_document.sdpa_by_documents

    def spy(module, query, *rest, **settings):
        seen.add(by_document.computed_in(query.device, query.dtype))
        return usual(module, query, *rest, **settings)

    monkeypatch.setattr(by_document, "sdpa_by_documents", spy)
    model = TrainedModel(Backbone(tiny_model("llama", attn="sdpa", dtype=torch.float32)), None)
    with document_attention(model, compiled=False, autocast=torch.bfloat16) as chosen:
        assert chosen.startswith("each document by itself")
    assert seen == {torch.bfloat16}


def test_the_least_length_of_documents_is_said(monkeypatch):
    monkeypatch.setattr(by_document, "LEAST_TOKENS", {"cpu": 32})
    with document_attention(build("llama"), compiled=False) as chosen:
        assert chosen.endswith("without a mask; with one where they have fewer than 32 tokens each")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel runs on a GPU alone")
def test_one_kernel_on_a_gpu_is_attention_with_a_dense_mask():
    model = build("llama", torch.bfloat16)
    model, batch = model.to("cuda"), {name: tensor.to("cuda") for name, tensor in make_batch(MANY).items()}
    with torch.no_grad():
        dense = model.hidden_states(batch["input_ids"], batch["document_ids"]).float()
        with document_attention(model, compiled=False) as chosen:
            fast = model.hidden_states(batch["input_ids"], batch["document_ids"]).float()
    assert chosen == "each document by itself, without a mask"
    assert (fast - dense).norm() < 2**-6 * dense.norm()  # 8 bits of mantissa, three layers
