"""Superposed decoding: drafts and scores are those of the plain reference, and what cannot be obeyed is refused.

In float64 both compute the same sums in another order, so scores agree to 1e-6 with room to spare: they are sums of at
most 12 logarithms of size 100.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from matrices import covering
from tiny import EOS, HYBRIDS, PAD, VOCAB, left_padded, random_tokens, tiny_model
from transformers import StoppingCriteria, SynthIDTextWatermarkingConfig

import heads
from heads.backbone.model import Backbone
from heads.decoding.superposed.checks import embedding_factor
from heads.decoding.superposed.reference import count_plainly, superposed_drafts
from heads.decoding.superposed.step import PAPER_WEIGHTS
from heads.ngrams.counting import count_ngrams

ARCHITECTURES = ("ctrl", "llama", "gpt_neox", "gemma", "gemma2", "mistral_windowed", "codegen", "gpt2", "opt")
COUNTED = SimpleNamespace(max_order=6, next_token_probabilities=None)
FLOAT32_INSIDE = {"codegen": "multiplies queries with keys in float32", "gemma2": "has its norms in float32"}
"""A text that is read at once and token by token is rounded differently there, and logits reach 30."""
STEPS_INSIDE = 1e-3
"""Recurrent layers step in float32 inside, and a text that is read at once is rounded differently there."""
ASKED = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
SETTINGS = {"temperature": 0.7, "alpha": 0.4, "penalty": 0.01}


@pytest.fixture(scope="module")
def documents():
    return [random_tokens(1, 400, seed=seed)[0].tolist() for seed in range(4)]


@pytest.fixture(scope="module")
def table(documents, tmp_path_factory):
    return count_ngrams(documents, folder=tmp_path_factory.mktemp("ngrams") / "table", order=6, vocab_size=VOCAB)


def float64(name):
    return tiny_model(name, attn="eager" if name in ("codegen", "gemma2") else "sdpa", dtype=torch.float64)


def of_resets(reset_every, seed):
    """A generator, which only resets take."""
    return {} if reset_every is None else {"generator": torch.Generator().manual_seed(seed)}


def check_equal(out, expected, prompts, k, tolerance=1e-6):
    """`expected`: for each prompt its drafts and scores."""
    assert out.sequences.shape[0] == len(prompts) * k
    for row, (prompt, drafts) in enumerate(zip(prompts, expected, strict=True)):
        for i, (tokens, score) in enumerate(drafts):
            found = out.sequences[row * k + i, -(out.sequences.shape[1] - prompts.shape[1]) :].tolist()
            assert found == tokens + [PAD] * (len(found) - len(tokens)), (row, i, prompt)
            assert out.sequences_scores[row * k + i].item() == pytest.approx(score, abs=tolerance)


@covering(name=ARCHITECTURES, k=[1, 3, 8])
def test_drafts_and_scores_are_the_reference_s(name, k, table, documents):
    model = float64(name)
    prompts = random_tokens(2, 7, seed=5)
    prompts[0, -4:] = torch.tensor(documents[0][10:14])  # an end that the n-grams know
    for ngrams in (None, table):
        weights = (0.01, 0.04, 0.15, 0.18, 0.12) if ngrams is not None else ()
        counts = count_plainly(documents, 6) if ngrams is not None else None
        given = SETTINGS if ngrams is not None else {"temperature": SETTINGS["temperature"]}
        decoding = heads.SuperposedDecoding(k=k, ngrams=ngrams, **given)
        out = model.generate(
            prompts, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, custom_generate=decoding
        )
        expected = [
            superposed_drafts(
                model, prompt, k=k, length=6, weights=weights, counts=counts, eos=frozenset({EOS}), **SETTINGS
            )
            for prompt in prompts.tolist()
        ]
        check_equal(out, expected, prompts, k, 1e-4 if name in FLOAT32_INSIDE else 1e-6)
        assert (out.sequences_scores.view(2, k).diff(dim=1) <= 1e-12).all()


def test_ends_of_text_inside_drafts_left_padding_and_prompts_of_one_token():
    model = float64("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= 2.5  # ends are likely
    lengths = (1, 4, 6)
    texts = [random_tokens(1, n, seed=30 + n)[0].tolist() for n in lengths]
    prompts = torch.tensor([[PAD] * (6 - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (6 - n) + [1] * n for n in lengths])
    out = model.generate(
        prompts,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=heads.SuperposedDecoding(k=4, temperature=1.0),
    )
    plain = {"k": 4, "length": 12, "temperature": 1.0, "alpha": 0.0, "penalty": 1.0, "eos": frozenset({EOS})}
    expected = [superposed_drafts(model, text, **plain) for text in texts]
    ended = sorted(len(tokens) for drafts in expected for tokens, _ in drafts)
    assert ended[0] < ended[-1] == 12  # some end early and some do not
    check_equal(out, expected, prompts, 4)


@pytest.mark.parametrize("case", ["order 2", "fewer weights", "no n-grams in the table", "every token", "α is 1"])
def test_odd_tables_and_drafts_of_every_token_in_a_padded_batch(case, documents, tmp_path):
    """Prompts of 1, 3 and 9 tokens, with padding on the left."""
    counted, order, k, weights, alpha = {
        "order 2": (documents, 2, 3, (0.3,), 0.4),
        "fewer weights": (documents, 6, 5, (0.2, 0.3), 0.4),
        "no n-grams in the table": ([[5]], 6, 3, PAPER_WEIGHTS, 0.4),
        "every token": (documents, 2, VOCAB, (0.3,), 0.4),
        "α is 1": (documents, 6, 3, PAPER_WEIGHTS, 1.0),
    }[case]
    model, table = float64("gpt2"), count_ngrams(counted, folder=tmp_path / "t", order=order, vocab_size=VOCAB)
    texts = [random_tokens(1, n, seed=60 + n)[0].tolist() for n in (1, 3, 4)]
    texts[2] += documents[0][10:15]
    prompts, mask = left_padded(texts)
    said = {"temperature": 0.7, "alpha": alpha, "penalty": 1e-3}
    decoding = heads.SuperposedDecoding(k=k, ngrams=table, weights=weights, **said)
    out = model.generate(prompts, attention_mask=mask, custom_generate=decoding, **ASKED | {"max_new_tokens": 5})
    counts = count_plainly(counted, order)
    plain = {"k": k, "length": 5, "weights": weights, "counts": counts, "eos": frozenset({EOS}), **said}
    check_equal(out, [superposed_drafts(model, text, **plain) for text in texts], prompts, k)


def test_adapters_on_embeddings_are_read():
    peft = pytest.importorskip("peft")
    targets = ["wte", "c_attn"]
    lora = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out=True)
    plain_model, given = float64("gpt2"), {"k": 3, "temperature": 0.7}
    torch.manual_seed(0)
    model = peft.get_peft_model(copy.deepcopy(plain_model), lora).double().eval()
    prompts = random_tokens(2, 5, seed=8)
    out = model.generate(input_ids=prompts, custom_generate=heads.SuperposedDecoding(**given), **ASKED)
    plain = given | {"length": 10, "alpha": 0.0, "penalty": 1.0, "eos": frozenset({EOS})}
    expected = [superposed_drafts(model.base_model.model, text, **plain) for text in prompts.tolist()]
    check_equal(out, expected, prompts, 3)
    without = [superposed_drafts(plain_model, text, **plain) for text in prompts.tolist()]
    assert without != expected


@pytest.mark.parametrize("every", [1, 3])
def test_resets_read_a_sampled_draft_anew(every):
    model = float64("qwen3")
    prompt = random_tokens(1, 5, seed=8)
    out = model.generate(
        prompt,
        max_new_tokens=9,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=heads.SuperposedDecoding(
            k=3, temperature=1.0, reset_every=every, generator=torch.Generator().manual_seed(4)
        ),
    )
    drafts = superposed_drafts(
        model,
        prompt[0].tolist(),
        k=3,
        length=9,
        temperature=1.0,
        alpha=0.0,
        penalty=1.0,
        eos=frozenset({EOS}),
        reset_every=every,
        generator=torch.Generator().manual_seed(4),
    )
    check_equal(out, [drafts], prompt, 3)


def test_resets_of_a_batch_with_n_grams_padding_and_ends(table, documents):
    """At a low temperature each reset samples the likeliest draft, whatever the generator and the batch."""
    model = float64("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= 3.0
    texts = [documents[0][10:11], documents[1][3:9], documents[2][7:11]]
    prompts, mask = left_padded(texts)
    settings = {"k": 3, "temperature": 0.02, "alpha": 0.3, "penalty": 1e-4, "reset_every": 3}
    out = model.generate(
        prompts, attention_mask=mask, custom_generate=heads.SuperposedDecoding(ngrams=table, **settings), **ASKED
    )
    counts = count_plainly(documents, 6)
    settings |= {"length": 10, "weights": PAPER_WEIGHTS, "counts": counts, "eos": frozenset({EOS})}
    expected = [superposed_drafts(model, text, **settings) for text in texts]
    lengths = sorted(len(tokens) for drafts in expected for tokens, _ in drafts)
    assert lengths[0] < lengths[-1] == 10  # some end early and some do not
    check_equal(out, expected, prompts, 3, 1e-5)  # logits of 30 are divided by 0.02
    assert out.stats.tokens == sum(lengths)


@covering(name=HYBRIDS, k=[1, 3], reset_every=[None, 1, 3])
def test_recurrent_layers_go_back_at_resets(name, k, reset_every, table, documents):
    """A reset begins at the states behind the last certain token, and the reference reads the whole text anew."""
    model = tiny_model(name)
    prompt = torch.tensor([documents[1][3:9]])
    settings = {"k": k, "temperature": 0.7, "alpha": 0.3, "penalty": 1e-4, "reset_every": reset_every}
    decoding = heads.SuperposedDecoding(ngrams=table, **of_resets(reset_every, 4), **settings)
    out = model.generate(prompt, custom_generate=decoding, **ASKED)
    settings |= {"length": 10, "weights": PAPER_WEIGHTS, "counts": count_plainly(documents, 6)}
    seed = torch.Generator().manual_seed(4)
    expected = superposed_drafts(model, prompt[0].tolist(), eos=frozenset({EOS}), generator=seed, **settings)
    check_equal(out, [expected], prompt, k, STEPS_INSIDE)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_a_batch_on_recurrent_layers_is_its_prompts(name, documents):
    """One draft with resets is greedy text, whichever prompts have left the batch."""
    model = tiny_model(name)
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= 2.0
    texts = [documents[0][10:11], documents[1][3:9], documents[2][7:11], documents[3][:5]]
    prompts, mask = left_padded(texts)
    out = model.generate(
        prompts, attention_mask=mask, custom_generate=heads.SuperposedDecoding(k=1, reset_every=3), **ASKED
    )
    alone = [model.generate(torch.tensor([text]), max_new_tokens=10, do_sample=False)[0, len(text) :] for text in texts]
    assert len({len(text_T) for text_T in alone}) > 1  # some end early and some do not
    for found_T, expected_T in zip(out.sequences[:, prompts.shape[1] :], alone, strict=True):
        assert found_T.tolist() == expected_T.tolist() + [PAD] * (len(found_T) - len(expected_T))


@pytest.mark.parametrize("reset_every", [None, 2])
def test_kept_caches_of_recurrent_layers_are_those_of_the_prompt(reset_every):
    model = tiny_model("qwen3_next")
    text = random_tokens(1, 14, seed=12)
    given, read = {"temperature": 1.0, "reset_every": reset_every}, []
    kept = heads.SuperposedDecoding(keep_caches=True, **of_resets(reset_every, 1), **given)
    for prompt in (text[:, :9], text[:, :10], text[:, :14], text[:, :4]):
        if reset_every is not None:
            kept.generator.manual_seed(1)
        ours = model.generate(prompt, custom_generate=kept, **ASKED)
        alone = heads.SuperposedDecoding(**of_resets(reset_every, 1), **given)
        plain = model.generate(prompt, custom_generate=alone, **ASKED)
        assert torch.equal(ours.sequences, plain.sequences)
        assert torch.allclose(ours.sequences_scores, plain.sequences_scores, atol=STEPS_INSIDE)
        read.append(ours.stats.prompt_tokens)
    assert read == [9, 1, 4, 4]  # a prompt that leaves the last one is read from its beginning


@pytest.mark.parametrize(("name", "with_ngrams", "reset_every"), [("llama", True, 4), ("gemma", False, None)])
def test_a_grounded_head_tells_drafts_apart_as_in_the_reference(name, with_ngrams, reset_every, table, documents):
    model = float64(name)
    token_heads = heads.create("grounded", model, num_heads=2, normalize_embeddings=name == "gemma").to(torch.float64)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    texts = [documents[0][10:14], documents[1][3:4], documents[2][7:12]][: 1 if reset_every else 3]
    prompts, mask = left_padded(texts)
    settings = {"k": 3, **SETTINGS, "token_heads": token_heads, "head_weight": 0.4, "reset_every": reset_every}
    of_ngrams = ("alpha", "penalty")
    given = {name: value for name, value in settings.items() if with_ngrams or name not in of_ngrams}
    decoding = heads.SuperposedDecoding(ngrams=table if with_ngrams else None, **of_resets(reset_every, 4), **given)
    out = model.generate(prompts, attention_mask=mask, custom_generate=decoding, **ASKED)
    settings |= {"length": 10, "eos": frozenset({EOS})}
    if with_ngrams:
        settings |= {"weights": PAPER_WEIGHTS, "counts": count_plainly(documents, 6)}
    expected = [superposed_drafts(model, text, **of_resets(reset_every, 4), **settings) for text in texts]
    check_equal(out, expected, prompts, 3)
    without = [superposed_drafts(model, text, **{**settings, "token_heads": None}) for text in texts]
    assert [draft for drafts in expected for draft, _ in drafts] != [draft for drafts in without for draft, _ in drafts]


def test_heads_that_do_not_tell_drafts_apart_are_refused():
    model = float64("llama")
    for token_heads, said in (
        (heads.create("medusa", model, num_heads=1), "family 'medusa' were given"),
        (heads.create("grounded", model, num_heads=1, prefix_layers=1), "with prefix layers were given"),
        ("checkpoints/demo/grounded", "in place of token heads"),
    ):
        with pytest.raises(ValueError, match=said):
            heads.SuperposedDecoding(token_heads=token_heads)
    other = heads.SuperposedDecoding(token_heads=heads.create("grounded", float64("qwen3"), num_heads=1))
    with pytest.raises(ValueError, match="another model than the heads' backbone"):
        model.generate(random_tokens(1, 4), custom_generate=other, **ASKED)


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.6},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [8, 8], [3, 8], [24, 24], [12, 12]]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(3, 20))},
    "forced_eos_token_id": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "stopping_criteria": {"eos_token_id": EOS},
}


@pytest.mark.parametrize("asked", PROCESSORS)
def test_processors_and_criteria_act_on_each_draft_by_its_own_text(asked, table, documents):
    model, texts = float64("qwen3"), [documents[0][10:14], documents[1][4:6]]
    prompts, mask = left_padded(texts)
    criteria = [EndsIn(range(3, 16))] if asked == "stopping_criteria" else []
    given = {**ASKED, "eos_token_id": None, **PROCESSORS[asked], "attention_mask": mask}
    decoding = heads.SuperposedDecoding(ngrams=table, **SETTINGS)
    out = model.generate(prompts, stopping_criteria=criteria, custom_generate=decoding, **given)
    eos = given["eos_token_id"] or []
    settings = {
        **{"k": 3, "length": 10, "weights": PAPER_WEIGHTS, "counts": count_plainly(documents, 6)},
        **{"eos": frozenset(eos if isinstance(eos, list) else [eos]), **SETTINGS},
    }

    def drafts_of(text):
        taken = _TakesProcessors()
        model.generate(torch.tensor([text]), custom_generate=taken.generate, **{**given, "attention_mask": None})
        return superposed_drafts(model, text, **settings, process=taken.process, stops=stops)

    def stops(text):
        return bool(criteria) and text[-1] in criteria[0].tokens

    expected = [drafts_of(text) for text in texts]
    check_equal(out, expected, prompts, 3)
    plain = [superposed_drafts(model, text, **settings) for text in texts]
    assert expected != plain, "nothing changed, so the equality shows nothing"


class EndsIn(StoppingCriteria):
    """Ends texts at some tokens."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(list(tokens))

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)

    def of_row(self, row):
        return self


