"""Speculative sampling is `generate`: greedy text equal token for token, sampled text equal in distribution.

A draft model is checked beside what it promises to be: a model that reads the whole text again before each token. Its
chains must be that model's, token for token, and its cache after a commit that of a fresh prefill. Models run in
float64, so any difference is an error. A random draft model is right once in 29 tokens; drafts that are accepted and
rejected at every depth come from the backbone itself with noise on its weights.
"""

from __future__ import annotations

import collections
import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import PAD, VOCAB, left_padded, random_tokens, shared_model, tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedTokenizerFast, TextStreamer
from transformers.generation.logits_process import LogitsProcessor

import heads
from heads.backbone import model as backbone_module
from heads.backbone.model import Backbone
from heads.decoding.proposers import draft_model as module
from heads.decoding.proposers.draft_length import DEFAULT_K, MAX_K, PROBES, AdaptiveLength, Seconds, expected_tokens
from heads.decoding.proposers.draft_model import ModelDrafter
from heads.decoding.proposers.draft_reader import DraftReader
from heads.decoding.proposers.shared_vocabulary import read_tokens

K = 4
PROMPT = random_tokens(1, 5, seed=50)
PROMPTS = [random_tokens(n, seed=90 + n).tolist() for n in (3, 9, 6)]
IN_STEP = [random_tokens(4, seed=90 + n).tolist() for n in range(3)]
"""No padding, and with chains of one token no holes: until rows differ in what they have yet to read."""
NO_EOS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": PAD}
PAIRS = [
    ("llama", "gpt_neox"),
    ("gpt_neox", "qwen3"),
    ("qwen3", "codegen"),
    ("mistral_windowed", "llama"),
    ("gemma3", "mistral_windowed"),
    ("codegen", "gemma2"),
    ("opt", "gpt2"),
]


@functools.cache
def noisy(name: str, noise: float = 0.02, vocab: int = VOCAB) -> Any:
    """The shared model with noise on its weights: right in most places, wrong in some."""
    model = copy.deepcopy(shared(name, vocab))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


@functools.cache
def shared(name: str, vocab: int = VOCAB) -> Any:
    attn = "eager" if name in ("codegen", "gemma2") else "sdpa"
    if vocab == VOCAB:
        return shared_model(name, attn)
    return tiny_model(name, attn=attn, vocab_size=vocab, bos_token_id=None)


def both(model: Any, decoding: Any, tokens: Tensor = PROMPT, **options: Any) -> tuple[Tensor, Any]:
    """What `generate` gives, and what it gives with the decoding."""
    options = {"do_sample": False, "max_new_tokens": 24, **NO_EOS, **options}
    plain = model.generate(tokens, **options)
    return plain, model.generate(tokens, custom_generate=decoding, return_dict_in_generate=True, **options)


# --- greedy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_greedy_text_is_generates_whatever_drafts(name, draft):
    for draft_model in (shared(draft), noisy(name)):
        plain, ours = both(shared(name), heads.DraftModelDecoding(draft_model, k=K))
        assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 1.2, "the noisy copy is right too seldom: the equality shows too little"


@pytest.mark.parametrize("name", ["llama", "gemma3", "codegen"])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_a_draft_model_that_is_the_backbone_is_always_right(name, k):
    """One prefill that emits one token, then k + 1 tokens from each pass."""
    plain, ours = both(shared(name), heads.DraftModelDecoding(shared(name), k=k), max_new_tokens=1 + 3 * (k + 1))
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.passes == 1 + 3
    assert ours.stats.accepted_per_depth == [3] * k


def test_drafts_are_rejected_and_accepted_at_every_depth():
    counts: collections.Counter[int] = collections.Counter()
    decoding = heads.DraftModelDecoding(noisy("llama"), k=K)
    for seed in range(6):
        plain, ours = both(shared("llama"), decoding, random_tokens(1, 4, seed=seed), max_new_tokens=40)
        assert torch.equal(ours.sequences, plain)
        per_pass = "".join("d" if drafted else "o" for drafted in ours.stats.drafted[0][1:]).split("o")
        counts.update(len(run) for run in per_pass[:-1])
    assert set(counts) == set(range(K + 1)), f"accepted {counts}"


