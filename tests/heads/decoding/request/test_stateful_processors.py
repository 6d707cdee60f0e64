"""Processors that keep a state from token to token, as grammars and watermarks do, give plain `generate`'s text.

A grammar's processor accepts the text's last token at each call and raises where the grammar has none such, so one
call for a draft that was not emitted, or one call too few, ends the test.
"""

from __future__ import annotations

from typing import Any

import llguidance.hf
import pytest
import torch
from repository import DEMO
from throwaway_families import fitted_heads
from tiny import PAD, VOCAB, left_padded, random_tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, SynthIDTextWatermarkingConfig

import heads
from heads.decoding.request.request import Row

PROMPT = random_tokens(1, 6, seed=1)
ASKED: dict[str, Any] = {
    "max_new_tokens": 20,
    "eos_token_id": None,
    "pad_token_id": PAD,
    "return_dict_in_generate": True,
}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}
STATES = 7


def allowed(state: int) -> list[int]:
    """Tokens that the automaton takes in a state."""
    return [3 + (5 * state + 3 * i) % (VOCAB - 3) for i in range(5)]


def mask(scores: Tensor, state: int) -> Tensor:
    masked = torch.full_like(scores, -torch.inf)
    masked[:, allowed(state)] = scores[:, allowed(state)]
    return masked


class Grammar(LogitsProcessor):
    """Follows one text through an automaton, as the processors of xgrammar, llguidance and outlines do."""

    def __init__(self) -> None:
        self.state: int | None = None

    def of_row(self, row: int) -> Grammar:
        return Grammar()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        (last,) = input_ids[:, -1].tolist()
        if self.state is None:
            self.state = 0
        elif last in allowed(self.state):
            self.state = (3 * self.state + last) % STATES
        else:
            raise AssertionError(f"token {last} is not in the grammar")
        return mask(scores, self.state)


class FromPrefix(LogitsProcessor):
    """The same mask, found anew from the whole text: no state."""

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length

    def of_row(self, row: int) -> FromPrefix:
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = []
        for row, scores_V in zip(input_ids[:, self.prompt_length :].tolist(), scores, strict=True):
            state = 0
            for token in row:
                state = (3 * state + token) % STATES
            masked.append(mask(scores_V[None], state))
        return torch.cat(masked)


DECODINGS = {
    "tree": lambda h: heads.TreeDecoding(h, 12),
    "heads alone": lambda h: heads.TreeDecoding(h, 12, lookup=0),
    "dynamic tree": lambda h: heads.TreeDecoding(h, heads.DynamicTree(nodes=12)),
    "rejection": lambda h: heads.TreeDecoding(h, 12, rule="rejection"),
    "typical": lambda h: heads.TreeDecoding(h, 12, rule="typical"),
    "draft model": lambda h: heads.DraftModelDecoding(h.backbone.model, k=3),
}
SAME_DRAWS = ("tree", "heads alone", "dynamic tree")


def run(model: Any, decoding: Any, processor: Any, tokens: Tensor = PROMPT, **options: Any) -> Any:
    torch.manual_seed(3)
    given = {} if processor is None else {"logits_processor": [processor]}
    return model.generate(tokens, custom_generate=decoding, **given, **{**ASKED, "do_sample": False, **options})


@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_grammars_text_is_generates(decoding):
    token_heads = fitted_heads("grounded", "llama")
    model, ours = token_heads.backbone.model, DECODINGS[decoding](token_heads)
    plain = run(model, None, Grammar())
    out = run(model, ours, Grammar())
    assert torch.equal(out.sequences, plain.sequences)
    assert not torch.equal(out.sequences, run(model, None, None).sequences), "the grammar changes the text"
    assert out.stats.tokens > out.stats.passes, "drafts were accepted"


