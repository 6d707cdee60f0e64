"""Algorithm 1 step by step against loops over single tokens, and Theorem 1 against a minimum of equation 5."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
import torch
from plain_joint import VOCAB, DenseTable, loop_blur, loop_otsu
from torch import Tensor

from heads.decoding.dynamo import joint as joint_module
from heads.decoding.dynamo.candidates import Candidates, take_candidates
from heads.decoding.dynamo.joint import (
    MAX_JOINT_ENTRIES,
    JointRows,
    decide,
    has_peak,
    largest_side,
    mask,
    outer,
    penalize_repetition,
)
from heads.decoding.dynamo.settings import JointConfig
from heads.decoding.dynamo.threshold import Adaptive, gaussian_kernel


def places_of(seed: int, batch: int = 1, n: int = 3, top_k: int = 4, sharp: float = 1.5) -> list[Candidates]:
    """Candidates of n places from random distributions in float64; with every other seed the third is unsure."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, batch, VOCAB, generator=generator, dtype=torch.float64)
    logits[2:] *= 1.0 if seed % 2 else 0.1
    return [take_candidates(torch.softmax(rows * sharp, dim=1), top_k) for rows in logits]


def seen_tokens(batch: int = 1) -> Tensor:
    """Every third token, other ones in each row."""
    return (torch.arange(VOCAB) + torch.arange(batch)[:, None]) % 3 == 0


# --- Algorithm 1 against loops ----------------------------------------------------------------------------------------


def loop_algorithm(
    places: list[Candidates], config: JointConfig, table: DenseTable | None, seen: list[bool], penalty: float
) -> tuple[int, dict[tuple[int, ...], float]]:
    """Algorithm 1 for one row, one n-gram at a time: n, and J with the zeros left out."""
    for n in range(len(places), 1, -1):
        ranks = [range(int(place.counts[0])) for place in places[:n]]
        cells = list(itertools.product(*ranks))
        tokens = {cell: tuple(int(p.tokens_Bk[0, i]) for p, i in zip(places, cell, strict=False)) for cell in cells}
        alone = {c: math.prod(float(p.probs_Bk[0, i]) for p, i in zip(places, c, strict=False)) for c in cells}
        joint = {c: alone[c] * (table.ratio(*tokens[c]) ** config.transparency if table else 1.0) for c in cells}
        if sum(joint.values()) == 0:
            if config.threshold > 0:
                continue
            joint = alone
        joint = {c: value / sum(joint.values()) for c, value in joint.items()}
        joint = loop_thresholds(joint, [len(r) for r in ranks], config)
        for c in cells:
            for i, token in enumerate(tokens[c]):
                if seen[token] or token in tokens[c][:i]:
                    joint[c] /= penalty
        peaked = max(joint.values()) > config.threshold ** (n - 1)
        if config.threshold == 0 or (peaked and config.threshold < 1):
            return n, {tokens[c]: value for c, value in joint.items() if value > 0}
    return 1, {}


def loop_thresholds(joint: dict[tuple[int, ...], float], sizes: list[int], config: JointConfig) -> dict:
    """Each reading of section 3.2.2, cell by cell."""
    bound = config.threshold if config.adaptive == "at_epsilon" else config.threshold ** (len(sizes) - 1)
    kernel = gaussian_kernel(config.blur)

    def static(cells: dict) -> dict:
        return {c: value if value >= bound else 0.0 for c, value in cells.items()}

    def otsu(cells: dict, picture: dict) -> dict:
        edge = loop_otsu(list(picture.values()))
        return {c: value if value >= edge else 0.0 for c, value in cells.items()}

    if config.adaptive is None:
        return static(joint)
    if config.adaptive == "otsu_first":
        return static(otsu(joint, loop_blur(joint, sizes, kernel)))
    if config.adaptive == "blurred":
        picture = loop_blur(static(joint), sizes, kernel)
        return otsu(picture, picture)
    joint = static(joint)
    return otsu(joint, loop_blur(joint, sizes, kernel))