@pytest.mark.parametrize("name", ["llama", "mistral_windowed", "codegen"])
def test_a_ragged_batch_with_padding(name):
    tokens, mask = left_padded(PROMPTS)
    plain, ours = both(
        shared(name), heads.DraftModelDecoding(noisy(name), k=K), tokens, attention_mask=mask, max_new_tokens=30
    )
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 1.2


@pytest.mark.parametrize("name", ["llama", "mistral_windowed"])
def test_a_prompt_that_is_read_in_chunks(name, monkeypatch):
    """The draft model reads every chunk: were one left out, a draft that is the backbone would not always be right."""
    monkeypatch.setattr(backbone_module, "PREFILL_TOKENS", 4)
    plain, ours = both(
        shared(name), heads.DraftModelDecoding(shared(name), k=2), random_tokens(1, 11, seed=3), max_new_tokens=22
    )
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.accepted_per_depth == [7, 7]
    tokens, mask = left_padded(PROMPTS)
    plain, ours = both(shared(name), heads.DraftModelDecoding(noisy(name), k=K), tokens, attention_mask=mask)
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 1.2


@pytest.mark.parametrize("name", ["/nonexistent/dir/model", "some/thing/else"])
def test_a_folder_that_has_moved_leaves_tokens_unknown(name):
    backbone = Backbone(tiny_model("llama"))
    backbone.config._name_or_path = name
    assert read_tokens(backbone) == {}


def test_rows_that_end_early_leave():
    tokens, mask = left_padded(PROMPTS)
    greedy = shared("llama").generate(tokens, attention_mask=mask, max_new_tokens=30, do_sample=False, **NO_EOS)
    ends = {"eos_token_id": [int(greedy[0, 12]), int(greedy[1, 20])], "pad_token_id": PAD}
    plain, ours = both(
        shared("llama"), heads.DraftModelDecoding(noisy("llama"), k=K), tokens, attention_mask=mask, **ends
    )
    assert torch.equal(ours.sequences, plain)
    assert len({len(row) for row in ours.stats.drafted}) > 1, "all rows ended together"


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 5, 6])
def test_short_texts_end_where_they_should(new_tokens):
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(shared("llama"), k=K), max_new_tokens=new_tokens)
    assert torch.equal(ours.sequences, plain)


def test_positions_that_the_draft_model_has_are_used_to_the_last():
    """A row near its end is drafted on while the others have further to go; learned positions end where they end."""
    tokens, mask = left_padded(PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 30}
    draft_model = tiny_model("gpt2", attn="sdpa", n_positions=38)
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(draft_model, k=K), tokens, **options)
    assert torch.equal(ours.sequences, plain)
    too_short = tiny_model("gpt2", attn="sdpa", n_positions=37)
    with pytest.raises(ValueError, match="grow to 39 tokens, of which the draft model reads 38, but it has 37"):
        both(shared("llama"), heads.DraftModelDecoding(too_short, k=K), tokens, **options)


def test_a_repetition_penalty_is_drafted_with_too():
    """Without it the drafts would be those of another text: with the backbone as its draft model all are accepted."""
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(shared("llama"), k=K), repetition_penalty=1.8)
    assert torch.equal(ours.sequences, plain)
    assert not torch.equal(plain, shared("llama").generate(PROMPT, max_new_tokens=24, do_sample=False, **NO_EOS))
    assert ours.stats.accepted_per_depth[0] == ours.stats.row_passes - 1


