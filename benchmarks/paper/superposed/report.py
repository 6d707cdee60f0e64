"""Tables of the measurement: the paper's tables, the sweeps, examples, and a line for each claim."""
# B prefix, K draft

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.paper.dynamo_texts import with_interval
from benchmarks.paper.superposed.bench import Row, SuperposedBench
from benchmarks.paper.superposed.claims import Claim, Rows, drafts_in, of_all
from benchmarks.paper.superposed.rankings import EXPECTED, PAPER
from benchmarks.paper.superposed.tuning import FIRST_PENALTY, Setting, settings_of
from benchmarks.shared import describe_cpu, figures_table, say

EXAMPLES = 6


def print_report(console: Console, bench: SuperposedBench, rows: Rows, claims: Sequence[Claim]) -> None:
    plan = bench.plan
    say(
        console,
        f"{bench.backbone} decodes, {bench.second} judges; {len(rows['drafts']['prefixes'])} prefixes of "
        f"{plan.prefix} tokens of held-out files, drafts of {plan.length} tokens, k = {plan.k}, nucleus p = 0.95\n"
        f"intervals: 95 % of a paired bootstrap over prefixes; {describe_cpu()}",
    )
    print_tuning(console, rows["tune"])
    print_perplexities(console, rows["drafts"], plan.k)
    print_sweeps(console, rows["sweeps"])
    print_facts(console, rows["facts"])
    print_rankings(console, rows["rankings"])
    print_linearity(console, rows["linearity"])
    print_long_texts(console, rows["long"])
    print_claims(console, claims)
    print_examples(console, rows["drafts"])


def begin(console: Console, title: str, *columns: str) -> Table:
    """A new table; its title is printed first, on one line of its own, however narrow the table is."""
    say(console, title)
    return figures_table(None, *columns)


def print_tuning(console: Console, tuned: Row) -> None:
    title = "\nthe lowest mean perplexity over the drafts on the validation split (section 4.1, appendices B and C)"
    table = begin(console, title, "setting", "perplexity")
    tried = [(Setting(**row["setting"]), row["perplexity"]) for row in tuned["tried"]]
    for setting in settings_of(tuned).values():
        table.add_row(setting.name, f"{min(value for other, value in tried if other == setting):.2f}")
    console.print(table)
    best = settings_of(tuned)["6"]
    title = f"\nmean perplexity by α (rows) and τ (columns), n ≤ 6, δ {FIRST_PENALTY:g}"
    grid = {(s.alpha, s.temperature): v for s, v in tried if s.longest == 6 and s.penalty == FIRST_PENALTY}
    taus = sorted({tau for _, tau in grid})
    table = begin(console, title, "α", *(f"{tau:g}" for tau in taus))
    for alpha in sorted({alpha for alpha, _ in grid}):
        table.add_row(f"{alpha:g}", *(f"{grid[alpha, tau]:.2f}" for tau in taus))
    console.print(table)
    same = [(s, v) for s, v in tried if (s.longest, s.alpha, s.temperature) == (6, best.alpha, best.temperature)]
    found = {setting.penalty: value for setting, value in same}
    say(console, "δ at the best of them: " + ", ".join(f"{p:g}: {v:.2f}" for p, v in sorted(found.items())))


def print_perplexities(console: Console, found: Row, k: int) -> None:
    """Tables 1 to 5: means with intervals, and deviations over prefixes."""
    titles = {
        "perplexity": "\nperplexity, mean over prefixes (tables 1 and 3) ± deviation (table 4)",
        "second backbone": "\nanother backbone: the judge decodes and the backbone judges (tables 2 and 5)",
        "other tokenizer": "\nunder a judge with another tokenizer, all tokens but the first five (§5.1)",
    }
    for measure, title in titles.items():
        table = begin(console, title, "drafts", *(f"draft {i}" for i in range(1, k + 1)), "best", "best, median")
        for name in found[measure]:
            values_BK = drafts_in(found, name, measure)
            cells = [f"{column.mean():.2f} ± {column.std():.1f}" for column in values_BK.T]
            best_B = values_BK.min(axis=1)
            interval = with_interval(of_all(best_B, form=lambda mean: mean), ".2f")
            table.add_row(
                name, *cells, *["–"] * (k - len(cells)), f"{interval} ± {best_B.std():.1f}", f"{np.median(best_B):.2f}"
            )
        console.print(table)