CONFIGS = {
    "paper": JointConfig(threshold=0.5, adaptive="static_first", blur=3),
    "no blur": JointConfig(threshold=0.1, adaptive="static_first", blur=1),
    "static": JointConfig(threshold=0.5, adaptive=None),
    "default, low": JointConfig(threshold=0.1),
    "Otsu first": JointConfig(threshold=0.1, adaptive="otsu_first", blur=3),
    "at epsilon": JointConfig(threshold=0.5, adaptive="at_epsilon", blur=3),
    "blurred": JointConfig(threshold=0.3, adaptive="blurred", blur=3),
    "half transparent": JointConfig(threshold=0.5, transparency=0.5),
    "unmasked": JointConfig(threshold=0.5, transparency=0.0),
    "all": JointConfig(threshold=0.0),
    "all, blurred": JointConfig(threshold=0.0, adaptive="blurred", blur=3),
    "one": JointConfig(threshold=1.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_algorithm_is_the_loop(name):
    config, table, orders = CONFIGS[name], DenseTable(), []
    for seed, sharp in itertools.product(range(4), (1.0, 3.0, 5.0, 8.0)):
        places = places_of(seed, sharp=sharp)
        for penalty in (1.1, 4.0):
            n, expected = loop_algorithm(places, config, table, seen_tokens()[0].tolist(), penalty)
            decision = decide(places, config, cooccurrence=table, seen_BV=seen_tokens(), penalty=penalty)
            assert decision.order_B.tolist() == [n]
            assert entries(decision.ngrams, 0) == pytest.approx(expected, rel=1e-6)  # the table's ratios are float32
            orders.append(n)
    if config.threshold == 0.5:
        assert set(orders) == {1, 2, 3}, f"orders {set(orders)}: too few were tried"


def entries(ngrams: Sequence[JointRows], row: int) -> dict[tuple[int, ...], float]:
    """A row's n-grams and their entries of J."""
    found = {}
    for here in ngrams:
        for r in (here.rows_R == row).nonzero()[:, 0].tolist():
            for cell in here.joint[r].nonzero().tolist():
                ngram = tuple(int(p.tokens_Bk[r, i]) for p, i in zip(here.places, cell, strict=True))
                found[ngram] = float(here.joint[(r, *cell)])
    return found


@pytest.mark.parametrize("adaptive", get_args(Adaptive))
def test_a_batch_is_its_rows(adaptive):
    """Rows that differ in their candidates and in what they decide."""
    generator = torch.Generator().manual_seed(1)
    sharp = torch.tensor([4.0, 4.0, 1.0])[:, None, None]  # the third place is less sure, so that some rows emit two
    probs = torch.softmax(torch.randn(3, 30, VOCAB, generator=generator, dtype=torch.float64) * sharp, dim=2)
    cut = torch.rand(3, 30, 1, generator=generator) * 0.1
    probs = probs.where(probs > cut, 0.0)  # as top-p leaves them: one row two candidates, another nine
    threshold = 0.2 if adaptive == "blurred" else 0.5  # a blur darkens peaks
    config, table, seen = JointConfig(threshold=threshold, adaptive=adaptive, blur=3), DenseTable(), seen_tokens(30)
    places = [take_candidates(place, 8) for place in probs]
    assert all(len(set(place.counts.tolist())) > 1 for place in places)
    decision = decide(places, config, cooccurrence=table, seen_BV=seen, penalty=1.3)
    assert set(decision.order_B.tolist()) == {1, 2, 3}
    for row in range(30):
        alone = [take_candidates(place[row : row + 1], 8) for place in probs]
        single = decide(alone, config, cooccurrence=table, seen_BV=seen[row : row + 1], penalty=1.3)
        assert single.order_B.tolist() == decision.order_B[row : row + 1].tolist()
        assert entries(decision.ngrams, row) == pytest.approx(entries(single.ngrams, 0), rel=1e-12)


def test_backing_off_forgets_the_last_place():
    """Order by order: the joint of two places is what it were without a third."""
    table, config = DenseTable(), JointConfig(threshold=0.5, adaptive=None)
    backed = 0
    for seed in range(0, 20, 2):
        places = places_of(seed, sharp=5.0)
        decision = decide(places, config, cooccurrence=table)
        if decision.order_B.tolist() == [2]:
            backed += 1
            without = decide(places[:2], config, cooccurrence=table)
            assert entries(decision.ngrams, 0) == entries(without.ngrams, 0)
    assert backed > 1
    table.asked.clear()
    decide(places_of(0, sharp=0.1), JointConfig(threshold=0.9), cooccurrence=table)
    assert table.asked == [3, 2]


# --- the steps --------------------------------------------------------------------------------------------------------


def test_top_k_candidates_sum_to_one_without_impossible_tokens():
    place = take_candidates(torch.tensor([[0.0, 0.5, 0.2, 0.3], [0.0, 1.0, 0.0, 0.0]]), top_k=3)
    assert place.tokens_Bk[0].tolist() == [1, 3, 2]
    torch.testing.assert_close(place.probs_Bk, torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]]))
    assert place.counts.tolist() == [3, 1]
    assert take_candidates(torch.tensor([[0.0, 1.0, 0.0]]), top_k=50).tokens_Bk.tolist() == [[1]]