class Counting(LogitsProcessor):
    """Forbids a token at every third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_fill(1, scores.argmax(dim=1), -torch.inf) if self.calls % 3 == 0 else scores


def test_a_processor_with_state_is_called_once_for_each_emitted_token():
    options = {"do_sample": False, "max_new_tokens": 20, **NO_EOS}
    plain = shared("llama").generate(PROMPT, logits_processor=LogitsProcessorList([Counting()]), **options)
    decoding, counting = heads.DraftModelDecoding(noisy("llama"), k=K), Counting()
    ours = shared("llama").generate(
        PROMPT, logits_processor=LogitsProcessorList([counting]), custom_generate=decoding, **options
    )
    assert torch.equal(ours, plain)
    assert counting.calls == 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_model_in_another_dtype(dtype):
    draft_model = copy.deepcopy(shared("llama")).to(dtype)
    plain, ours = both(shared("llama"), heads.DraftModelDecoding(draft_model, k=K))
    assert torch.equal(ours.sequences, plain)
    assert ours.stats.tokens_per_pass > 2


# --- the draft model's cache beside its plain reference ---------------------------------------------------------------


def best_chain(model: Any, tokens: list[int], k: int) -> list[int]:
    """The plain reference: read the whole text again for each token."""
    text = list(tokens)
    with torch.no_grad():
        for _ in range(k):
            text.append(int(model(torch.tensor([text])).logits[0, -1].float().argmax()))
    return text[len(tokens) :]


def real_tokens(row: Any, prompt: list[int], num_prompt_slots: int) -> list[int]:
    """A row's tokens without its padding."""
    return prompt + row.tokens[num_prompt_slots:]


def check_cache(reader: DraftReader, model: Any, b: int, tokens: list[int]) -> None:
    """A row's kept slots hold what a fresh prefill of the same tokens gives, at the same positions.

    CodeGen attends in float32 whatever its weights are; another token or position would be off by tenths.
    """
    close = 1e-5 if "CodeGen" in type(model).__name__ else 1e-9
    held = reader.committed.valid_BS[b]
    assert int(held.sum()) == len(tokens) == int(reader.committed.next_position_B[b])
    assert reader.committed.positions_BS[b, held].tolist() == list(range(len(tokens)))
    everything = torch.ones(1, len(tokens), dtype=torch.bool)
    fresh, _ = Backbone(model, check_projection=False).prefill(torch.tensor([tokens]), everything)
    for ours, theirs in zip(reader.committed.cache.layers, fresh.cache.layers, strict=True):
        assert ours.length == reader.committed.valid_BS.shape[1]
        for ours_BHSD, theirs_BHSD in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            mine_HSD = ours_BHSD[b, :, : ours.length][:, held]
            torch.testing.assert_close(mine_HSD, theirs_BHSD[0, :, : len(tokens)], rtol=close, atol=close)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mistral_windowed", "gemma3", "codegen"])
@pytest.mark.parametrize(
    ("prompts", "k"), [(PROMPTS[:1], 2), (PROMPTS, 2), (IN_STEP, 1)], ids=["one_row", "ragged", "in_step"]
)
@torch.no_grad()
def test_chains_and_cache_are_those_of_a_model_that_reads_everything_again(name, prompts, k, monkeypatch):
    """Before each pass: what was kept, what is left to read, and then the chain itself."""
    draft_model, plain_propose, checked = noisy(name), ModelDrafter.propose, collections.Counter[int]()
    tokens, mask = left_padded(prompts)

    def checking_propose(self, rows):
        for b, row in enumerate(rows):
            text = real_tokens(row, prompts[row.index], tokens.shape[1])
            unread = len(row.tokens) - self.num_read[b]
            check_cache(self.reader, draft_model, b, text[: len(text) - unread])
            checked[unread] += 1
        proposal = plain_propose(self, rows)
        for b, row in enumerate(rows):
            text = real_tokens(row, prompts[row.index], tokens.shape[1])
            assert proposal.tokens_BN[b].tolist() == [row.tokens[-1], *best_chain(draft_model, text, self.k)]
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", checking_propose)
    shared(name).generate(
        tokens,
        attention_mask=mask,
        custom_generate=heads.DraftModelDecoding(draft_model, k=k),
        max_new_tokens=30,
        do_sample=False,
        **NO_EOS,
    )
    assert set(checked) == {1, 2}, f"tokens left to read: {checked}; after a whole chain there are 2, else 1"


