"""Tree decoding is `generate`: greedy text equal token for token, sampled text draw for draw, for every family.

Models and heads run in float64 with sdpa (rounding 1e-14 against gaps between the two best logits of 1e-3 and more), so
any difference is an error and none is excused. Equality alone would also hold if nothing were ever accepted; the first
test therefore counts paths by depth and by rank, and fails where one of them was never taken.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from throwaway_families import FAMILIES, fitted_heads, make_heads
from tiny import ARCHITECTURES, EOS, PAD, VOCAB, left_padded, random_tokens, shared_model, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.cache_utils import DynamicCache
from transformers.generation import utils as generation_utils
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList

import heads
from heads.backbone.model import Backbone
from heads.decoding import defaults as tree_choice
from heads.decoding.acceptance import rules
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.request.output import DecodingStats
from heads.decoding.request.request import Row
from heads.decoding.request.unsupported import check_inputs

NUM_HEADS = 3
# Every rank up to 2 at the first depth, so that paths beside the first are taken too: 0; 00 01; 000; 1; 10; 2.
TREE = heads.Tree([[0], [0, 0], [0, 0, 0], [0, 1], [0, 1, 0], [1], [1, 0], [1, 0, 0], [2], [2, 0]])
PROMPT = random_tokens(1, 5, seed=50)
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
WITH_AND_WITHOUT_LOOKUP = pytest.mark.parametrize("lookup", [DEFAULT_LOOKUP, 0], ids=["default", "heads_alone"])


def decoding_of(family: str = "grounded", name: str = "llama", **options: Any) -> tuple[Any, heads.TreeDecoding]:
    token_heads = fitted_heads(family, name)
    return token_heads.backbone.model, heads.TreeDecoding(token_heads, options.pop("tree", TREE), **options)


def both(model: Any, decoding: Any, tokens: Tensor = PROMPT, **options: Any) -> tuple[Any, Any]:
    """What `generate` gives, and what it gives with the decoding, from the same seed."""
    options = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True, **options}
    torch.manual_seed(0)
    plain = model.generate(tokens, **options)
    torch.manual_seed(0)
    ours = model.generate(tokens, custom_generate=decoding, **options)
    return plain, ours


def check_stats(stats: DecodingStats, sequences: Tensor, prompt_length: int, pad: int | None = None) -> None:
    """The counts agree with one another and with the text."""
    emitted = [len(row) for row in stats.drafted]
    assert stats.tokens == sum(emitted)
    assert max(emitted) == sequences.shape[1] - prompt_length
    for row, count in zip(sequences.tolist(), emitted, strict=True):
        assert all(token == pad for token in row[prompt_length + count :])
    drafted = sum(sum(row) for row in stats.drafted)
    assert drafted == sum(stats.accepted_per_depth)
    assert sorted(stats.accepted_per_depth, reverse=True) == stats.accepted_per_depth, "depth 2 needs depth 1"
    # A row's pass emits what it accepted and one token more; only the pass that ended a row may lack that one.
    own = stats.tokens - drafted
    assert stats.row_passes - len(emitted) <= own <= stats.row_passes
    assert stats.passes <= stats.row_passes <= stats.passes * len(emitted)
    assert stats.tokens_per_pass == pytest.approx(stats.tokens / stats.row_passes, rel=1e-12)  # one division
    assert not any(row[0] for row in stats.drafted), "the prefill's token is nobody's draft"
    assert set(stats.seconds) == {"prefill", "draft", "verify", "accept", "commit"}
    assert all(seconds >= 0 for seconds in stats.seconds.values())


# --- equality --------------------------------------------------------------------------------------------------------


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_generates_on_every_architecture(family, lookup, monkeypatch):
    taken: collections.Counter[tuple[int, ...]] = collections.Counter()
    chains_followed = 0
    plain_walk = rules.walk

    def counting_walk(shape, *arguments):
        nonlocal chains_followed
        path = plain_walk(shape, *arguments)
        if path[-1] < TREE.num_nodes and shape.parents[: TREE.num_nodes] == TREE.parents:
            taken[TREE.paths[path[-1]]] += 1
        else:
            chains_followed += 1
        return path

    monkeypatch.setattr(rules, "walk", counting_walk)
    prompts = [PROMPT, random_tokens(1, 1, seed=1), random_tokens(1, 17, seed=2)]
    for name in (*ARCHITECTURES, "mistral_windowed", "gemma3"):
        model, decoding = decoding_of(family, name, lookup=lookup)
        for tokens in prompts:
            plain, ours = both(model, decoding, tokens, **NO_EOS)
            assert torch.equal(ours.sequences, plain.sequences), name
            check_stats(ours.stats, ours.sequences, tokens.shape[1])
    depths = {len(path) for path in taken}
    assert depths == set(range(NUM_HEADS + 1)), f"accepted depths {depths}: the equality above shows too little"
    beside = [path for path in taken if any(path)]
    assert beside, "no path beside the likeliest one was ever accepted"
    assert bool(chains_followed) == bool(lookup), "looked-up chains are followed where they are asked for"


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_neox"])
def test_greedy_text_with_eager_attention(name):
    """Eager softmax is a float32 one; the gaps between the two best logits are still a hundred times wider."""
    token_heads = fitted_heads("grounded", name, "eager")
    plain, ours = both(token_heads.backbone.model, heads.TreeDecoding(token_heads, TREE), **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize("rule", ["rejection", "typical"])
@pytest.mark.parametrize(("family", "name"), [("medusa", "gpt_neox"), ("grounded", "gemma"), ("kv", "codegen")])
def test_greedy_text_is_generates_under_every_rule(family, name, rule):
    model, decoding = decoding_of(family, name, rule=rule)
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)])
    for options in ({}, {"repetition_penalty": 1.3}):
        plain, ours = both(model, decoding, tokens, attention_mask=mask, **options, **NO_EOS)
        assert torch.equal(ours.sequences, plain.sequences)
        assert sum(ours.stats.accepted_per_depth) > 0


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("tree", [2, 5, 16, 64, None, [[0]], [[1], [1, 1]], "file"], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_tree_gives_the_same_text(family, tree, lookup, tmp_path):
    if tree == "file":
        TREE.save(tmp_path / "tree.json")
        tree = tmp_path / "tree.json"
    model, decoding = decoding_of(family, "codegen", tree=tree, lookup=lookup)
    plain, ours = both(model, decoding, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)
    check_stats(ours.stats, ours.sequences, PROMPT.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lower_precision_differs_only_where_the_two_best_logits_are_within_rounding(dtype, capsys):
    differing = 0
    for name in ARCHITECTURES:
        model = shared_model(name, "eager" if name == "codegen" else "sdpa", dtype)
        decoding = heads.TreeDecoding(make_heads("grounded", Backbone(model), num_heads=NUM_HEADS), TREE)
        for seed in range(2):
            tokens = random_tokens(1, 5, seed=60 + seed)
            plain, ours = both(model, decoding, tokens, output_logits=True, **NO_EOS)
            differs = (plain.sequences != ours.sequences)[0]
            if not differs.any():
                continue
            differing += 1
            at = int(differs.int().argmax()) - tokens.shape[1]
            best = plain.logits[at][0].float().topk(2).values
            gap, scale = float(best[0] - best[1]), float(plain.logits[at].abs().max())
            with capsys.disabled():
                print(f"\n{name} {dtype}: token {at} differs, the two best logits are {gap:.3g} apart")
            # Logits are off by what tests/heads/backbone/test_backbone.py sees in float32: 4e-5 of 10, 30 units in the
            # last place; bfloat16 models round their sums once from float32 products, and two units are seen.
            assert gap < {torch.float32: 30, torch.bfloat16: 4}[dtype] * torch.finfo(dtype).eps * scale
    assert differing < len(ARCHITECTURES), "half of all texts differ: that is no rounding"


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["gpt_neox", "codegen", "mistral_windowed"])
def test_left_padding(family, name, lookup):
    """One padded row, then three rows of different length; rows end at different places and are filled with pad."""
    model, decoding = decoding_of(family, name, lookup=lookup)
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 9, 6)])
    padded_row = torch.cat([torch.full((1, 4), PAD), PROMPT], dim=1)
    row_mask = torch.tensor([[0] * 4 + [1] * 5])
    alone, ours = both(model, decoding, padded_row, attention_mask=row_mask, **NO_EOS)
    assert torch.equal(ours.sequences, alone.sequences)
    unpadded, _ = both(model, decoding, PROMPT, **NO_EOS)
    assert torch.equal(ours.sequences[:, 4:], unpadded.sequences)

    free, _ = both(model, decoding, tokens, attention_mask=mask, **NO_EOS)
    new = free.sequences[:, 9:]
    # An end token that the rows reach at different places.
    firsts = {t: [row.index(t) if t in row else 99 for row in new.tolist()] for t in new.flatten().tolist()}
    eos = max(firsts, key=lambda t: (len(set(firsts[t])), -max(firsts[t])))
    assert len(set(firsts[eos])) > 1
    plain, ours = both(model, decoding, tokens, attention_mask=mask, eos_token_id=eos, pad_token_id=PAD)
    assert torch.equal(ours.sequences, plain.sequences)
    check_stats(ours.stats, ours.sequences, 9, pad=PAD)
    assert len({len(row) for row in ours.stats.drafted}) > 1, "rows end at different places"


def test_decoding_again_and_with_another_batch_size():
    """One decoding object serves many calls; nothing of a call is left behind."""
    model, decoding = decoding_of("kv", "qwen3")
    for tokens in (PROMPT, random_tokens(3, 6, seed=53), PROMPT, random_tokens(2, 4, seed=54)):
        plain, ours = both(model, decoding, tokens, **NO_EOS)
        assert torch.equal(ours.sequences, plain.sequences)


def test_text_longer_than_the_caches_reserve():
    model, decoding = decoding_of("kv", "qwen3")
    plain, ours = both(model, decoding, max_new_tokens=320, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("name", ["gpt2", "opt", "codegen"])
def test_text_up_to_the_last_position_of_a_backbones_table(name, lookup):
    """Nodes behind the text's end would have positions that the table lacks; a padded row ends before the others."""
    table = {"max_position_embeddings": 40} if name == "opt" else {"n_positions": 40, "max_position_embeddings": 40}
    model = tiny_model(name, attn="eager" if name == "codegen" else "sdpa", **table)
    decoding = heads.TreeDecoding(make_heads("grounded", Backbone(model), num_heads=NUM_HEADS), TREE, lookup=lookup)
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (9, 6)])
    plain, ours = both(model, decoding, tokens, attention_mask=mask, max_new_tokens=None, max_length=40, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.sequences.shape[1] == 40


# --- where a text ends -----------------------------------------------------------------------------------------------


@functools.cache
def drafted_place(family: str = "grounded", name: str = "qwen3") -> tuple[int, int]:
    """(seed of a prompt, token): the token first comes drafted, and its path went on after it."""
    model, decoding = decoding_of(family, name)
    for seed in range(50, 56):
        tokens = random_tokens(1, 5, seed=seed)
        _, ours = both(model, decoding, tokens, **NO_EOS)
        new, flags = ours.sequences[0, 5:].tolist(), ours.stats.drafted[0]
        for i in range(1, len(new) - 1):
            if flags[i] and flags[i + 1] and new[i] not in new[:i]:
                return seed, new[i]
    raise AssertionError("no accepted path of two tokens with a new token first; fit the heads longer")


def test_an_end_token_inside_an_accepted_path():
    seed, eos = drafted_place()
    model, decoding = decoding_of("grounded", "qwen3")
    plain, ours = both(model, decoding, random_tokens(1, 5, seed=seed), eos_token_id=eos, pad_token_id=PAD)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.sequences[0, -1] == eos
    assert ours.stats.drafted[0][-1], "the end token was a drafted one: the pass emitted nothing after it"
    check_stats(ours.stats, ours.sequences, 5)


def test_several_end_tokens():
    seed, eos = drafted_place()
    model, decoding = decoding_of("grounded", "qwen3")
    plain, ours = both(model, decoding, random_tokens(1, 5, seed=seed), eos_token_id=[EOS, eos], pad_token_id=PAD)
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize("family", ["grounded", "kv"])
def test_a_length_cuts_a_path(family):
    model, decoding = decoding_of(family, "qwen3")
    tokens = random_tokens(1, 5, seed=drafted_place()[0])
    ends = []
    for length in (1, 2, 3, 5, *range(6, 14)):
        plain, ours = both(model, decoding, tokens, max_new_tokens=length, **NO_EOS)
        assert torch.equal(ours.sequences, plain.sequences), length
        assert ours.sequences.shape[1] == 5 + length
        check_stats(ours.stats, ours.sequences, 5)
        ends.append(ours.stats.drafted[0][-1])
    assert any(ends), "no length cut a path after a drafted token"
    assert not all(ends)


def test_max_length_counts_the_prompt():
    model, decoding = decoding_of()
    plain, ours = both(model, decoding, max_new_tokens=None, max_length=11, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)
    assert ours.sequences.shape[1] == 11


class StopAfter(StoppingCriteria):
    """Ends a row when a pair of tokens has come, and counts its calls."""

    def __init__(self, pair: list[int]) -> None:
        self.pair, self.lengths = pair, []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.lengths.append(input_ids.shape[1])
        return (input_ids[:, -2:] == torch.tensor(self.pair)).all(dim=1)


def test_custom_stopping_criteria_see_every_prefix():
    seed, _ = drafted_place()
    tokens = random_tokens(1, 5, seed=seed)
    model, decoding = decoding_of("grounded", "qwen3")
    free, _ = both(model, decoding, tokens, **NO_EOS)
    pair = free.sequences[0, 12:14].tolist()
    theirs, mine = StopAfter(pair), StopAfter(pair)
    plain = model.generate(tokens, max_new_tokens=24, do_sample=False, stopping_criteria=[theirs], **NO_EOS)
    ours = model.generate(
        tokens, max_new_tokens=24, do_sample=False, stopping_criteria=[mine], custom_generate=decoding, **NO_EOS
    )
    assert torch.equal(ours, plain)
    assert ours.shape[1] <= 14
    assert mine.lengths == theirs.lengths


@functools.cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of one token a letter."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<s>": 2, **{chr(ord("a") + i): 3 + i for i in range(VOCAB - 3)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<pad>"
    )


def test_stop_strings_through_the_full_entry():
    seed, _ = drafted_place()
    tokens = random_tokens(1, 5, seed=seed)
    model, decoding = decoding_of("grounded", "qwen3")
    options = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": [0, 1, 2], **NO_EOS}
    tokenizer = letters()
    text = tokenizer.decode(model.generate(tokens, **options)[0, 5:])
    assert len(text) == 24
    stop = [text[7:10], "zzzz"]
    plain = model.generate(tokens, stop_strings=stop, tokenizer=tokenizer, **options)
    ours = heads.generate(model, decoding, inputs=tokens, stop_strings=stop, tokenizer=tokenizer, **options)
    assert torch.equal(ours, plain)
    assert plain.shape[1] < 5 + 24, "the stop string did stop"
    nothing = heads.generate(model, None, inputs=tokens, stop_strings=stop, tokenizer=tokenizer, **options)
    assert torch.equal(nothing, plain), "decoding=None is plain generate"
    config = GenerationConfig(stop_strings=stop, **options)
    ours = heads.generate(model, decoding, inputs=tokens, generation_config=config, tokenizer=tokenizer)
    assert torch.equal(ours, plain)
    assert config.stop_strings == stop, "the caller's config was changed"


def test_stop_strings_need_a_tokenizer():
    model, decoding = decoding_of()
    with pytest.raises(ValueError, match="without a tokenizer"):
        heads.generate(model, decoding, inputs=PROMPT, stop_strings="ab")


@pytest.mark.parametrize("given", ["config", "none"])
def test_stop_strings_of_the_models_own_configuration(given, monkeypatch):
    model, decoding = decoding_of()
    options = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": [0, 1, 2], **NO_EOS}
    tokenizer = letters()
    text = tokenizer.decode(model.generate(PROMPT, **options)[0, 5:])
    monkeypatch.setattr(model.generation_config, "stop_strings", [text[7:10]])
    asked = {"generation_config": GenerationConfig(**options)} if given == "config" else options
    plain = model.generate(PROMPT, tokenizer=tokenizer, **asked)
    assert plain.shape[1] < 5 + 24, "the stop string did stop"
    assert torch.equal(heads.generate(model, decoding, inputs=PROMPT, tokenizer=tokenizer, **asked), plain)


@pytest.mark.parametrize("asked", [{"max_new_tokens": 4}, {"generation_config": GenerationConfig(max_new_tokens=4)}])
def test_the_full_entry_gives_rise_to_no_deprecation(asked, monkeypatch):
    """A configuration beside other settings is deprecated, so it is handed on only where the caller gave one."""
    said: list[str] = []
    monkeypatch.setattr(generation_utils.logger, "warning_once", lambda sentence, *_: said.append(sentence))
    model, decoding = decoding_of()
    for ours in (decoding, None):
        heads.generate(model, ours, inputs=PROMPT, **asked)
    assert said == []


# --- streaming -------------------------------------------------------------------------------------------------------


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


class Puts:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class DraftedPuts(Puts):
    def __init__(self) -> None:
        super().__init__()
        self.flags: list[list[bool]] = []

    def put_drafted(self, tokens: Tensor, drafted: list[bool]) -> None:
        self.puts.append(tokens.tolist())
        self.flags.append(drafted)


def test_a_streamer_gets_the_text_in_order():
    model, decoding = decoding_of("grounded", "qwen3")
    streamer = Puts()
    out = heads.generate(
        model, decoding, inputs=PROMPT, streamer=streamer, max_new_tokens=24, do_sample=False, **NO_EOS
    )
    assert streamer.puts[0] == PROMPT[0].tolist()
    assert flat(streamer.puts) == out[0].tolist()
    assert streamer.ended == 1
    assert any(len(put) > 1 for put in streamer.puts[1:]), "a pass's tokens come in one put"


def test_a_streamer_that_asks_is_told_what_was_drafted():
    model, decoding = decoding_of("grounded", "qwen3")
    streamer = DraftedPuts()
    out = heads.generate(
        model,
        decoding,
        inputs=PROMPT,
        streamer=streamer,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
        **NO_EOS,
    )
    assert flat(streamer.puts) == out.sequences[0].tolist()
    assert [len(flags) for flags in streamer.flags] == [len(put) for put in streamer.puts[1:]]
    assert flat(streamer.flags) == out.stats.drafted[0]
    assert all(flags == sorted(flags, reverse=True) for flags in streamer.flags), "drafted tokens come first"


def test_the_text_streamer_of_transformers(capsys):
    model, decoding = decoding_of("grounded", "qwen3")
    options = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": [0, 1, 2], **NO_EOS}
    out = heads.generate(model, decoding, inputs=PROMPT, streamer=TextStreamer(letters(), skip_prompt=True), **options)
    assert capsys.readouterr().out.strip() == letters().decode(out[0, 5:])


# --- processors ------------------------------------------------------------------------------------------------------

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(3, 20)), "pad_token_id": PAD},
    "min_length": {"min_length": 12, "eos_token_id": list(range(3, 20)), "pad_token_id": PAD},
    "bad_words": {"bad_words_ids": [[5], [8, 8], [3, 8], [24, 24], [12, 12]]},
    "suppress_tokens": {"suppress_tokens": [3, 8, 24, 14, 11]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 20))},
    "sequence_bias": {"sequence_bias": [[[4], 3.0], [[3, 8], -4.0]]},
    "exponential_decay": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": EOS, "pad_token_id": PAD},
    "forced_eos": {"forced_eos_token_id": 7, "eos_token_id": 7, "pad_token_id": PAD},
    "several": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [8],
        "renormalize_logits": True,
    },
}