@pytest.mark.parametrize("decoding", DECODINGS)
def test_a_sampled_text_follows_the_grammar(decoding):
    """With the draws of plain generation, or those of a processor that finds its state from the whole text."""
    token_heads = fitted_heads("grounded", "llama")
    model, ours = token_heads.backbone.model, DECODINGS[decoding](token_heads)
    out = run(model, ours, Grammar(), **SAMPLED)
    stateless = run(model, None if decoding in SAME_DRAWS else ours, FromPrefix(PROMPT.shape[1]), **SAMPLED)
    if decoding != "draft model":  # a draft model asks stateless processors of transformers alone
        assert torch.equal(out.sequences, stateless.sequences)
    assert out.sequences.shape[1] == PROMPT.shape[1] + 20


class Counting(Grammar):
    """Notes the prefixes that it is asked about; copies note theirs elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: list[list[int]] = []

    def of_row(self, row: int) -> Counting:
        return Counting()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids[0].tolist())
        return super().__call__(input_ids, scores)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_dynamic_decoding_keeps_to_a_grammar(threshold, settings):
    """Each n-gram ends before a token that the grammar forbids behind the tokens that were emitted before it."""
    token_heads = fitted_heads("medusa", "llama")
    ours = heads.DynamicDecoding(token_heads, threshold)
    out = run(token_heads.backbone.model, ours, Grammar(), **settings)
    state = 0
    for token in out.sequences[0, PROMPT.shape[1] :].tolist():
        assert token in allowed(state)
        state = (3 * state + token) % STATES
    assert out.sequences.shape[1] == PROMPT.shape[1] + 20
    assert (out.stats.tokens > out.stats.passes) == (threshold < 1)
    if threshold == 1:
        assert torch.equal(out.sequences, run(token_heads.backbone.model, None, Grammar(), **settings).sequences)


def test_dynamic_decoding_asks_a_processor_about_the_emitted_text_alone(monkeypatch):
    token_heads = fitted_heads("medusa", "llama")
    rows: list[Row] = []
    monkeypatch.setattr(Row, "__post_init__", lambda row, init=Row.__post_init__: (rows.append(row), init(row))[1])
    out = run(token_heads.backbone.model, heads.DynamicDecoding(token_heads, 0.0), Counting())
    (asked,) = [processor for processor in rows[0].processors if isinstance(processor, Counting)]
    text = out.sequences[0].tolist()
    assert asked.prefixes[:20] == [text[:length] for length in range(PROMPT.shape[1], len(text))]


def test_dynamic_decoding_refuses_a_processor_that_cannot_be_copied():
    class Uncopied(Grammar):
        def of_row(self, row: int) -> Any:
            return Uncopied()

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot pickle this")

    token_heads = fitted_heads("medusa", "llama")
    with pytest.raises(ValueError, match=r"Uncopied cannot be copied \(cannot pickle this\), but .*DynamicDecoding"):
        run(token_heads.backbone.model, heads.DynamicDecoding(token_heads, 0.3), Uncopied())
    out = run(token_heads.backbone.model, heads.DynamicDecoding(token_heads, 1.0), Uncopied())
    assert torch.equal(out.sequences, run(token_heads.backbone.model, None, Grammar()).sequences)


def test_rows_of_a_batch_have_a_grammar_each():
    token_heads = fitted_heads("grounded", "llama")
    tokens, mask_BT = left_padded([random_tokens(n, seed=90 + n).tolist() for n in (3, 6)])
    plain = run(token_heads.backbone.model, None, FromPrefix(6), tokens, attention_mask=mask_BT)
    ours = run(
        token_heads.backbone.model, heads.TreeDecoding(token_heads, 12), Grammar(), tokens, attention_mask=mask_BT
    )
    assert torch.equal(ours.sequences, plain.sequences)


WATERMARK: dict[str, Any] = {
    "watermarking_config": SynthIDTextWatermarkingConfig(keys=[4, 7, 2, 9], ngram_len=3, context_history_size=8)
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("decoding", ["tree", "draft model"])
def test_a_watermark_is_generates(decoding, rows):
    token_heads = fitted_heads("grounded", "llama")
    model, ours = token_heads.backbone.model, DECODINGS[decoding](token_heads)
    tokens, sampled = random_tokens(rows, 6, seed=7), SAMPLED if (rows, decoding) == (1, "tree") else {}
    plain = run(model, None, None, tokens, **WATERMARK, **sampled)
    assert torch.equal(run(model, ours, None, tokens, **WATERMARK, **sampled).sequences, plain.sequences)
    assert not torch.equal(plain.sequences, run(model, None, None, tokens, **sampled).sequences)


def test_a_watermark_is_refused_where_ngrams_are_chosen():
    token_heads = fitted_heads("medusa", "llama")
    with pytest.raises(ValueError, match=r"A watermark was asked for, .* decode with TreeDecoding"):
        run(token_heads.backbone.model, heads.DynamicDecoding(token_heads), None, **WATERMARK)


class Guided(LogitsProcessor):
    """llguidance's matcher as a processor: it consumes each token once, and can be copied."""

    def __init__(self, matcher: llguidance.LLMatcher, *, started: bool = False) -> None:
        self.matcher, self.started = matcher, started

    def __deepcopy__(self, memo: Any) -> Guided:
        return Guided(self.matcher.deep_copy(), started=self.started)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.started:
            assert self.matcher.consume_token(int(input_ids[0, -1])), self.matcher.get_error()
        self.started = True
        bias_V = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8)
        return scores.masked_fill(bias_V[: scores.shape[1]] == 0, -torch.inf)