def test_the_joint_is_the_outer_product():
    places = places_of(0, batch=2)
    joint = outer(places)
    assert joint.shape == (2, 4, 4, 4)
    a, b, c = (place.probs_Bk for place in places)
    torch.testing.assert_close(joint, torch.einsum("bi,bj,bk->bijk", a, b, c))


@pytest.mark.parametrize("transparency", [0.0, 0.5, 1.0, 2.0])
def test_masking_is_equation_6_and_sums_to_one(transparency):
    places, table = places_of(0, batch=2), DenseTable()
    independent = outer(places)
    masked = mask(independent, places, table, transparency)
    ratio = table.cooccurrence([place.tokens_Bk for place in places]).double()
    expected = independent * ratio**transparency
    torch.testing.assert_close(masked, expected / expected.sum(dim=(1, 2, 3), keepdim=True))
    torch.testing.assert_close(masked.sum(dim=(1, 2, 3)), torch.ones(2, dtype=torch.float64))


def test_no_transparency_asks_no_table():
    table = DenseTable()
    decide(places_of(0), JointConfig(transparency=0.0), cooccurrence=table)
    assert table.asked == []


class SecondRowOnly(DenseTable):
    """No n-gram of the first row's candidates was ever seen."""

    def cooccurrence(self, candidates: Sequence[Tensor]) -> Tensor:
        ratio = super().cooccurrence(candidates)
        ratio[0] = 0
        return ratio


def test_where_no_ngram_was_seen_the_joint_is_0():
    """Row by row: the first row's n-grams were never seen, the second's were."""
    places, table = places_of(0, batch=2), SecondRowOnly(zeros=0.0)
    masked = mask(outer(places), places, table, 1.0)
    assert not masked[0].any()
    expected = outer(places)[1] * table.cooccurrence([place.tokens_Bk for place in places])[1]
    torch.testing.assert_close(masked[1], expected / expected.sum())


@pytest.mark.parametrize("adaptive", [None, *get_args(Adaptive)])
def test_where_no_ngram_was_seen_a_row_backs_off_but_for_a_threshold_of_0(adaptive):
    """Though its candidates are sure: line 7 makes J 0, and 0 is below any threshold. At 0 all n tokens are emitted."""
    sure = take_candidates(torch.tensor([[0.01, 0.98, 0.01]] * 2, dtype=torch.float64), 3)
    places, table = [sure] * 3, SecondRowOnly(zeros=0.0)
    config = JointConfig(threshold=0.05, adaptive=adaptive, blur=1 if adaptive is None else 3)
    assert decide(places, config, cooccurrence=table).order_B.tolist() == [1, 3]
    all_tokens = decide(places, replace(config, threshold=0.0), cooccurrence=table)
    assert all_tokens.order_B.tolist() == [3, 3]
    unmasked = decide([place.select(torch.tensor([0])) for place in places], replace(config, threshold=0.0))
    assert entries(all_tokens.ngrams, 0) == pytest.approx(entries(unmasked.ngrams, 0), rel=1e-9)


