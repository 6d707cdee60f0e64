"""`headway autocomplete`: an editor that shows k drafts under what is typed, by superposed decoding.

A second thread makes the drafts and always works on the newest text; what it finds for an older one is dropped.
From a pipe the drafts of the text are printed and nothing is edited.
"""
# T token of the text, L length with a draft

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import open_backbone
from heads.cli.writing.text import read_prompt
from heads.decoding.superposed.decoding import SuperposedDecoding
from heads.extras import needs_extra
from heads.ngrams.table import NgramTable

with needs_extra("cli", "headway autocomplete was called"):
    from prompt_toolkit.application import Application
    from prompt_toolkit.buffer import Buffer
    from prompt_toolkit.formatted_text import StyleAndTextTuples
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import BufferControl, FormattedTextControl, HSplit, Layout, Window
    from prompt_toolkit.layout.dimension import Dimension

KEYS_SHOWN = 9  # Alt-1 to Alt-9 take a draft
READ_TOKENS = 256  # the last ones of the text, at most
STEP_TOKENS = 128
"""Where what is read begins: a multiple of it, so that texts typed one after another share a prefix and its cache."""
PAPER_TEMPERATURE = 0.06


@dataclass(frozen=True, kw_only=True)
class Suggestions:
    """The drafts of one text, likeliest first, with their log probabilities and what they took."""

    text: str
    drafts: Sequence[str]
    scores: Sequence[float]
    milliseconds: float


Suggest = Callable[[str], Suggestions]


def autocomplete_command(
    backbone: Annotated[str, typer.Argument(metavar="BACKBONE", help="Folder or hub name of a causal language model.")],
    ngrams: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Table of headway count-ngrams; without it the model alone scores drafts."),
    ] = None,
    k: Annotated[int, typer.Option("-k", metavar="K", min=1, max=KEYS_SHOWN, help="Drafts.")] = 3,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of a draft.")] = 10,
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0, max=1, show_default=False, help="The n-grams' share of a score; 0.54 by default."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            show_default=False,
            help="Of the model's distribution; 0.06 with n-grams, 1 without by default.",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the model's weights.")] = "auto",
) -> None:
    """Write with k drafts under the text: Tab takes the first, Alt-1 to Alt-9 one by its number.

    Enter begins a line; Ctrl-D ends and prints the text. From a pipe the drafts of the text are printed, one a line.
    """
    opened = open_backbone(backbone, dtype=dtype)
    table = None if ngrams is None else NgramTable.open(ngrams, opened.tokenizer)
    if temperature is None:
        temperature = 1.0 if table is None else PAPER_TEMPERATURE
    decoding = SuperposedDecoding(k, table, alpha=alpha, temperature=temperature, keep_caches=True)
    suggest = build_suggest(opened.model, opened.tokenizer, decoding, tokens)
    if not sys.stdin.isatty():
        print_suggestions(suggest(read_prompt(None)))
        return
    suggest("a")  # kernels and the table's pages are warm before the first key
    typer.echo(Editor(suggest, k).run())


def build_suggest(model: Any, tokenizer: Any, decoding: SuperposedDecoding, tokens: int) -> Suggest:
    """From a text to its drafts; an empty text has none."""

    def suggest(text: str) -> Suggestions:
        start = time.perf_counter()
        ids_1T = tokenizer(text, return_tensors="pt")["input_ids"]
        ids_1T = ids_1T[:, first_read(ids_1T.shape[1]) :].to(model.device)
        if not ids_1T.shape[1]:
            return Suggestions(text=text, drafts=[], scores=[], milliseconds=0.0)
        out = model.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            custom_generate=decoding,
        )
        drafts = tokenizer.batch_decode(out.sequences[:, ids_1T.shape[1] :], skip_special_tokens=True)
        milliseconds = 1000 * (time.perf_counter() - start)
        return Suggestions(text=text, drafts=drafts, scores=out.sequences_scores.tolist(), milliseconds=milliseconds)

    return suggest