@functools.cache
def text_without_processors(name: str, eos: int | tuple[int, ...] | None) -> list[int]:
    model, _ = decoding_of("grounded", name)
    eos = list(eos) if isinstance(eos, tuple) else eos
    return model.generate(PROMPT, max_new_tokens=24, do_sample=False, eos_token_id=eos, pad_token_id=PAD)[0].tolist()


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("processor", PROCESSORS)
def test_processors_see_each_nodes_own_prefix(processor, lookup):
    changed = 0
    for name in ("llama", "qwen3", "codegen"):
        model, decoding = decoding_of("grounded", name, lookup=lookup)
        options = {**NO_EOS, **PROCESSORS[processor]}
        plain, ours = both(model, decoding, **options)
        assert torch.equal(ours.sequences, plain.sequences)
        check_stats(ours.stats, ours.sequences, PROMPT.shape[1])
        eos = options["eos_token_id"]
        without = text_without_processors(name, tuple(eos) if isinstance(eos, list) else eos)
        changed += without != plain.sequences[0].tolist()
    assert changed, "the processor changed no text, so the equality shows nothing"


class LengthsSeen(LogitsProcessor):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append((input_ids.shape[1], int(input_ids[0, -1])))
        assert scores.dtype == torch.float32
        return scores


def test_custom_processors_are_called_once_a_token_in_order():
    model, decoding = decoding_of("grounded", "qwen3")
    theirs, mine = LengthsSeen(), LengthsSeen()
    options = {"max_new_tokens": 24, "do_sample": False, **NO_EOS}
    model.generate(PROMPT, logits_processor=LogitsProcessorList([theirs]), **options)
    model.generate(PROMPT, logits_processor=LogitsProcessorList([mine]), custom_generate=decoding, **options)
    assert mine.seen == theirs.seen


