"""What the entry of decoding raises in one sentence, and what it takes without effect on the text."""

from __future__ import annotations

import copy
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from throwaway_families import fitted_heads, make_heads
from tiny import PAD, left_padded, random_tokens, tiny_model
from transformers import (
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicCache
from tree_runs import NO_EOS, PROMPT, both, decoding_of, five_tokens

import heads
from heads.backbone.model import Backbone
from heads.decoding.request.entry import check_generator_device
from heads.decoding.request.request import Row
from heads.decoding.request.unsupported import check_inputs


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"guidance_scale": 1.5}, "guidance"),
        ({"prefix_allowed_tokens_fn": lambda batch, tokens: [3, 4]}, "prefix_allowed_tokens_fn"),
        ({"encoder_repetition_penalty": 1.2}, "EncoderRepetitionPenalty"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"position_ids": torch.arange(5)[None] * 3}, r"position_ids of shape \(1, 5\)"),
        ({"position_ids": torch.arange(1, 6)}, "leave position_ids out"),
        ({"position_ids": torch.arange(4)[None]}, r"position_ids of shape \(1, 4\)"),
        ({"labels": PROMPT}, "generate was given labels"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "padding_side='left'"),
        ({"attention_mask": torch.tensor([[0, 0, 0, 0, 0]])}, "an empty prompt"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_equal_is_refused(options, said):
    model, decoding = decoding_of()
    with pytest.raises(ValueError, match=said):
        model.generate(PROMPT, custom_generate=decoding, max_new_tokens=4, **{**NO_EOS, **options})


@pytest.mark.parametrize("name", ["llama", "codegen"])
def test_inputs_that_change_nothing_are_taken(name):
    """Positions as they are anyway, whatever stands at the padding, and no cache of generate's own."""
    model, decoding = decoding_of(name=name)
    tokens, mask = left_padded([random_tokens(n, seed=90 + n).tolist() for n in (3, 6)])
    counted = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 7)
    for options in ({"position_ids": counted}, {"use_cache": False}, {"logits_to_keep": 1}):
        plain, ours = both(model, decoding, tokens, attention_mask=mask, **options, **NO_EOS)
        assert torch.equal(ours.sequences, plain.sequences), options
    plain, ours = both(model, decoding, position_ids=torch.arange(5)[None], **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)


def test_token_types_are_refused_where_they_are_embedded():
    """CodeGen adds the embedding of token 0 for type 0: another text than without types."""
    model, decoding = decoding_of(name="codegen")
    with pytest.raises(ValueError, match="generate was given token_type_ids"):
        model.generate(
            PROMPT, custom_generate=decoding, token_type_ids=torch.zeros_like(PROMPT), max_new_tokens=4, **NO_EOS
        )


def test_token_types_of_a_text_are_taken_where_they_mean_images():
    model = fitted_heads("grounded", "llama").backbone.model
    check_inputs(model, {"token_type_ids": torch.zeros_like(PROMPT)})
    with pytest.raises(ValueError, match="token_type_ids"):
        check_inputs(model, {"token_type_ids": torch.ones_like(PROMPT)})


