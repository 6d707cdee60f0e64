"""The figures of superposed decoding's measurement, against what a plain loop or a hand calculates."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from tiny import tiny_model

from benchmarks.paper.superposed import bench as bench_module
from benchmarks.paper.superposed.bench import WINDOW, Plan, SuperposedBench, windows_of
from benchmarks.paper.superposed.claims import Claim, ratio
from benchmarks.paper.superposed.facts import SHIPPED, is_right, precision_at, read_facts
from benchmarks.paper.superposed.linearity import BEAMS, cosines
from benchmarks.paper.superposed.methods import ngrams_alone
from benchmarks.paper.superposed.rankings import lists_of, wins
from benchmarks.paper.superposed.scores import SKIPPED, perplexities, self_bleu, text_perplexities, unique_ngrams
from heads.decoding.superposed.step import PAPER_WEIGHTS
from heads.ngrams.counting import count_ngrams

PREFIXES_BT = torch.tensor([[3, 4, 5], [6, 7, 8]])


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", attn="sdpa", dtype=torch.float32).eval()


def losses_one_by_one(model, tokens):
    """-log p of each token but the first, each by a pass of its own."""
    with torch.no_grad():
        logits = [model(torch.tensor([tokens[:i]])).logits[0, -1] for i in range(1, len(tokens))]
    return [float(-row.log_softmax(-1)[token]) for row, token in zip(logits, tokens[1:], strict=True)]


def test_perplexity_is_of_a_draft_s_own_tokens_up_to_its_end(model):
    end = model.generation_config.eos_token_id = 0
    drafts_BKN = torch.tensor([[[9, 10, 11], [12, end, end]], [[9, 9, 9], [13, 14, end]]])
    found_BK = perplexities(model, PREFIXES_BT, drafts_BKN)
    own = {(0, 0): [9, 10, 11], (0, 1): [12, end], (1, 0): [9, 9, 9], (1, 1): [13, 14, end]}
    for (row, draft), tokens in own.items():
        losses = losses_one_by_one(model, PREFIXES_BT[row].tolist() + tokens)[-len(tokens) :]
        assert found_BK[row, draft] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


class Letters:
    """A tokenizer that gives each letter a token."""

    def __call__(self, texts):
        return {"input_ids": [ord(letter) - 96 for letter in texts]}


def test_another_tokenizer_s_judge_skips_the_first_five_tokens(model):
    texts = [["abcdefgh", "abcdefghij"], ["bcdefga", "zyxwvut"]]
    found_BK = text_perplexities(model, Letters(), texts)
    for row, pair in enumerate(texts):
        for draft, text in enumerate(pair):
            losses = losses_one_by_one(model, Letters()(text)["input_ids"])[SKIPPED - 1 :]
            assert found_BK[row, draft] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)


def test_n_grams_alone_take_the_likeliest_token_of_equation_5(tmp_path):
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, 6, 60).tolist() for _ in range(3)]
    table = count_ngrams(texts, folder=tmp_path / "table", order=6, vocab_size=8)
    counts = Counter(tuple(text[i : i + n]) for text in texts for n in range(1, 7) for i in range(len(text) - n + 1))

    def mixture(text, token):
        total = 0.0
        for n, weight in enumerate(PAPER_WEIGHTS, start=2):
            context = tuple(text[-(n - 1) :])
            seen = sum(counts[(*context, other)] for other in range(8)) if len(context) == n - 1 else 0
            total += weight * counts[(*context, token)] / seen if seen else 0
        return total

    found_B1N = ngrams_alone(table, PREFIXES_BT[:1], 6)
    text = PREFIXES_BT[0].tolist()
    for token in found_B1N[0, 0].tolist():
        assert mixture(text, token) == pytest.approx(max(mixture(text, other) for other in range(8)))
        text.append(token)


@torch.no_grad()
def test_cosines_are_those_of_passes_without_a_cache(model):
    steps = 3
    own_BTS, _ = cosines(model, PREFIXES_BT, steps)
    assert torch.allclose(own_BTS[..., 0], torch.ones(2, steps, dtype=torch.float64))  # embeddings are summed exactly
    prefix, embed = PREFIXES_BT[1].tolist(), model.get_input_embeddings()
    scores, first = model(torch.tensor([prefix])).logits[0, -1].log_softmax(-1).topk(BEAMS)
    beams = [([token], score) for token, score in zip(first.tolist(), scores.tolist(), strict=True)]
    mixed = []
    for step in range(steps):
        weights = torch.tensor([score for _, score in beams]).softmax(0)
        read = [model(torch.tensor([prefix + text]), output_hidden_states=True) for text, _ in beams]
        mixed.append(sum(w * embed.weight[text[-1]] for w, (text, _) in zip(weights, beams, strict=True)))
        whole = torch.cat([embed(torch.tensor(prefix)), torch.stack(mixed)])[None]
        together = model(inputs_embeds=whole, output_hidden_states=True)
        for layer in range(len(read[0].hidden_states)):
            summed = sum(w * out.hidden_states[layer][0, -1] for w, out in zip(weights, read, strict=True))
            cosine = torch.cosine_similarity(together.hidden_states[layer][0, -1], summed, dim=0)
            assert float(own_BTS[1, step, layer]) == pytest.approx(float(cosine), abs=1e-4)
        summed = sum(w * out.logits[0, -1] for w, out in zip(weights, read, strict=True))
        cosine = torch.cosine_similarity(together.logits[0, -1], summed, dim=0)
        assert float(own_BTS[1, step, -1]) == pytest.approx(float(cosine), abs=1e-4)
        grown = [
            ([*text, token], score + float(log_p))
            for (text, score), out in zip(beams, read, strict=True)
            for token, log_p in enumerate(out.logits[0, -1].log_softmax(-1))
        ]
        beams = sorted(grown, key=lambda pair: -pair[1])[:BEAMS]


def test_diversity():
    assert self_bleu([[1, 2, 3, 4, 5, 6]] * 3) == pytest.approx(1)
    assert self_bleu([[1, 2, 3, 4], [5, 6, 7, 8]]) < 0.01
    assert 0.01 < self_bleu([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6]]) < 1
    assert [unique_ngrams([1, 2, 1, 2], n) for n in (1, 2, 3)] == [0.5, 2 / 3, 1.0]


def test_shipped_questions_are_rows_and_are_asked_once():
    facts = read_facts(SHIPPED)
    assert 60 <= len(facts) <= 100
    assert len({prompt for prompt, _ in facts}) == len(facts)
    assert all(is_right(answer + "(x)", answers) for _, answers in facts for answer in answers)
    assert precision_at([False, True], 1) == 0


def test_a_bad_question_is_named(tmp_path):
    (tmp_path / "facts.jsonl").write_text('{"prompt": "a", "answers": ["b"]}\n{"prompt": "a"}\n')
    with pytest.raises(ValueError, match=r"facts.jsonl line 2 is no"):
        read_facts(tmp_path / "facts.jsonl")


def test_windows_do_not_overlap_and_begin_behind_line_ends():
    tokens = np.random.default_rng(1).integers(0, 9, 2000).tolist()
    found = windows_of(list(enumerate(tokens)), frozenset((i, 0) for i in range(2000)))
    starts = [window[0][0] for window in found]
    assert len(found) > 10
    assert all(tokens[start - 1] == 0 for start in starts)
    assert min(np.diff(starts)) >= WINDOW
    assert starts[0] >= 2000 // 3


def test_verdicts_follow_the_interval():
    better, worse = np.full(50, 1.0), np.full(50, 2.0)
    noisy = np.random.default_rng(0).normal(2, 1, 50)
    found = [
        Claim(place="", text="", values_S=ratio(ours, worse), side=side, bound=1).verdict
        for ours, side in ((better, "below"), (better, "above"), (noisy, "below"))
    ]
    assert found == ["holds", "does not hold", "open"]


class AlphabeticalJudge:
    """Ranks texts by their letters."""

    def orders(self, lists, seed):
        return [tuple(sorted(range(len(texts)), key=texts.__getitem__)) for _, texts in lists]


def test_rankings_leave_out_equal_drafts_and_the_first_judge_chooses_the_one():
    found, left_out = lists_of(
        {
            "prefixes": ["p", "q", "r"],
            "drafts": {
                "superposed": [["c", "b", "z"], ["a", "a", "c"], ["k", "l", "m"]],
                "nucleus": [["d", "a", "f"], ["d", "e", "f"], ["a", "n", "k"]],
            },
            "perplexity": {"superposed": [[2, 3, 1], [1, 2, 3], [1, 2, 3]]},
        }
    )
    assert left_out == 1  # the third nucleus draft takes part in no ranking
    assert found["1v1"] == [("p", ["d", "z"]), ("r", ["a", "k"])]
    assert {name: wins(AlphabeticalJudge(), lists, int(name[0])) for name, lists in found.items()} == {
        "1v3": [1, 0],
        "2v3": [0, 0],
        "1v1": [0, 0],
    }


def test_a_finished_part_is_kept_until_what_it_depends_on_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "weights_digest", lambda folder: folder)

    def bench_of(**changed):
        return SuperposedBench(
            plan=Plan(**changed), backbone="a", second="b", folder=tmp_path, ngrams_folder=tmp_path / "none"
        )

    calls = []

    def measure(bench):
        calls.append(bench.plan.k)
        return {"k": bench.plan.k}

    assert [bench_of().row("part", measure), bench_of().row("part", measure)] == [{"k": 3}, {"k": 3}]
    assert bench_of(k=4).row("part", measure) == {"k": 4}
    assert bench_of().row("part", measure, "another input") == {"k": 3}
    assert calls == [3, 4, 3]
    assert json.loads(next((tmp_path / "rows").glob("part-*.json")).read_text())["k"] in (3, 4)