def test_a_threshold_of_1_asks_no_table_and_forms_no_joint():
    table = DenseTable()
    decision = decide(places_of(0), JointConfig(threshold=1.0), cooccurrence=table)
    assert (decision.order_B.tolist(), decision.ngrams, table.asked) == ([1], (), [])


def test_a_ratio_that_is_not_finite_is_refused():
    table = DenseTable()
    table.cooccurrence = lambda candidates, **_: torch.full((1, 4, 4, 4), float("inf"))
    with pytest.raises(ValueError, match="ratio that is not finite; count it again"):
        decide(places_of(0), JointConfig(), cooccurrence=table)


def test_the_penalty_divides_once_for_each_repeated_token():
    tokens = torch.tensor([[4, 5]])
    place = Candidates(tokens_Bk=tokens, probs_Bk=torch.tensor([[0.5, 0.5]]))
    seen = torch.zeros(1, VOCAB, dtype=torch.bool)
    seen[0, 5] = True
    found = penalize_repetition(torch.ones(1, 2, 2, 2), [place] * 3, seen, 2.0)
    # 4 is new: its second and third times in the n-gram count. 5 stands in the text: every time counts.
    expected = {(4, 4, 4): 4, (4, 4, 5): 4, (4, 5, 4): 4, (4, 5, 5): 4, (5, 4, 4): 4, (5, 4, 5): 4, (5, 5, 5): 8}
    for (i, j, k), count in expected.items():
        assert float(found[0, i - 4, j - 4, k - 4]) == 1 / count
    assert torch.equal(penalize_repetition(torch.ones(1, 2, 2, 2), [place] * 3, seen, 1.0), torch.ones(1, 2, 2, 2))


def test_a_penalty_can_make_a_row_back_off():
    sure = take_candidates(torch.tensor([[0.1, 0.8, 0.1]]), 3)
    other = take_candidates(torch.tensor([[0.8, 0.1, 0.1]]), 3)
    seen = torch.tensor([[False, True, False]])
    config = JointConfig(threshold=0.5)
    assert decide([sure, other], config).order_B.tolist() == [2]
    assert decide([sure, other], config, seen_BV=seen, penalty=1.1).order_B.tolist() == [2]  # 0.64 / 1.1 = 0.58
    assert decide([sure, other], config, seen_BV=seen, penalty=1.3).order_B.tolist() == [1]  # 0.64 / 1.3 = 0.49


def test_the_back_off_test_is_strict():
    """Exactly ε_b^(n-1) backs off, as the text says "> ε_b^(n-1)"; line 12's "<" would not."""
    joint = torch.tensor([0.25, 0.250001, 0.249]).view(3, 1, 1, 1)
    assert has_peak(joint, 0.5).tolist() == [False, True, False]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.1, 100.0])
def test_thresholds_of_0_and_1_decide_alone(penalty):
    certain = take_candidates(torch.tensor([[0.0, 1.0, 0.0]]), 3)
    spread = take_candidates(torch.full((1, 3), 1 / 3), 3)
    seen = torch.ones(1, 3, dtype=torch.bool)
    for places in ([certain] * 3, [spread] * 3):
        for threshold, order in ((0, 3), (1, 1)):
            decision = decide(places, JointConfig(threshold=threshold), seen_BV=seen, penalty=penalty)
            assert decision.order_B.tolist() == [order]


def test_a_lower_threshold_never_emits_fewer():
    places = places_of(5, batch=40, sharp=3.0)
    orders = [decide(places, JointConfig(threshold=t / 20, adaptive=None)).order_B for t in range(21)]
    assert all(bool((a >= b).all()) for a, b in itertools.pairwise(orders))
    assert len({float(order.float().mean()) for order in orders}) > 5


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 33))
def test_the_largest_side_fits_and_one_more_does_not(n):
    side = largest_side(n)
    assert side**n <= MAX_JOINT_ENTRIES < (side + 1) ** n