def test_llguidance_gives_generates_json():
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    model = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float64)
    token_heads = heads.load(DEMO / "grounded", model, dtype=torch.float64)
    known = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    inputs = tokenizer("settings = ", return_tensors="pt", return_token_type_ids=False)

    def text(decoding: Any, **sampled: Any) -> Tensor:
        torch.manual_seed(0)
        processor = Guided(llguidance.LLMatcher(known, grammar))
        asked = {**inputs, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **sampled}
        return model.generate(**asked, logits_processor=[processor], custom_generate=decoding)

    wanted = text(None)
    assert tokenizer.decode(wanted[0, inputs["input_ids"].shape[1] :]).startswith("{")
    draft = AutoModelForCausalLM.from_pretrained(DEMO / "draft", dtype=torch.float64)
    for decoding in (heads.TreeDecoding(token_heads), heads.DraftModelDecoding(draft)):
        assert torch.equal(text(decoding), wanted)
    assert torch.equal(text(heads.TreeDecoding(token_heads), **SAMPLED), text(None, **SAMPLED))
    typical = text(heads.TreeDecoding(token_heads, rule="typical"), **SAMPLED)  # raises where a token is not in it
    assert tokenizer.decode(typical[0, inputs["input_ids"].shape[1] :]).startswith("{")


@pytest.fixture(scope="module")
def json_grammar():
    """xgrammar's own processors for JSON in the demo tokenizer; skipped where xgrammar is not installed."""
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is no dependency; pip install xgrammar to test it")
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "base")
    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
    grammar = xgrammar.GrammarCompiler(known).compile_builtin_json_grammar()
    return tokenizer, lambda: xgrammar.contrib.hf.LogitsProcessor(grammar)


def test_xgrammar_gives_generates_json(json_grammar):
    tokenizer, processor = json_grammar
    model = AutoModelForCausalLM.from_pretrained(DEMO / "base", dtype=torch.float64)
    token_heads = heads.load(DEMO / "grounded", model, dtype=torch.float64)
    inputs = tokenizer("settings = ", return_tensors="pt", return_token_type_ids=False)
    asked = {**inputs, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**asked, logits_processor=[processor()])
    assert tokenizer.decode(wanted[0, inputs["input_ids"].shape[1] :]).lstrip()[0] in '{["-0123456789tfn'
    draft = AutoModelForCausalLM.from_pretrained(DEMO / "draft", dtype=torch.float64)
    for decoding in (heads.TreeDecoding(token_heads), heads.DraftModelDecoding(draft)):
        assert torch.equal(model.generate(**asked, logits_processor=[processor()], custom_generate=decoding), wanted)
    typical = heads.TreeDecoding(token_heads, rule="typical")
    with pytest.raises(ValueError, match="cannot be copied"):
        model.generate(**{**asked, "do_sample": True}, logits_processor=[processor()], custom_generate=typical)
