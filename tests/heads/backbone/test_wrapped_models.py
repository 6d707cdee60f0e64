"""What is given as a model: wrappers around one are taken, quantised weights too; all else ends in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from throwaway_families import make_heads
from tiny import PAD, random_tokens, tiny_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaForQuestionAnswering, LlamaForSequenceClassification, LlamaModel

import heads
from heads.backbone.model import Backbone

PROMPT = random_tokens(1, 6, seed=1)
ASKED: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": PAD}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Heads of the tiny model on disk."""
    path: Path = tmp_path_factory.mktemp("heads")
    heads.save(make_heads("grounded", Backbone(tiny_model("llama", attn="sdpa")), num_heads=2), path)
    return path


def text_of(model: Any, decoding: Any = None) -> Tensor:
    text: Tensor = model.generate(input_ids=PROMPT, custom_generate=decoding, **ASKED)
    return text


# --- wrappers --------------------------------------------------------------------------------------------------------


def test_a_peft_model_is_taken_as_it_is(folder):
    peft = pytest.importorskip("peft")
    plain = text_of(model := tiny_model("llama", attn="sdpa"))
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, lora_alpha=32, target_modules=["v_proj"], init_lora_weights=False)
    ).eval()
    decoding = heads.TreeDecoding(heads.load(folder, adapted), 8)
    text = text_of(adapted)
    assert not torch.equal(text, plain)
    assert torch.equal(text_of(adapted, decoding), text)
    assert torch.equal(text_of(adapted.get_base_model(), decoding), text)
    assert torch.equal(heads.generate(adapted, decoding, input_ids=PROMPT, **ASKED), text)
    with adapted.disable_adapter():
        assert torch.equal(text_of(adapted, decoding), plain)


def test_a_mixed_peft_model_is_taken_as_it_is(folder):
    peft = pytest.importorskip("peft")
    plain = text_of(model := tiny_model("llama", attn="sdpa"))
    options = {"target_modules": ["v_proj"], "init_lora_weights": False}
    mixed = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=32, **options), mixed=True)
    mixed.add_adapter("other", peft.LoHaConfig(r=2, alpha=32, target_modules=["q_proj"], init_weights=False))
    mixed.set_adapter(["default", "other"])
    mixed.eval()
    decoding = heads.TreeDecoding(heads.load(folder, mixed), 8)
    text = text_of(mixed)
    assert not torch.equal(text, plain)
    assert torch.equal(text_of(mixed, decoding), text)
    with mixed.disable_adapter():
        assert torch.equal(text_of(mixed, decoding), plain)


def test_a_peft_model_that_adds_tokens_is_refused(folder):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="PeftModel with PROMPT_TUNING was given, which puts vectors of its own"):
        heads.load(folder, peft.get_peft_model(tiny_model("llama"), config))


def test_a_compiled_model_is_taken_as_it_is(folder):
    plain = text_of(model := tiny_model("llama", attn="sdpa"))
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(text_of(compiled, heads.TreeDecoding(heads.load(folder, compiled), 8)), plain)


# --- quantised weights -----------------------------------------------------------------------------------------------


class Packed(Tensor):
    """A weight as torchao's `quantize_` leaves it: whole numbers behind a float dtype, for products and no more."""

    codes_VD: Tensor

    @staticmethod
    def __new__(cls, codes_VD: Tensor, dtype: torch.dtype) -> Packed:
        made: Packed = Tensor._make_wrapper_subclass(cls, codes_VD.shape, dtype=dtype)
        made.codes_VD = codes_VD
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes_VD"], self.dtype

    def dequantize(self) -> Tensor:
        return self.codes_VD.to(self.dtype) / 8

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Packed(args[0].codes_VD, args[0].dtype)
        raise NotImplementedError(f"Packed has no {function}")


def pack(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            module.weight = nn.Parameter(Packed((weight * 8).round().to(torch.int8), weight.dtype), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("medusa", {}),
        ("grounded", {"draft_tokens": range(2, 20)}),
        ("gru", {"unembedding": "shared"}),
        ("medusa", {"unembedding": "shared", "draft_tokens": range(2, 20)}),
    ],
    ids=["own", "own, some", "shared", "shared, some"],
)
def test_weights_quantised_in_place_are_taken(family, options, tmp_path):
    """Before heads are loaded, and behind them."""
    options = {name: list(value) if isinstance(value, range) else value for name, value in options.items()}
    model = tiny_model("llama", attn="sdpa")
    before = make_heads(family, Backbone(model), num_heads=2, **options)
    heads.save(before, tmp_path)
    plain = text_of(pack(model))
    for token_heads in (before, heads.load(tmp_path, model), heads.create(family, model, num_heads=2, **options)):
        assert torch.equal(text_of(model, heads.TreeDecoding(token_heads, 8)), plain)
        assert not any(isinstance(parameter, Packed) for parameter in token_heads.parameters())