def test_a_solid_row_is_read_without_masks_and_a_ragged_batch_with(monkeypatch):
    masked = collections.Counter[bool]()
    plain_forward = Backbone.forward

    def counting_forward(self, tokens_BT, **inputs):
        if self.model is noisy("llama") and tokens_BT.shape[1] == 1:
            masked[inputs["attention_mask"] is not None] += 1
        return plain_forward(self, tokens_BT, **inputs)

    monkeypatch.setattr(Backbone, "forward", counting_forward)
    both(shared("llama"), heads.DraftModelDecoding(noisy("llama"), k=K))
    assert masked[False]
    assert not masked[True]
    tokens, mask = left_padded(PROMPTS)
    masked.clear()
    both(shared("llama"), heads.DraftModelDecoding(noisy("llama"), k=K), tokens, attention_mask=mask)
    assert masked[True]


# --- sampling --------------------------------------------------------------------------------------------------------

TOY = 6
TOY_PROMPT = [2, 4, 3, 5]
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.7, "top_k": 0},
    "top_k": {"top_k": 3, "temperature": 2.0},
    "top_p": {"top_p": 0.8, "top_k": 0, "temperature": 2.5},
    "min_p": {"min_p": 0.1, "top_k": 0, "temperature": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.6, "top_k": 0, "temperature": 2.0},
}


