"""What a user of `DraftModelDecoding` meets: vocabularies, streams, statistics, and what is raised in one sentence."""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
import torch
from draft_runs import NO_EOS, PROMPT, SETTINGS, TOY, TOY_PROMPT, K, both, chi_square, joint, limit, noisy, shared
from tiny import VOCAB, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextStreamer

import heads


def test_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocabulary of 6 tokens and the backbone one of 29"):
        both(shared("llama"), heads.DraftModelDecoding(shared("llama", TOY)))


def test_another_tokenizer_is_refused_where_it_is_known(tmp_path):
    pair = []
    for name, letters in (("backbone", "abcdefghijklmnopqrstuvwxyzABC"), ("draft", "abcdefghijklmnopqrstuvwxyzACB")):
        vocab = {letter: i for i, letter in enumerate(letters)}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, [])))
        tokenizer.save_pretrained(tmp_path / name)
        model = tiny_model("llama")
        model.config.name_or_path = str(tmp_path / name)
        pair.append(model)
    backbone, draft_model = pair
    with pytest.raises(ValueError, match="Token 27 is 'B' to the backbone and 'C' to the draft model"):
        both(backbone, heads.DraftModelDecoding(draft_model))
    plain, ours = both(backbone, heads.DraftModelDecoding(backbone))
    assert torch.equal(ours.sequences, plain)


def with_tokenizer(model: Any, folder: Any, letters: str) -> Any:
    """A copy of the model that says that it was loaded from a folder with a tokenizer of these letters."""
    vocab = {letter: i for i, letter in enumerate(letters)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, []))).save_pretrained(folder)
    model = copy.deepcopy(model)
    model.config.name_or_path = str(folder)
    return model


@pytest.mark.parametrize("embeddings", [TOY - 1, TOY + 3])
def test_one_tokenizer_behind_padded_embeddings_is_exact(embeddings, tmp_path):
    """The backbone itself emits ids that the smaller draft model has no embedding for."""
    model = with_tokenizer(shared("llama", TOY), tmp_path / "one", "abcde")
    draft_model = with_tokenizer(shared("qwen3", embeddings), tmp_path / "two", "abcde")
    prompt = torch.tensor([TOY_PROMPT, [5, 5, 1, 4]])
    for penalty in (1.0, 1.6):
        decoding = heads.DraftModelDecoding(draft_model, k=3)
        plain, ours = both(model, decoding, prompt, repetition_penalty=penalty)
        assert torch.equal(ours.sequences, plain)
    options = SETTINGS["repetition_penalty"]
    out = model.generate(
        torch.tensor([TOY_PROMPT]).expand(1000, -1),
        custom_generate=heads.DraftModelDecoding(draft_model, k=2, generator=torch.Generator().manual_seed(3)),
        max_new_tokens=3,
        do_sample=True,
        **NO_EOS,
        **options,
    )
    found = collections.Counter(map(tuple, out[:, 4:].tolist()))
    statistic, degrees = chi_square(found, joint(model, options))
    assert statistic < limit(degrees)
    other = with_tokenizer(shared("qwen3", embeddings), tmp_path / "three", "abced")
    with pytest.raises(ValueError, match=rf"vocabulary of {embeddings} tokens and the backbone one of 6"):
        both(model, heads.DraftModelDecoding(other), prompt)


def test_sampled_text_is_exact_where_processors_leave_no_token_that_the_draft_model_has(tmp_path):
    """Behind tokens 0 and 1 only the last id may come, for which the smaller draft model has no embedding."""
    model = with_tokenizer(shared("llama", TOY), tmp_path / "one", "abcde")
    draft_model = with_tokenizer(shared("qwen3", TOY - 1), tmp_path / "two", "abcde")
    forbidden = [[before, token] for before in (0, 1) for token in range(TOY - 1)]
    options = {"bad_words_ids": forbidden, "temperature": 2.0, "top_k": 0}
    out = model.generate(
        torch.tensor([TOY_PROMPT]).expand(1000, -1),
        custom_generate=heads.DraftModelDecoding(draft_model, k=2, generator=torch.Generator().manual_seed(3)),
        max_new_tokens=3,
        do_sample=True,
        **NO_EOS,
        **options,
    )
    found = collections.Counter(map(tuple, out[:, 4:].tolist()))
    wanted = joint(model, options)
    assert set(found) <= set(wanted), "a text that the processors forbid"
    assert sum(n for text, n in found.items() if text[1] in (0, 1)) > 50, "hardly a chain that ends at nothing"
    statistic, degrees = chi_square(found, wanted)
    assert statistic < limit(degrees)


@pytest.mark.parametrize("given", ["checkpoints/demo/draft", None])
def test_what_is_no_draft_model_is_refused(given):
    with pytest.raises(ValueError, match=r"draft_model=.* was given; a causal LM is wanted"):
        heads.DraftModelDecoding(given)


class Recorder(TextStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.flags: list[list[bool]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def put_drafted(self, tokens: Tensor, drafted: list[bool]) -> None:
        self.puts.append(tokens.tolist())
        self.flags.append(drafted)

    def end(self) -> None:
        self.ended = True


def test_a_stream_and_stop_strings():
    """Text ends with the string's last token, also inside an accepted chain; each pass is put at once."""
    letters = [chr(ord("a") + i) for i in range(VOCAB)]
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    greedy = shared("llama").generate(PROMPT, max_new_tokens=24, do_sample=False, **NO_EOS)[0].tolist()
    stop = "".join(letters[token] for token in greedy[12:14])
    options = {"inputs": PROMPT, "max_new_tokens": 24, "do_sample": False, "stop_strings": stop}
    options |= {"tokenizer": PreTrainedTokenizerFast(tokenizer_object=tokenizer), **NO_EOS}
    streamer = Recorder()
    plain = heads.generate(shared("llama"), None, **options)
    decoding = heads.DraftModelDecoding(shared("llama"), k=5)
    ours = heads.generate(shared("llama"), decoding, streamer=streamer, **options)
    assert plain.shape[1] < PROMPT.shape[1] + 24
    assert torch.equal(ours, plain)
    assert [token for put in streamer.puts for token in put] == ours[0].tolist()
    assert streamer.flags[1] == [True] * 5 + [False]
    assert streamer.ended


def test_statistics_agree_with_the_text():
    _, ours = both(shared("llama"), heads.DraftModelDecoding(noisy("llama"), k=K), max_new_tokens=40)
    stats = ours.stats
    assert stats.tokens == 40 == len(stats.drafted[0])
    assert sum(stats.drafted[0]) == sum(stats.accepted_per_depth)
    assert len(stats.accepted_per_depth) == K
    assert all(stats.seconds[phase] > 0 for phase in ("prefill", "draft", "verify", "accept", "commit"))


def test_one_decoding_may_be_used_on_two_models():
    decoding = heads.DraftModelDecoding(noisy("llama"), k=K)
    for name in ("llama", "qwen3", "llama"):
        plain, ours = both(shared(name), decoding)
        assert torch.equal(ours.sequences, plain)


def test_an_end_token_inside_a_chain_ends_the_text():
    greedy = shared("llama").generate(PROMPT, max_new_tokens=24, do_sample=False, **NO_EOS)[0].tolist()
    end = greedy[10]
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(shared("llama"), k=7), eos_token_id=end)
    assert torch.equal(ours.sequences, plain)
    assert plain.shape[1] < PROMPT.shape[1] + 24