def first_read(length: int) -> int:
    """The index of the first token that is read of a text of this length.

    >>> first_read(256), first_read(257), first_read(384), first_read(385)
    (0, 128, 128, 256)
    """
    return STEP_TOKENS * -(-max(0, length - READ_TOKENS) // STEP_TOKENS)


def print_suggestions(found: Suggestions) -> None:
    """One line a draft with its score, the logarithm of equation 2's p_i; the time goes to stderr."""
    for draft, score in zip(found.drafts, found.scores, strict=True):
        typer.echo(f"{score:.2f}\t{one_line(draft)}")
    typer.echo(f"{found.milliseconds:.0f} ms for {len(found.drafts)} drafts", err=True)


def one_line(draft: str) -> str:
    r"""
    >>> one_line("a\nb")
    'a⏎b'
    """
    return draft.replace("\n", "⏎").replace("\t", "→")


class Latest:
    """Runs a function in a thread, on the newest input alone."""

    def __init__(self, run: Suggest, done: Callable[[Suggestions], None], failed: Callable[[Exception], None]) -> None:
        self._run, self._done, self._failed = run, done, failed
        self._newest: str | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, text: str) -> None:
        with self._changed:
            self._newest = text
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None)
                text, self._newest = self._newest or "", None
            try:
                self._done(self._run(text))
            except Exception as error:  # shown in the editor, whose text must not be lost
                self._failed(error)


class Editor:
    """The text, the drafts under it, and a line of times."""

    def __init__(self, suggest: Suggest, k: int, **streams: Any) -> None:
        self.found: Suggestions | None = None
        self.problem = ""
        self.times: list[float] = []
        self.buffer = Buffer(multiline=True, on_text_changed=lambda _: self.latest.ask(self.buffer.text))
        drafts = Window(FormattedTextControl(self.show), height=Dimension.exact(k + 1), wrap_lines=False)
        self.application: Application[str] = Application(
            layout=Layout(HSplit([Window(BufferControl(self.buffer)), drafts])),
            key_bindings=self.keys(k),
            erase_when_done=True,
            **streams,
        )
        self.latest = Latest(suggest, self.receive, self.fail)

    def run(self) -> str:
        """The text, when the user has ended."""
        return self.application.run()

    def receive(self, found: Suggestions) -> None:
        self.times.append(found.milliseconds)
        self.found, self.problem = found, ""
        self.application.invalidate()

    def fail(self, error: Exception) -> None:
        self.found, self.problem = None, " ".join(str(error).split())
        self.application.invalidate()

    def drafts(self) -> Sequence[str]:
        """Those of the text as it is now."""
        fits = self.found is not None and self.found.text == self.buffer.text and self.at_end()
        return self.found.drafts if fits and self.found is not None else ()

    def at_end(self) -> bool:
        return self.buffer.cursor_position == len(self.buffer.text)

    def show(self) -> StyleAndTextTuples:
        lines: StyleAndTextTuples = []
        for number, draft in enumerate(self.drafts(), start=1):
            lines += [("bold", f" {number} "), ("", one_line(draft) + "\n")]
        return [*lines, ("reverse", f" {self.status()} ")]

    def status(self) -> str:
        """The newest keystroke's milliseconds and the median of all; the keys."""
        if self.problem:
            return self.problem
        times = f"{self.times[-1]:.0f} ms, median {statistics.median(self.times):.0f} ms · " if self.times else ""
        return f"{times}Tab takes 1, Alt-N takes N, Ctrl-D ends"

    def take(self, number: int) -> None:
        """Write a draft behind the text, where there is one of this number."""
        drafts = self.drafts()
        if number <= len(drafts):
            self.buffer.insert_text(drafts[number - 1])

    def keys(self, k: int) -> KeyBindings:
        bindings = KeyBindings()
        bindings.add("tab")(lambda event: self.take(1))
        for number in range(1, k + 1):
            bindings.add("escape", str(number))(lambda event, number=number: self.take(number))
        bindings.add("enter")(lambda event: self.buffer.insert_text("\n"))
        for key in ("c-d", "c-c"):
            bindings.add(key)(lambda event: event.app.exit(result=self.buffer.text))
        return bindings