def test_processors_in_a_padded_batch():
    model, decoding = decoding_of("grounded", "qwen3")
    tokens, mask = left_padded([random_tokens(n, seed=80 + n).tolist() for n in (3, 8, 5)])
    # The repetition penalty is told each row's padding, so a row's penalty differs from that of a batch of one.
    options = {"attention_mask": mask, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3}
    plain, ours = both(model, decoding, tokens, **options, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)
    unpadded = random_tokens(2, 5, seed=83)
    plain, ours = both(model, decoding, unpadded, repetition_penalty=1.4, **NO_EOS)
    assert torch.equal(ours.sequences, plain.sequences)


@pytest.mark.parametrize("processor", ["repetition_penalty", "bad_words"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_are_generates(processor, do_sample):
    model, decoding = decoding_of("grounded", "qwen3")
    plain, ours = both(
        model,
        decoding,
        output_scores=True,
        output_logits=True,
        do_sample=do_sample,
        **NO_EOS,
        **PROCESSORS[processor],
    )
    assert torch.equal(ours.sequences, plain.sequences)
    assert len(ours.scores) == len(ours.logits) == 24
    for mine, theirs in ((ours.scores, plain.scores), (ours.logits, plain.logits)):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype == torch.float32
            # float64 logits that agree to 1e-14 and are then rounded to float32: one unit in the last place.
            torch.testing.assert_close(a, b, atol=2e-6, rtol=0.0)


class WritesInPlace(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ::2] = -float("inf")
        return scores


def test_logits_stay_raw_where_a_processor_writes_in_place():
    model, decoding = decoding_of()
    _, ours = both(model, decoding, output_logits=True, logits_processor=[WritesInPlace()], **NO_EOS)
    assert all(logits.isfinite().all() for logits in ours.logits)
    assert (ours.sequences[0, 5:] % 2 == 1).all()


def test_only_what_is_asked_for_is_returned():
    model, decoding = decoding_of()
    _, ours = both(model, decoding, output_logits=True, **NO_EOS)
    assert ours.scores is None
    assert len(ours.logits) == 24
    _, ours = both(model, decoding, **NO_EOS)
    assert ours.scores is None
    assert ours.logits is None
    assert list(ours.keys()) == ["sequences"]
    bare = model.generate(PROMPT, custom_generate=decoding, max_new_tokens=24, do_sample=False, **NO_EOS)
    assert torch.equal(bare, ours.sequences)


# --- sampling --------------------------------------------------------------------------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "temperature": 1.3},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "epsilon": {"epsilon_cutoff": 0.02},
    "all": {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2},
}


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_sampling_makes_generates_draws(family, sampling, lookup):
    """From the same seed the decoder makes the same multinomial calls in the same order, so texts are equal."""
    accepted = 0
    for name, tokens in (("qwen3", PROMPT), ("codegen", random_tokens(1, 5, seed=51))):
        model, decoding = decoding_of(family, name, lookup=lookup)
        options = {"top_k": 0, **SAMPLING[sampling], **NO_EOS}
        plain, ours = both(model, decoding, tokens, do_sample=True, **options)
        assert torch.equal(ours.sequences, plain.sequences)
        check_stats(ours.stats, ours.sequences, tokens.shape[1])
        accepted += sum(ours.stats.accepted_per_depth)
    assert accepted > 0, "nothing drafted was accepted"


@functools.cache
def five_tokens() -> Any:
    return tiny_model("llama", attn="sdpa", seed=3, vocab_size=5, pad_token_id=None)


@WITH_AND_WITHOUT_LOOKUP
@pytest.mark.parametrize("family", ["medusa", "own_output"])
def test_sampled_pairs_follow_the_backbones_distribution(family, lookup):
    """Chi-square of (x_2, x_3) against exact enumeration: both come out of one tree pass after the prompt's."""
    model = five_tokens()
    token_heads = make_heads(family, Backbone(model), num_heads=2)
    generator = torch.Generator().manual_seed(5)
    tree = [[0], [0, 0], [0, 1], [1], [2], [2, 0]]
    decoding = heads.TreeDecoding(token_heads, tree, generator=generator, lookup=lookup)
    prompt, temperature, draws = torch.tensor([[1, 4, 2]]), 2.0, 1500
    out = model.generate(
        prompt,
        custom_generate=decoding,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=3,
        num_return_sequences=draws,
        return_dict_in_generate=True,
        **NO_EOS,
    )
    found = torch.bincount(out.sequences[:, 4] * 5 + out.sequences[:, 5], minlength=25).double()
    assert min(out.stats.accepted_per_depth[:2]) > 0, "both depths were accepted at times"

    texts = torch.cartesian_prod(*[torch.arange(5)] * 3)
    with torch.no_grad():
        logits = model(input_ids=torch.cat([prompt.expand(125, 3), texts], dim=1), use_cache=False).logits
    log_p = torch.log_softmax(logits[:, 2:5] / temperature, dim=-1).gather(2, texts[:, :, None]).sum(dim=(1, 2))
    wanted = torch.zeros(25, dtype=torch.float64).index_add_(0, texts[:, 1] * 5 + texts[:, 2], log_p.exp()) * draws
    assert float(wanted.sum()) == pytest.approx(draws, rel=1e-6)  # float64 sums, norms in float32

    frequent = wanted >= 5  # rarer cells are put together, as the test asks for
    cells = [*zip(found[frequent], wanted[frequent], strict=True), (found[~frequent].sum(), wanted[~frequent].sum())]
    chi_square = float(sum((f - w) ** 2 / w for f, w in cells if w > 0))
    # 24 degrees of freedom at most: 51.2 is exceeded by chance once in a thousand seeds, and the seed is fixed.
    assert chi_square < 51.2


def test_a_generator_makes_sampling_repeatable():
    token_heads = fitted_heads("grounded", "qwen3")
    model = token_heads.backbone.model
    texts = []
    for seed in (1, 1, 2):
        decoding = heads.TreeDecoding(token_heads, TREE, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(len(texts))  # the global source must not matter
        texts.append(
            model.generate(
                PROMPT, custom_generate=decoding, do_sample=True, temperature=1.5, top_k=0, max_new_tokens=20, **NO_EOS
            )
        )
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_several_sequences_for_a_prompt():
    model, decoding = decoding_of("kv", "qwen3")
    options = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3, "top_k": 0, **NO_EOS}
    tokens, mask = left_padded([random_tokens(n, seed=90 + n).tolist() for n in (3, 6)])
    torch.manual_seed(1)
    out = model.generate(tokens, attention_mask=mask, temperature=1.5, custom_generate=decoding, **options)
    assert out.shape == (6, 18)
    assert torch.equal(out[:, :6], tokens.repeat_interleave(3, dim=0))
    assert len({tuple(row) for row in out.tolist()}) > 2
    certain = model.generate(
        tokens, attention_mask=mask, custom_generate=decoding, **{**options, "top_k": 1}
    )  # one token to draw from: greedy
    greedy = model.generate(tokens, attention_mask=mask, max_new_tokens=12, do_sample=False, **NO_EOS)
    assert torch.equal(certain, greedy.repeat_interleave(3, dim=0))


# --- refusals --------------------------------------------------------------------------------------------------------


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
        ({"attention_mask": torch.tensor([[0, 0, 0, 0, 0]])}, "padding_side='left'"),
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
    """There generate goes on writing to rows that have ended, until all have."""
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


# --- defaults --------------------------------------------------------------------------------------------------------


def test_the_default_tree_grows_from_measured_accuracy():
    token_heads = make_heads("medusa", Backbone(shared_model("llama", "sdpa")), num_heads=3)
    typical = heads.TreeDecoding(token_heads).tree
    assert typical.num_nodes == tree_choice.default_nodes(torch.device("cpu")) == 8
    assert tree_choice.default_nodes(torch.device("cuda")) == 16
    token_heads.measured_accuracy = [[0.9, 0.01], [0.9, 0.01], [0.9, 0.01]]
    measured = heads.TreeDecoding(token_heads, 4).tree
    assert measured.paths == ((), (0,), (0, 0), (0, 0, 0))


def test_the_default_looks_up_as_many_tokens_as_it_says():
    token_heads = fitted_heads("grounded", "llama")
    assert heads.TreeDecoding(token_heads).lookup == heads.TreeDecoding(token_heads, 4).lookup == DEFAULT_LOOKUP == 10


def test_training_mode_and_gradients_stay_off():
    model, decoding = decoding_of("own_output", "llama")
    out = model.generate(PROMPT, custom_generate=decoding, max_new_tokens=4, do_sample=False, **NO_EOS)
    assert not out.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_criteria_given_as_a_list_object_are_kept():
    """`heads.generate` adds to a copy: the caller's list does not grow."""
    model, decoding = decoding_of()
    criteria = StoppingCriteriaList([StopAfter([99, 99])])
    heads.generate(
        model,
        decoding,
        inputs=PROMPT,
        stopping_criteria=criteria,
        stop_strings="zzzz",
        tokenizer=letters(),
        max_new_tokens=3,
        **NO_EOS,
    )
    assert len(criteria) == 1