def test_a_cache_that_holds_tokens_is_refused():
    model, decoding = decoding_of()
    with torch.no_grad():
        cache = model(PROMPT[:, :3], past_key_values=DynamicCache(config=model.config), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values already holds tokens"):
        model.generate(PROMPT, custom_generate=decoding, past_key_values=cache, max_new_tokens=4, **NO_EOS)


def test_embeddings_in_place_of_tokens_are_refused():
    model, decoding = decoding_of()
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(
            inputs_embeds=model.get_input_embeddings()(PROMPT), custom_generate=decoding, max_new_tokens=4, **NO_EOS
        )


def test_scores_of_a_batch_are_refused():
    model, decoding = decoding_of()
    with pytest.raises(ValueError, match="one row at a time"):
        model.generate(
            random_tokens(2, 4),
            custom_generate=decoding,
            max_new_tokens=4,
            output_scores=True,
            return_dict_in_generate=True,
            **NO_EOS,
        )


def test_criteria_for_several_rows_without_eos_are_refused():
    """There generate continues rows that have ended, until all have."""
    model, decoding = decoding_of()
    criteria = StoppingCriteriaList([MaxTimeCriteria(60.0)])
    with pytest.raises(ValueError, match="MaxTimeCriteria was given for 2 rows without an eos token"):
        model.generate(
            random_tokens(2, 4), custom_generate=decoding, max_new_tokens=4, stopping_criteria=criteria, **NO_EOS
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_new_heads_decode_in_the_backbones_dtype(dtype):
    model = tiny_model("llama", dtype=dtype)
    decoding = heads.TreeDecoding(heads.create("grounded", model, num_heads=2))
    assert model.generate(PROMPT, custom_generate=decoding, max_new_tokens=4, **NO_EOS).shape == (
        1,
        PROMPT.shape[1] + 4,
    )


def test_another_model_is_refused():
    _, decoding = decoding_of()
    with pytest.raises(ValueError, match="another model than the heads' backbone"):
        tiny_model("llama").generate(PROMPT, custom_generate=decoding, max_new_tokens=4, **NO_EOS)


def test_heads_in_another_dtype_decode_under_autocast_and_are_refused_without():
    model = tiny_model("llama", dtype=torch.bfloat16)
    token_heads = heads.create("grounded", model, num_heads=2).float()
    asked = {"custom_generate": heads.TreeDecoding(token_heads), "max_new_tokens": 4, **NO_EOS}
    with pytest.raises(ValueError, match=r"heads are in torch\.float32, but the backbone is in torch\.bfloat16"):
        model.generate(PROMPT, **asked)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(PROMPT, **asked).shape == (1, PROMPT.shape[1] + 4)


def test_a_generator_on_another_device_is_refused():
    model, decoding = decoding_of()
    decoding.generator = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(
        ValueError, match=r"A generator on cuda was given, but this call samples on cpu; give a torch\.G"
    ):
        model.generate(PROMPT, custom_generate=decoding, do_sample=True, max_new_tokens=4, **NO_EOS)
    model.generate(PROMPT, custom_generate=decoding, do_sample=False, max_new_tokens=4, **NO_EOS)
    with pytest.raises(ValueError, match="samples on cpu and cuda; leave it out and call"):
        check_generator_device(torch.Generator(), torch.device("cpu"), torch.device("cuda"))


@pytest.mark.parametrize("given", ["checkpoints/demo/grounded", "model"])
def test_what_is_no_heads_is_refused(given):
    given, said = (tiny_model("llama"), "a LlamaForCausalLM") if given == "model" else (given, repr(given))
    with pytest.raises(ValueError, match=f"{said} was given in place of token heads; give what heads.load"):
        heads.TreeDecoding(given)


def test_half_a_node_is_refused():
    with pytest.raises(ValueError, match=r"tree=0\.5 was given"):
        heads.TreeDecoding(fitted_heads("grounded", "llama"), 0.5)


def test_a_length_beyond_memory_is_no_matter_where_the_text_ends():
    """Plain generation makes no room for a text that may come either."""
    model, decoding = decoding_of()
    for asked in ({"max_length": sys.maxsize}, {"max_new_tokens": 10**11}):
        options = {"max_new_tokens": None, "eos_token_id": list(range(3, 20)), "repetition_penalty": 1.1, **asked}
        plain, ours = both(model, decoding, pad_token_id=PAD, **options)
        assert torch.equal(ours.sequences, plain.sequences)


def test_a_rows_prefix_grows_with_its_text():
    request = SimpleNamespace(max_length=10**12, processors_of=lambda _: [], criteria_of=lambda _: [])
    row = Row(request=request, tokens=[1, 2], device=torch.device("cpu"))  # type: ignore[arg-type]
    rooms = set()
    for token in range(100):
        row.tokens.append(token)
        assert row.prefix().tolist() == [row.tokens]
        rooms.add(row.prefix().untyped_storage().nbytes() // 8)
    assert sorted(rooms) == [6, 14, 30, 62, 126], "twice what is asked for, each time"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda out: pickle.loads(pickle.dumps(out))])
def test_outputs_are_copied_and_pickled_with_their_stats(copied):
    model, decoding = decoding_of()
    _, ours = both(model, decoding, output_scores=True, **NO_EOS)
    again = copied(ours)
    assert type(again) is type(ours)
    assert again.stats == ours.stats
    assert list(again) == list(ours)
    assert torch.equal(again.sequences, ours.sequences)
    assert len(again.scores) == len(ours.scores) == 24
    assert again.logits is None


def test_a_tree_deeper_than_there_are_heads_is_refused():
    token_heads = fitted_heads("grounded", "llama")
    with pytest.raises(ValueError, match="4 deep but there are 3 heads"):
        heads.TreeDecoding(token_heads, [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]])


def test_a_rank_beyond_the_vocabulary_is_refused_and_default_trees_stay_below_it():
    token_heads = make_heads("medusa", Backbone(five_tokens()), num_heads=2)
    with pytest.raises(ValueError, match="rank 5 but the vocabulary has 5 tokens"):
        heads.TreeDecoding(token_heads, [[0], [5]])
    for budget in (None, 31, 500):
        decoding = heads.TreeDecoding(token_heads, budget)
        plain, ours = both(five_tokens(), decoding, torch.tensor([[1, 2]]), **NO_EOS)
        assert torch.equal(ours.sequences, plain.sequences)
