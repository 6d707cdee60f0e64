"""The command `headway race`: the same prompt decoded by several methods, shown side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heads.checkpoint.opening import Opened
from heads.cli.hub import BY_NAME
from heads.cli.option_groups import with_groups
from heads.cli.options import ColorOptions, LoadingOptions, SamplingOptions, TreeOptions, print_aside
from heads.cli.race.recording import Column, Entry, Track, race, say_same
from heads.cli.race.screen import replay, summary
from heads.cli.race.svg import draw_race
from heads.cli.writing.text import build_generator, read_prompt
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.methods import penalty_used
from heads.evaluation.tables import describe_machine, progress_bar
from heads.interface.token_heads import TokenHeads

MOST_HEADS = 2
MX = ", MX"
SHORTEST = 8.0  # seconds that a replay takes at least, so that it can be watched


@with_groups
def race_command(
    heads: Annotated[
        list[Path],
        typer.Argument(metavar="HEADS...", help="One or two heads on one backbone: folders or hub names."),
        BY_NAME,
    ],
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text to continue; by default it is read from a pipe.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens to generate.")] = 128,
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, help="Interleaved runs of each column; the one of median time is shown.")
    ] = 3,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Record the race as an animated SVG.")] = None,
    mx: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="The same backbone with MX weights: adds a column of the first heads on it."
        ),
    ] = None,
    sampling: SamplingOptions,
    drafting: TreeOptions,
    loading: LoadingOptions,
) -> None:
    """Watch the same prompt decoded by plain generate and with heads, side by side.

    Columns are decoded one after another, each alone on the machine, and then replayed together at their measured
    times. Tokens that were drafted and accepted are coloured. Without a terminal only the end is printed. A table of
    tokens, passes and seconds follows.
    """
    if len(heads) + (mx is not None) > MOST_HEADS:
        raise ValueError(
            f"{len(heads)} folders of heads{'' if mx is None else ' and --mx'} were given; a race has room for one or "
            f"two columns beside plain, and each folder is one, as --mx is."
        )
    drafting.refuse_packing(loading)
    text = read_prompt(prompt)
    opened = loading.open(*heads)
    opened_mx = None if mx is None else replace(loading, backbone=mx, pack=False).open(heads[0])
    begun = Begun(text=text, sampling=sampling, new_tokens=max_new_tokens)
    columns = run_race(opened, begun, drafting, repeats, opened_mx)
    shown = max(1.0, SHORTEST / max(column.seconds for column in columns))
    console = Console()
    replay(console, columns, text, shown)
    console.print(summary(columns).as_rich())
    console.print(say_same([column for column in columns if MX not in column.name]), highlight=False)
    if mx is not None:
        console.print("The column with MX weights is another model's: its text may differ.", highlight=False)
    note = caption(opened, columns, sampling, repeats, shown)
    print_aside(note)
    if svg is not None:
        svg.parent.mkdir(parents=True, exist_ok=True)
        svg.write_text(draw_race(columns, text, note, slower=shown), encoding="utf-8")
        print_aside(f"picture: {svg}")


def run_race(opened: Opened, begun: Begun, drafting: TreeOptions, repeats: int, mx: Opened | None) -> list[Column]:
    """Plain generation's column first, then one for each folder of heads, then one with MX weights."""
    track = begun.track(opened)
    entries = [Entry(name="plain", track=track)]
    entries += [heads_entry(name, found, track, drafting) for name, found in opened.token_heads.items()]
    if mx is not None:
        ((name, found),) = mx.token_heads.items()
        entries.append(heads_entry(f"{name}{MX}", found, begun.track(mx), drafting))
    with progress_bar(Console(stderr=True), "decoding", len(entries) * (1 + repeats)) as advance:
        return race(entries, repeats, advance)


def heads_entry(name: str, token_heads: TokenHeads, track: Track, drafting: TreeOptions) -> Entry:
    decoding = TreeDecoding(token_heads, drafting.shape, lookup=drafting.lookup, compile=drafting.compile)
    return Entry(name=f"{name} with lookup" if decoding.lookup else f"{name} alone", track=track, decoding=decoding)


@dataclass(frozen=True, kw_only=True)
class Begun:
    """The text that every column continues, and how."""

    text: str
    sampling: SamplingOptions
    new_tokens: int

    def track(self, opened: Opened) -> Track:
        """
        Raises:
            ValueError: the prompt has no tokens, or text would not fit the backbone's positions.
        """
        generator = build_generator(opened, None, self.sampling, self.new_tokens, ColorOptions())
        prompt_1T = generator.encode(self.text)
        generator.check_length(prompt_1T.shape[1])
        return Track(
            model=opened.model,
            tokenizer=opened.tokenizer,
            prompt_1T=prompt_1T,
            sampling=self.sampling,
            new_tokens=self.new_tokens,
        )


def caption(opened: Opened, columns: list[Column], sampling: SamplingOptions, repeats: int, slower: float) -> str:
    """What was measured, how and where."""
    machine = describe_machine(opened.model.device)
    where = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    pace = "as fast as measured" if slower == 1 else f"{slower:.1f} times slower than measured"
    chosen = "greedy" if sampling.greedy else f"sampled at temperature {sampling.temperature:g}"
    penalty = penalty_used(opened.model, sampling.repetition_penalty)
    if penalty != 1.0:
        chosen += f" with a repetition penalty of {penalty:g}"
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    return (
        f"Green: drafted and accepted. One prompt, {len(columns[0].tokens)} new tokens, {chosen}; columns decoded one "
        f"after another and shown {pace}; medians of {repeats} runs; {where}, {threads}."
    )