class _TakesProcessors:
    """In place of a decoding: takes the processors that `generate` makes for one text, and is `process` by them."""

    def generate(self, model, input_ids, logits_processor, *args, **kwargs):
        self.processors = logits_processor
        return input_ids

    def process(self, text, logits_V):
        return self.processors(torch.tensor([text]), logits_V[None].clone())[0]


def test_one_draft_with_processors_and_resets_is_greedy_text():
    model, (prompts, mask) = float64("llama"), left_padded([[5], [4, 9, 7], [8, 8]])
    with torch.no_grad():
        model.get_output_embeddings().weight[EOS] *= 1.7
    asked = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.4, "attention_mask": mask}
    plain = model.generate(prompts, **asked)
    assert (plain[:, -12:] == EOS).any()
    for every in (None, 1, 4):
        decoding = heads.SuperposedDecoding(k=1, reset_every=every)
        assert torch.equal(model.generate(prompts, **asked, custom_generate=decoding), plain), every


def test_one_draft_at_any_temperature_is_greedy_text():
    model = float64("phi3")
    prompt = random_tokens(2, 5, seed=9)
    plain = model.generate(prompt, max_new_tokens=10, do_sample=False, eos_token_id=None)
    ours = model.generate(
        prompt, max_new_tokens=10, do_sample=False, eos_token_id=None, custom_generate=heads.SuperposedDecoding(k=1)
    )
    assert torch.equal(ours, plain)