def test_a_joint_beyond_the_bound_is_cut_to_the_likeliest_first(monkeypatch):
    monkeypatch.setattr(joint_module, "MAX_JOINT_ENTRIES", 30)  # 3³ = 27
    places = places_of(2, batch=2)
    decision = decide(places, JointConfig(threshold=0, adaptive=None))
    (here,) = decision.ngrams
    assert here.joint.shape == (2, 3, 3, 3)
    for place, cut in zip(places, here.places, strict=True):
        assert torch.equal(cut.tokens_Bk, place.tokens_Bk[:, :3])
        torch.testing.assert_close(cut.probs_Bk.sum(dim=1), torch.ones(2, dtype=torch.float64))
    pairs = decide(places[:2], JointConfig(threshold=0, adaptive=None)).ngrams[0]
    assert pairs.joint.shape == (2, 4, 4), "4² = 16 fits"


def test_many_places_of_equal_probabilities_do_not_vanish():
    place = take_candidates(torch.full((1, 5000), 1 / 5000), 5000)
    (here,) = decide([place] * 18, JointConfig(threshold=0)).ngrams
    assert float(here.joint.sum()) == pytest.approx(1, rel=1e-4)


# --- draws ------------------------------------------------------------------------------------------------------------


def test_draws_follow_the_joint():
    """Chi-square of 4000 draws of triples against J, for two rows at once."""
    places, table = places_of(7, batch=2, top_k=3), DenseTable()
    (here,) = decide(places, JointConfig(threshold=0, adaptive=None), cooccurrence=table).ngrams
    generator, draws = torch.Generator().manual_seed(0), 2000
    counts: list[dict[tuple[int, ...], int]] = [{}, {}]
    for _ in range(draws):
        for row, ngram in enumerate(here.sample(generator)):
            counts[row][tuple(ngram)] = counts[row].get(tuple(ngram), 0) + 1
    for row in range(2):
        wanted = {ngram: value * draws for ngram, value in entries([here], row).items()}
        assert set(counts[row]) <= set(wanted), "what is zero is never sampled"
        frequent = [ngram for ngram, value in wanted.items() if value >= 5]
        rest = sum(value for ngram, value in wanted.items() if ngram not in frequent)
        chi_square = sum((counts[row].get(ngram, 0) - wanted[ngram]) ** 2 / wanted[ngram] for ngram in frequent)
        if rest:
            chi_square += (draws - sum(counts[row].get(ngram, 0) for ngram in frequent) - rest) ** 2 / rest
        # At most 26 degrees of freedom: 54.1 is exceeded by chance once in a thousand seeds, and the seed is fixed.
        assert len(frequent) > 8
        assert chi_square < 54.1


def test_draws_repeat_with_the_generator_and_the_best_is_the_largest():
    (here,) = decide(places_of(3, batch=4), JointConfig(threshold=0, adaptive=None)).ngrams
    first = [here.sample(torch.Generator().manual_seed(1)) for _ in range(2)]
    assert first[0] == first[1]
    assert first[0] != here.sample(torch.Generator().manual_seed(2))
    for row, ngram in enumerate(here.best()):
        found = entries([here], row)
        assert found[tuple(ngram)] == max(found.values())


# --- Theorem 1 --------------------------------------------------------------------------------------------------------


def equation_5(p: Tensor, cost: Tensor, independent: Tensor, epsilon_1: float) -> Tensor:
    """Equation 5 at ε₂ = 0."""
    return (p * cost).sum() + epsilon_1 * (p * (p / independent).log()).sum()