@torch.no_grad()
def joint(model: Any, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The processed distribution of the next three tokens, by plain enumeration."""
    config = copy.deepcopy(model.generation_config)
    config.update(**options, do_sample=True)
    config._eos_token_tensor = None  # as generate leaves it without an end token
    processors = model._get_logits_processor(config, input_ids_seq_length=4, device="cpu")
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for ahead, probability in probabilities.items():
            text_1L = torch.tensor([[*TOY_PROMPT, *ahead]])
            scores_1V = processors(text_1L, model(text_1L).logits[:, -1].float())
            for token, p in enumerate(torch.softmax(scores_1V.double(), dim=-1)[0].tolist()):
                if p > 0:
                    longer[*ahead, token] = probability * p
        probabilities = longer
    return probabilities


def chi_square(found: collections.Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """The statistic over cells of at least 5 expected draws, the others together; and the degrees of freedom."""
    draws = sum(found.values())
    frequent = [text for text, p in wanted.items() if p * draws >= 5]
    statistic = sum((found[text] - wanted[text] * draws) ** 2 / (wanted[text] * draws) for text in frequent)
    rest = draws - sum(wanted[text] for text in frequent) * draws
    statistic += (draws - sum(found[text] for text in frequent) - rest) ** 2 / max(rest, 1.0)
    return statistic, len(frequent)


def limit(degrees: int, z: float = 3.3) -> float:
    """Wilson and Hilferty's approximation of the chi-square value that is passed once in two thousand times."""
    return degrees * (1 - 2 / (9 * degrees) + z * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_text_has_the_backbones_distribution(setting):
    """Three tokens in many rows: the prompt's pass gives the first, drafts or residuals the others."""
    model, draft_model, options = shared("llama", TOY), noisy("llama", 0.3, TOY), SETTINGS[setting]
    decoding = heads.DraftModelDecoding(draft_model, k=2, generator=torch.Generator().manual_seed(3))
    rows = torch.tensor([TOY_PROMPT]).expand(1000, -1)
    out = model.generate(
        rows,
        custom_generate=decoding,
        max_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
        **NO_EOS,
        **options,
    )
    found = collections.Counter(map(tuple, out.sequences[:, 4:].tolist()))
    wanted = joint(model, options)
    assert set(found) <= set(wanted), "a text that the processors forbid"
    statistic, degrees = chi_square(found, wanted)
    assert statistic < limit(degrees), setting
    drafts, degrees_of_drafts = chi_square(found, joint(draft_model, options))
    assert drafts > 2 * limit(degrees_of_drafts), "the draft model's own distribution would have passed too"
    judged = out.stats.row_passes - len(rows)
    assert 0.1 * judged < out.stats.accepted_per_depth[0] < 0.95 * judged, "both branches are to be taken often"


def test_drafts_are_accepted_as_often_as_the_distributions_overlap():
    """P(accepted) is Σ min(p, q): the backbone's and the draft model's distributions after the same first token."""
    model, draft_model = shared("llama", TOY), noisy("llama", 0.3, TOY)
    options = {"temperature": 2.0, "top_k": 0}
    overlap = 0.0
    p, q = joint(model, options), joint(draft_model, options)
    first = {a: sum(v for text, v in p.items() if text[0] == a) for a in range(TOY)}
    for a in range(TOY):
        for b in range(TOY):
            p_ab, q_ab = (
                sum(v for text, v in j.items() if text[:2] == (a, b)) / sum(v for text, v in j.items() if text[0] == a)
                for j in (p, q)
            )
            overlap += first[a] * min(p_ab, q_ab)
    rows = torch.tensor([TOY_PROMPT]).expand(2000, -1)
    decoding = heads.DraftModelDecoding(draft_model, k=1, generator=torch.Generator().manual_seed(5))
    stats = model.generate(
        rows,
        custom_generate=decoding,
        max_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
        **NO_EOS,
        **options,
    ).stats
    after_first = sum(row[1] for row in stats.drafted) / len(rows)
    assert after_first == pytest.approx(overlap, abs=4 * (overlap * (1 - overlap) / len(rows)) ** 0.5)


def test_a_draft_model_that_is_the_backbone_is_always_right_in_sampling_too():
    out = shared("llama").generate(
        PROMPT,
        custom_generate=heads.DraftModelDecoding(shared("llama"), k=3, generator=torch.Generator().manual_seed(0)),
        max_new_tokens=21,
        do_sample=True,
        temperature=1.5,
        top_k=10,
        return_dict_in_generate=True,
        **NO_EOS,
    )
    assert out.stats.accepted_per_depth == [5, 5, 5]


def test_a_generator_repeats_the_text():
    texts = [
        shared("llama").generate(
            PROMPT,
            custom_generate=heads.DraftModelDecoding(noisy("llama"), generator=torch.Generator().manual_seed(seed)),
            max_new_tokens=20,
            do_sample=True,
            temperature=1.5,
            **NO_EOS,
        )
        for seed in (1, 1, 2)
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


# --- length ----------------------------------------------------------------------------------------------------------


def test_expected_tokens_by_hand():
    assert expected_tokens(0.5, 3) == 1 + 0.5 + 0.25 + 0.125 == (1 - 0.5**4) / (1 - 0.5)


def test_the_best_length_by_hand():
    """Draft tokens of 1 s, passes of 4 + k seconds, α = 1/2: E / S is 1.5/6, 1.75/8, 1.875/10, …: one token pays best.

    Passes that take 20 s whatever their length: 1.5/21, 1.75/22, 1.875/23, 1.9375/24, 1.96875/25: 0.0815 at 3.
    """
    for verify, best in ((lambda k: 4.0 + k, 1), (lambda k: 20.0, 3)):
        length = AdaptiveLength(judged=1e9, accepted=5e8)
        for k in PROBES:
            assert length.choose(2) == k
            length.compared, length.accepted = 1e9, 5e8
            length.observe(k=k, draft=1.0 * k, verify=verify(k), accepted=[0, 0], emitted=[1, 1])
        length.compared, length.accepted = 1e9, 5e8
        assert length.choose(2) == best
        assert length.choose(1) == PROBES[0], "another batch size has times of its own"


def test_alpha_counts_what_was_judged():
    """Behind a rejected token none is judged; a whole chain has no rejected one. Earlier counts fade by 2 %."""
    length = AdaptiveLength(judged=0.0, accepted=0.0)
    length.observe(k=4, draft=1.0, verify=1.0, accepted=[0, 2, 4], emitted=[1, 3, 5])
    assert (length.accepted, length.compared) == (0 + 2 + 4, 1 + 3 + 4)
    length.observe(k=4, draft=1.0, verify=1.0, accepted=[0, 0, 0], emitted=[1, 1, 1])
    assert length.alpha == pytest.approx(0.98 * 6 / (0.98 * 8 + 3), rel=1e-12)
    length.observe(k=4, draft=1.0, verify=1.0, accepted=[2], emitted=[2])  # its row ended with the second draft
    assert length.alpha == pytest.approx((0.98**2 * 6 + 2) / (0.98 * (0.98 * 8 + 3) + 2), rel=1e-12)


def test_a_row_that_ends_inside_an_accepted_chain_judged_none_behind_its_end():
    """The draft model is the backbone, so no draft is ever rejected: judged and accepted grow by the same numbers."""
    greedy = shared("llama").generate(PROMPT, max_new_tokens=24, do_sample=False, **NO_EOS)[0, PROMPT.shape[1] :]
    end = next(t for i, t in enumerate(greedy.tolist()) if i >= 3 and t not in greedy[:i].tolist())
    decoding = heads.DraftModelDecoding(shared("llama"), k="adaptive")
    length = decoding.length
    length.compared = length.accepted = 1.0
    _, ours = both(shared("llama"), decoding, eos_token_id=end)
    assert ours.stats.drafted[0][-1], "the row is to end with a drafted token"
    assert length.compared == length.accepted > 1


def test_seconds_are_a_line_and_noise_never_makes_longer_passes_cheaper():
    seconds = Seconds()
    for k, verify in ((7, 9.0), (3, 5.0), (5, 7.0)):
        seconds.observe(k=k, draft=0.5 * k, verify=verify)
    assert seconds(10) == pytest.approx(0.5 * 10 + 2 + 10, rel=1e-9)
    falling = Seconds()
    for k, verify in ((7, 5.0), (3, 9.0)):
        falling.observe(k=k, draft=0.5 * k, verify=verify)
    assert falling(16) - falling(1) == pytest.approx(0.5 * 15, rel=1e-9)


def test_an_adaptive_length_writes_the_same_text_in_other_chains(monkeypatch):
    """Time is a script here: drafts that cost nearly nothing beside passes, then drafts that cost as much as passes."""
    longest = {}
    for case, per_draft in (("cheap", 0.001), ("dear", 1.0)):
        now, lengths = [0.0], []
        decoding = heads.DraftModelDecoding(noisy("llama"), k="adaptive")
        plain_propose = ModelDrafter.propose

        def timed_propose(self, rows, plain=plain_propose, now=now, lengths=lengths, per_draft=per_draft):
            before = now[0]
            proposal = plain(self, rows)
            lengths.append(self.k)
            self.draft_seconds = per_draft * self.k
            self.proposed_at = before
            now[0] = before + 1.0  # a pass takes a second whatever its length
            return proposal

        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda now=now: now[0]))
        monkeypatch.setattr(ModelDrafter, "propose", timed_propose)
        plain, ours = both(shared("llama"), decoding, max_new_tokens=80)
        monkeypatch.undo()
        assert torch.equal(ours.sequences, plain)
        assert lengths[: len(PROBES)] == list(PROBES)
        longest[case] = max(lengths[len(PROBES) :])
    assert longest["dear"] < DEFAULT_K < longest["cheap"] <= MAX_K


@pytest.mark.parametrize("k", [0, 17, -1, 2.0, True, "all"])
def test_a_length_out_of_range_is_refused(k):
    with pytest.raises(ValueError, match='allowed are 1 to 16 drafted tokens, or "adaptive"'):
        heads.DraftModelDecoding(shared("llama"), k=k)


# --- what users meet -------------------------------------------------------------------------------------------------


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
        model.config._name_or_path = str(tmp_path / name)
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
    model.config._name_or_path = str(folder)
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