def test_a_model_with_narrower_embeddings_than_states_is_refused():
    with pytest.raises(ValueError, match=r"output layer of OPTForCausalLM reads 16 numbers a token, .* states have 32"):
        heads.create("medusa", tiny_model("opt", word_embed_proj_dim=16), num_heads=1)


def test_heads_of_layers_are_refused_on_quantised_ones():
    with pytest.raises(ValueError, match="The last layer of LlamaForCausalLM is quantised"):
        heads.create("dynamo", pack(tiny_model("llama")))


# --- no model, or none yet -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["checkpoints/demo/base", Path("base"), nn.Linear(2, 2)], ids=str)
def test_what_is_no_model_is_refused(given, folder):
    said = "a Linear" if isinstance(given, nn.Module) else str(given)
    for make in (lambda: heads.load(folder, given), lambda: heads.create("medusa", given)):
        with pytest.raises(ValueError, match=f"{said}.* was given in place of a model; give a causal LM"):
            make()


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification, LlamaForQuestionAnswering])
def test_a_model_without_an_output_layer_over_tokens_is_refused(kind, folder):
    model = kind(tiny_model("llama").config)
    said = f"{kind.__name__} has no output layer that scores tokens; give the causal LM with it"
    for make in (lambda: heads.load(folder, model), lambda: heads.create("medusa", model)):
        with pytest.raises(ValueError, match=said):
            make()
    with pytest.raises(ValueError, match=f"This model cannot draft: {said}"):
        heads.DraftModelDecoding(model)


def small_heads() -> Any:
    return make_heads("medusa", Backbone(tiny_model("llama")))


WRONG_KINDS = {
    "a name for a config": (lambda: heads.load_backbone("checkpoints/demo/base"), "'checkpoints/demo/base' was given"),
    "a name for a tokenizer's": (lambda: heads.load_tokenizer("checkpoints/demo/base"), "BackboneConfig.name_or_path="),
    "a model to save": (lambda: heads.save(tiny_model("llama"), "nowhere"), "given in place of token heads"),
    "a list to prune": (lambda: heads.prune_vocabulary([1], [1]), "given in place of token heads"),
    "no tokens": (
        lambda: heads.create("medusa", tiny_model("llama"), draft_tokens="12"),
        "draft_tokens='12' was given",
    ),
    "no counts": (lambda: heads.most_frequent_tokens([None], 2), "allowed are tensors and lists of numbers"),
    "one count": (lambda: heads.most_frequent_tokens(5, 2), "allowed is one number for each token"),
    "half a count": (lambda: heads.most_frequent_tokens([5, 3], 1.5), "1.5 tokens were asked for"),
    "no decoding": (lambda: heads.generate(tiny_model("llama"), 3, input_ids=PROMPT), "decoding=3 was given"),
    "a list for a tree": (lambda: heads.TreeDrafter(small_heads(), [[0]]), "give a heads.Tree, such as"),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_another_kind_of_value_ends_in_a_sentence(name):
    act, said = WRONG_KINDS[name]
    with pytest.raises(ValueError, match=said):
        act()


def test_heads_are_no_decoder(folder):
    model = tiny_model("llama")
    with pytest.raises(
        ValueError, match=r"custom_generate was given grounded heads .*heads\.TreeDecoding\(token_heads\)"
    ):
        text_of(model, heads.load(folder, model))


def test_a_model_on_the_meta_device_is_wrapped_and_decodes_nothing(folder):
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny_model("llama").config).eval()
    decoding = heads.TreeDecoding(heads.create("medusa", model, num_heads=2), 8)
    real = tiny_model("llama")
    for fails in (
        lambda: text_of(model, decoding),
        lambda: heads.load(folder, model),
        lambda: text_of(real, heads.DraftModelDecoding(model)),
    ):
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM is on the meta device, where .*; load its weights first"
        ):
            fails()


def test_inputs_that_are_no_tokens_of_one_table_are_refused():
    class SumOfTables(torch.nn.Module):
        pass

    model = tiny_model("llama")
    model.set_input_embeddings(SumOfTables())
    with pytest.raises(ValueError, match=r"embeds its inputs by a SumOfTables, which is not one table of tokens; give"):
        Backbone(model)