def test_a_prompt_has_one_row_in_every_pass():
    model = float64("llama")
    out = model.generate(
        random_tokens(2, 5, seed=9),
        max_new_tokens=7,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        custom_generate=heads.SuperposedDecoding(k=5, temperature=1.0),
    )
    assert not out.sequences.is_inference()
    assert not out.sequences_scores.is_inference()
    assert (out.stats.passes, out.stats.row_passes, out.stats.tokens) == (7, 14, 70)


WATERMARK = SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)
REFUSED = {
    "do_sample=True was given": ({"do_sample": True}, {}),
    "Greedy methods .* do not support `num_return_sequences`": ({"num_return_sequences": 3}, {}),  # generate itself
    "a streamer was given": ({"streamer": SimpleNamespace(put=list, end=list)}, {}),
    "output_scores or output_logits was given": ({"output_scores": True, "return_dict_in_generate": True}, {}),
    "SynthIDTextWatermarkLogitsProcessor was asked for": ({"watermarking_config": WATERMARK}, {}),
    "PrefixConstrainedLogitsProcessor cannot be used": ({"prefix_allowed_tokens_fn": lambda row, text: [5, 6, 7]}, {}),
    "num_beams=2 was given": ({"num_beams": 2}, {}),
    "The logits processors of this call leave a prompt 2 drafts, and k=3": (
        {"max_new_tokens": 1, "suppress_tokens": [token for token in range(VOCAB) if token not in (4, 9)]},
        {},
    ),
    f"k=30 was given; the vocabulary has {VOCAB} tokens": ({}, {"k": 30}),
    "Multi-token decoding starts from input_ids of at least one token": ({"input_ids": random_tokens(1, 0)}, {}),
    "attention_mask hides every token of row 1 of input_ids, an empty prompt": (
        {"input_ids": random_tokens(2, 4), "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])},
        {},
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_generate_asks_and_drafts_cannot_do(said):
    asked, settings = REFUSED[said]
    decoding = heads.SuperposedDecoding(**settings)
    with pytest.raises(ValueError, match=f"^{said}"):
        heads.generate(
            tiny_model("llama"),
            decoding,
            **{"input_ids": random_tokens(1, 4), "do_sample": False, "max_new_tokens": 4, **asked},
        )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"streamer": SimpleNamespace(put=list, end=list)}, "a streamer was given, which superposed decoding"),
        ({"assistant_model": tiny_model("llama")}, "assistant_model was given beside SuperposedDecoding"),
    ],
    ids=["streamer", "assistant_model"],
)
def test_what_generate_itself_hands_to_no_callable(asked, said):
    """A TextIteratorStreamer that is passed over would wait for ever."""
    with pytest.raises(ValueError, match=said):
        tiny_model("llama").generate(
            random_tokens(1, 4), custom_generate=heads.SuperposedDecoding(), **{**ASKED, **asked}
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"k": 0}, "k=0 was given; allowed are integers of at least 1"),
        ({"alpha": 1.2, "ngrams": COUNTED}, "alpha=1.2 was given; allowed are numbers from 0 to 1"),
        ({"temperature": 0.0}, "temperature=0.0 was given; allowed are numbers above 0"),
        ({"penalty": 0.0, "ngrams": COUNTED}, "penalty=0.0 was given"),
        ({"reset_every": 0}, "reset_every=0 was given"),
        ({"alpha": 0.2}, "alpha=0.2 was given without ngrams"),
        ({"penalty": 0.2}, "penalty=0.2 was given without ngrams"),
        ({"head_weight": 0.2}, "head_weight=0.2 was given without token_heads"),
        ({"generator": 3}, "generator=3 was given"),
        ({"generator": torch.Generator()}, "generator was given without reset_every, and nothing is sampled then"),
        ({"ngrams": object()}, "ngrams=<object"),
        ({"ngrams": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_settings_outside_their_range(given, said):
    with pytest.raises((ValueError, OSError), match=said):
        heads.SuperposedDecoding(**given)


def test_weights_fit_the_orders_that_the_table_has(documents, table, tmp_path):
    assert heads.SuperposedDecoding(ngrams=table).weights == (0.01, 0.04, 0.15, 0.18, 0.12)
    shorter = count_ngrams(documents[:1], folder=tmp_path / "four", order=4, vocab_size=VOCAB)
    assert heads.SuperposedDecoding(ngrams=shorter).weights == (0.01, 0.04, 0.15)
    with pytest.raises(ValueError, match=r"4 weights were given, .* counts up to 4; give 1 to 3 weights"):
        heads.SuperposedDecoding(ngrams=shorter, weights=(0.1, 0.1, 0.1, 0.1))
    with pytest.raises(ValueError, match="sum to more than 0, at most 1"):
        heads.SuperposedDecoding(ngrams=table, weights=(0.9, 0.9))
    wide = count_ngrams([[0, 70_000]], folder=tmp_path / "wide", order=2, vocab_size=70_001)
    with pytest.raises(ValueError, match="is of another tokenizer"):
        tiny_model("llama").generate(
            random_tokens(1, 4), do_sample=False, custom_generate=heads.SuperposedDecoding(ngrams=wide)
        )


@pytest.mark.parametrize("name", ["gemma4"])
def test_a_backbone_that_looks_tokens_up_by_their_embeddings_is_refused(name):
    with pytest.raises(ValueError, match=r"cannot read embeddings in place of tokens|reads the embeddings of tokens"):
        tiny_model(name).generate(
            random_tokens(1, 4), do_sample=False, max_new_tokens=3, custom_generate=heads.SuperposedDecoding()
        )


def test_a_backbone_that_multiplies_only_what_it_looks_up_itself():
    """One draft is greedy text where the embeddings that are read are multiplied as the model multiplies its own."""
    model = tiny_model("falcon_h1", embedding_multiplier=5.6)
    assert embedding_factor(Backbone(model)) == pytest.approx(5.6)
    prompt = random_tokens(1, 6, seed=3)
    out = model.generate(prompt, custom_generate=heads.SuperposedDecoding(k=1), **ASKED)
    assert torch.equal(out.sequences, model.generate(prompt, **ASKED).sequences)
    assert embedding_factor(Backbone(float64("gemma"))) == 1.0


@pytest.mark.parametrize("reset_every", [None, 2])
def test_kept_caches_change_no_draft_and_read_only_what_is_new(reset_every):
    model = float64("mistral_windowed")
    text = random_tokens(1, 14, seed=12)
    other = random_tokens(1, 6, seed=13)
    prompts = [text[:, :9], text[:, :10], text[:, :14], text[:, :4], torch.cat([text[:, :3], other], dim=1)]
    given = {"k": 3, "temperature": 1.0, "reset_every": reset_every}
    kept = heads.SuperposedDecoding(keep_caches=True, **of_resets(reset_every, 1), **given)
    asked = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    read = []
    for prompt in prompts:
        if reset_every is not None:
            kept.generator.manual_seed(1)
        ours = model.generate(prompt, custom_generate=kept, **asked)
        alone = heads.SuperposedDecoding(**of_resets(reset_every, 1), **given)
        plain = model.generate(prompt, custom_generate=alone, **asked)
        assert torch.equal(ours.sequences, plain.sequences)
        assert torch.allclose(ours.sequences_scores, plain.sequences_scores, atol=1e-9)
        read.append(ours.stats.prompt_tokens)
    assert read == [9, 1, 4, 1, 6]
    kept.forget()
    assert model.generate(prompts[0], custom_generate=kept, **asked).stats.prompt_tokens == 9


def test_kept_caches_are_of_one_prompt_and_without_heads():
    model = float64("llama")
    with pytest.raises(ValueError, match="keep_caches=True was given for 2 rows; caches are kept for one"):
        model.generate(
            random_tokens(2, 5),
            do_sample=False,
            max_new_tokens=3,
            custom_generate=heads.SuperposedDecoding(keep_caches=True),
        )
    grounded = heads.create("grounded", model, num_heads=1)
    with pytest.raises(ValueError, match="keep_caches=True was given with token_heads"):
        heads.SuperposedDecoding(token_heads=grounded, keep_caches=True)