def print_sweeps(console: Console, found: Row) -> None:
    for axis, figure, unit in (
        ("drafts", 9, "drafts"),
        ("prefix", 10, "tokens of prefix"),
        ("length", 11, "new tokens"),
    ):
        title = f"\nby {unit} (figure {figure}): perplexity, and repetition and likeness of drafts (figure 8)"
        table = begin(
            console, title, unit, "nucleus, one", "nucleus, best", "beam, best", "superposed, best",
            "superposed 1-gram unique", "nucleus", "3-gram unique", "nucleus", "Self-BLEU", "nucleus",
        )  # fmt: skip
        for point in found[axis]:
            ours, theirs = point["superposed"], point["nucleus"]
            perplexity = {name: np.asarray(point[name]["perplexity"]) for name in ("nucleus", "beam", "superposed")}
            unique = [np.mean(np.asarray(x["unique"])[:, n]) for n in (0, 2) for x in (ours, theirs)]
            table.add_row(
                str(point["value"]),
                f"{perplexity['nucleus'][:, 0].mean():.2f}",
                *(f"{perplexity[name].min(axis=1).mean():.2f}" for name in ("nucleus", "beam", "superposed")),
                *(f"{share:.3f}" for share in unique),
                *(f"{np.mean(x['self_bleu']):.3f}" for x in (ours, theirs)),
            )
        console.print(table)


def print_facts(console: Console, found: Row) -> None:
    names = found["precision"]
    count, k = np.asarray(names["greedy"]).shape
    title = f"\nexact match on {count} questions of {found['file']} (figure 5)"
    table = begin(console, title, "drafts", *(f"P@{n}" for n in range(1, k + 1)))
    for name, values in names.items():
        table.add_row(name, *(f"{share:.3f}" for share in np.mean(values, axis=0)))
    console.print(table)
    say(console, "greedy has one draft; nucleus sampling: mean of five draws")


def print_rankings(console: Console, found: Row) -> None:
    title = f"\nrankings, not by people (figures 7 and 12); the judge: {found['judge']}"
    table = begin(console, title, "nucleus v superposed", "superposed first", "equal drafts", "the paper", "prefixes")
    for name, wins in found["wins"].items():
        value = with_interval(of_all(np.asarray(wins), form=lambda share: share))
        table.add_row(name, value, f"{EXPECTED[name]:g}", f"{PAPER[name]:g}", str(len(wins)))
    console.print(table)
    say(
        console,
        f"left out: {found['left out']} prefixes with equal drafts, {found['unreadable']} verdicts that cannot be read",
    )


def print_linearity(console: Console, found: Row) -> None:
    cosine, control = (np.asarray(found[name]).mean(axis=0) for name in ("cosine", "control"))
    title = "\ncosine of equation 8 after the last layer, by step (figure 3), and with another prefix's beams"
    steps = list(range(0, len(cosine), 2))
    table = begin(console, title, "step", *(str(step + 1) for step in steps))
    table.add_row("own beams", *(f"{cosine[step, -1]:.2f}" for step in steps))
    table.add_row("deviation", *(f"{np.asarray(found['cosine'])[:, step, -1].std():.2f}" for step in steps))
    table.add_row("another's", *(f"{control[step, -1]:.2f}" for step in steps))
    console.print(table)
    title = "\nby layer (figure 15): 0 is the embedding, the last are the logits"
    table = begin(console, title, "step", *(str(layer) for layer in range(cosine.shape[1])))
    for step in range(min(5, len(cosine))):
        table.add_row(str(step + 1), *(f"{value:.3f}" for value in cosine[step]))
    console.print(table)


def print_long_texts(console: Console, found: Row) -> None:
    names = [name for name in found if name != "prefix"]
    lengths = list(found[names[0]]["unique"])
    title = "\nlong texts (appendix I): share of unique trigrams after so many tokens, and perplexity"
    table = begin(console, title, "texts", *lengths, "perplexity")
    for name in names:
        shares = [np.asarray(found[name]["unique"][n])[:, 2].mean() for n in lengths]
        table.add_row(name, *(f"{share:.3f}" for share in shares), f"{np.mean(found[name]['perplexity']):.2f}")
    console.print(table)
    say(console, f"\none of them, behind {found['prefix']!r}:")
    for name in names:
        say(console, f"  {name}: {found[name]['text']!r}")


def print_claims(console: Console, claims: Sequence[Claim]) -> None:
    say(console, "\nwhat the paper claims; a claim is open where the interval contains its bound")
    for claim in claims:
        sign = "<" if claim.side == "below" else ">"
        say(console, f"  {claim.verdict:14} {claim.place}: {claim.text}")
        say(
            console, f"{'':17}{with_interval(claim.values_S)}; claimed {sign} {claim.bound:g}; the paper: {claim.paper}"
        )


def print_examples(console: Console, found: Row) -> None:
    say(console, "\ndrafts (figures 4 and 14)")
    count = len(found["prefixes"])
    for i in range(EXAMPLES):
        row = i * count // EXAMPLES
        say(console, f"  {found['prefixes'][row]!r}")
        say(console, f"    nucleus     {found['drafts']['nucleus'][row][0]!r}")
        for draft in found["drafts"]["superposed"][row]:
            say(console, f"    superposed  {draft!r}")