def minimum_of_equation_5(cost: Tensor, independent: Tensor, epsilon_1: float) -> Tensor:
    """Mirror descent along equation 5's own gradient, which knows nothing of a closed form."""
    p = torch.full_like(cost, 1 / cost.numel())
    for _ in range(80):
        p.requires_grad_(True)
        (slope,) = torch.autograd.grad(equation_5(p, cost, independent, epsilon_1), p)
        p = p.detach() * (-0.4 / epsilon_1 * (slope - slope.min())).exp()
        p = p / p.sum()
    return p


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("transparency", [0.5, 1.0, 2.0])
def test_theorem_1_the_masked_product_minimises_equation_5(n, transparency):
    """With the cost c = -log of the co-occurrence ratio, and α_c = 1/ε₁.

    The proof writes exp(+c/ε₁), which would be the ratio's inverse; the derivative of equation 5 gives exp(-c/ε₁), as
    the proof's own last line needs. And that is the ratio to the power of 1/ε₁: the paper's equation 3 is ε₁ = 1.
    """
    table, epsilon_1 = DenseTable(zeros=0.0), 1 / transparency
    places = places_of(4, n=n, top_k=5)
    independent = outer(places)[0]
    ratio = table.cooccurrence([place.tokens_Bk for place in places])[0].double()
    cost = -ratio.log()

    masked = mask(outer(places), places, table, transparency)[0]
    found = minimum_of_equation_5(cost, independent, epsilon_1)
    torch.testing.assert_close(masked, found, atol=1e-6, rtol=0.0)

    least = float(equation_5(masked, cost, independent, epsilon_1))
    assert least == pytest.approx(-epsilon_1 * float((independent * (-cost / epsilon_1).exp()).sum().log()), rel=1e-9)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-1):
        for _ in range(10):
            other = masked * (size * torch.randn(masked.shape, generator=generator, dtype=torch.float64)).exp()
            assert float(equation_5(other / other.sum(), cost, independent, epsilon_1)) > least
    as_printed = independent * (cost / epsilon_1).exp()
    assert float(equation_5(as_printed / as_printed.sum(), cost, independent, epsilon_1)) > least + 0.01
    if transparency != 1:
        whole = mask(outer(places), places, table, 1.0)[0]
        assert float(equation_5(whole, cost, independent, epsilon_1)) > least + 1e-3, "α_c = 1 is ε₁ = 1 only"


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"threshold": -0.1}, r"threshold=-0.1 was given; allowed are 0 \(always all tokens\) to 1"),
        ({"threshold": 1.5}, "threshold=1.5 was given"),
        ({"threshold": float("nan")}, "threshold=nan was given"),
        ({"transparency": -1.0}, "transparency=-1.0 was given; allowed are 0"),
        ({"transparency": float("inf")}, "transparency=inf was given"),
        ({"blur": 2}, "blur=2 was given; allowed are odd kernel sizes, 1 for no blur"),
        ({"blur": 0}, "blur=0 was given"),
        ({"top_k": 0}, "top_k=0 was given; allowed are 1"),
        ({"adaptive": "otsu"}, "adaptive='otsu' was given; allowed are static_first, otsu_first, at_epsilon, blurred"),
        ({"adaptive": "blurred", "blur": 1}, "blur=1, which does not blur; give 3 or more"),
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        JointConfig(**fields)


@pytest.mark.parametrize(("place", "source"), [(1, "the backbone"), (3, "head 2")])
def test_nan_is_refused_with_what_to_look_for(place, source):
    probs = torch.full((3, 4), 0.25)
    probs[1] = torch.softmax(torch.full((4,), -float("inf")), dim=0)
    with pytest.raises(ValueError, match=f"probabilities of {source} for token {place} .* NaN in row 1; look for"):
        take_candidates(probs, 2, place=place)


def test_a_great_ratio_to_a_great_power_does_not_overflow():
    places = [take_candidates(torch.full((1, 2), 0.5), 2, place=i) for i in range(2)]

    class Great:
        def cooccurrence(self, candidates):
            return torch.tensor([[[1e20, 1e10], [1e10, 0.0]]])

    joint = mask(outer(places), places, Great(), 2.0)
    assert joint.isfinite().all()
    torch.testing.assert_close(joint.amax(), torch.tensor(1.0))
