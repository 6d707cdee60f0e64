"""`heads.generate` and where a text ends: end tokens, lengths, stopping criteria, stop strings and streamers."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

import pytest
import torch
from streamers import DraftedPuts, Puts
from tiny import EOS, PAD, VOCAB, random_tokens
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation import utils as generation_utils
from tree_runs import NO_EOS, PROMPT, both, check_stats, decoding_of

import heads


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


@pytest.mark.parametrize("by", ["heads.generate", "model.generate"])
def test_an_assistant_model_beside_a_decoding_method_is_refused(by):
    model, decoding = decoding_of("grounded", "qwen3")
    ways = {
        "heads.generate": lambda: heads.generate(model, decoding, inputs=PROMPT, assistant_model=model),
        "model.generate": lambda: model.generate(PROMPT, custom_generate=decoding, assistant_model=model),
    }
    with pytest.raises(ValueError, match="assistant_model was given beside TreeDecoding, which drafts itself"):
        ways[by]()


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


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


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


def in_functions(method: Any, depth: int) -> Any:
    """A decoding method as the innermost of some functions."""

    def around(*args: Any, **kwargs: Any) -> Any:
        return in_functions(method, depth - 1)(*args, **kwargs)

    return around if depth else method


@pytest.mark.parametrize("functions", [0, 1, 3])
def test_model_generate_gives_its_streamer_too(functions):
    """Without it a TextIteratorStreamer waits for ever: generate hands a callable no streamer."""
    model, decoding = decoding_of("grounded", "qwen3")
    decoding = in_functions(decoding, functions)
    options = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": [0, 1, 2], **NO_EOS}
    streamer = TextIteratorStreamer(letters(), skip_prompt=True, timeout=60)
    found = []
    asked = {"inputs": PROMPT, "custom_generate": decoding, "streamer": streamer, **options}
    thread = threading.Thread(target=lambda: found.append(model.generate(**asked)))
    thread.start()
    said = "".join(streamer)
    thread.join()
    assert said.strip() == letters().decode(found[0][0, 5:])


def test_a_function_around_a_method_gets_the_streamer_by_name():
    model, decoding = decoding_of("grounded", "qwen3")
    streamer = Puts()

    def around(*args, **kwargs):
        return decoding(*args, streamer=streamer, **kwargs)

    out = model.generate(PROMPT, custom_generate=around, max_new_tokens=8, do_sample=False, **NO_EOS)
    assert flat(streamer.puts) == out[0, 5:].tolist()
    assert streamer.ended == 1


def test_a_function_around_a_method_hides_no_assistant_model():
    model, decoding = decoding_of("grounded", "qwen3")
    with pytest.raises(ValueError, match="assistant_model was given beside TreeDecoding"):
        model.generate(PROMPT, custom_generate=in_functions(decoding, 1), assistant_model=model, **NO_EOS)


def test_the_streamer_is_that_of_the_nearest_generate():
    model, decoding = decoding_of("grounded", "qwen3")
    outer, inner = Puts(), Puts()

    def within(*args, **kwargs):
        return heads.generate(model, decoding, inputs=args[1], streamer=inner, **asked)

    asked = {"max_new_tokens": 8, "do_sample": False, **NO_EOS}
    out = model.generate(PROMPT, custom_generate=within, streamer=outer, **asked)
    assert flat(inner.puts) == out[0].tolist()
    assert flat(outer.puts) == PROMPT[0].tolist()


def test_the_text_streamer_of_transformers(capsys):
    model, decoding = decoding_of("grounded", "qwen3")
    options = {"max_new_tokens": 24, "do_sample": False, "suppress_tokens": [0, 1, 2], **NO_EOS}
    out = heads.generate(model, decoding, inputs=PROMPT, streamer=TextStreamer(letters(), skip_prompt=True), **options)
    assert capsys.readouterr().out.strip() == letters().decode(out[0, 5:])
