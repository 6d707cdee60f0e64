"""`python -m train regenerate-data`: replace answers and ends of texts in the data by what the backbone generates.

Lines are generated in windows of a few batches. Within a window, texts of similar length share a batch and
conversations advance turn by turn; then the lines are appended in order. Windows begin at fixed line numbers, so a
resumed run writes the same lines as one that was never stopped. With `--server` another program generates, and its
lines are written by served_lines.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from tqdm.auto import tqdm

from heads.backbone.loading import (
    load_backbone,
    load_tokenizer,
    read_max_positions,
    read_model_config,
    read_own_ends,
    read_vocab_size,
)
from heads.checkpoint import save_load
from heads.checkpoint.opening import default_device
from heads.decoding.tree_decoding import TreeDecoding
from train.config import TrainConfig
from train.data.hidden_states import fingerprint
from train.regenerate.config import RegenerateConfig, RegenerateFlags
from train.regenerate.output import OutputFile
from train.regenerate.report import report, report_server
from train.regenerate.rewriting import GeneratedAnswer, Rewriting, RowPrompt, Tally
from train.regenerate.served_lines import write_served_lines
from train.regenerate.server import Server
from train.regenerate.source import SourceRows
from train.regenerate.writing import Key, Writer

WINDOW = 4
"""Batches between two appends. More give batches of more equal length; fewer lose less when a run is killed."""

CONCURRENCY = 64
"""Rows that a server works on at a time."""


def regenerate(config: TrainConfig, flags: RegenerateFlags) -> None:
    """Generate a run's training data with its own backbone: the answers of conversations, the ends of texts.

    Raises:
        ValueError: a backbone or data that allow no generation.
        SystemExit: with code 130 when it is interrupted; complete lines stay in the file.
    """
    if config.backbone.random_weights:
        raise ValueError("backbone.random_weights was given: such a backbone has nothing to say; give a trained one.")
    transformers.logging.set_verbosity_error()  # generate would warn of settings that are intended
    tokenizer = load_tokenizer(config.backbone)
    rows = SourceRows(config.data, flags, tokenizer, read_vocab_size(config.backbone))
    writer = load_writer(config, flags, rows) if flags.server is None else open_server(config, flags, rows)
    refuse_long_prompts(writer, flags, rows)
    total = rows.per_row * (len(rows) if flags.limit is None else min(flags.limit, len(rows)))
    with OutputFile(flags.out, settings_of_the_text(config, flags, rows, writer)) as output:
        tally = Tally() if isinstance(writer, Writer) else writer.tally
        try:
            if isinstance(writer, Writer):
                write_lines(rows, writer, output, total, tally)
            else:
                asyncio.run(write_served_lines(rows, writer, output, total, flags.concurrency or CONCURRENCY))
        except KeyboardInterrupt:
            sys.stderr.write(
                f"interrupted: {output.path} has {output.lines:,} complete lines; the same command resumes.\n"
            )
            sys.exit(130)
        if output.lines == rows.lines:
            output.finish()
    report(output, flags, tally, rows.lines)
    if isinstance(writer, Server):
        report_server(writer)


def load_writer(config: TrainConfig, flags: RegenerateFlags, rows: SourceRows) -> Writer:
    """The backbone in this process, with the heads of --heads if any."""
    model = load_backbone(config.backbone, default_device())
    add_ends(rows, model.generation_config.eos_token_id)
    return Writer(model, flags, rows.ends, open_decoding(flags, model))


def open_server(config: TrainConfig, flags: RegenerateFlags, rows: SourceRows) -> Server:
    """The server of --server; of the backbone only config and tokenizer are read.

    Raises:
        ValueError: it cannot be reached, wants another key, or does not have the model.
    """
    model_config = read_model_config(config.backbone)
    add_ends(rows, read_own_ends(config.backbone, model_config))
    server = Server(
        url=str(flags.server),
        model=str(flags.model),
        key_variable=flags.api_key_env,
        settings=flags,
        ends=rows.ends,
        longest=read_max_positions(model_config),
        vocab_size=rows.vocab_size,
        as_tokens=config.data.chat_template is not None,
    )
    server.refuse_other_models()
    return server


def open_decoding(flags: RegenerateFlags, model: Any) -> TreeDecoding | None:
    """Decoding with the heads of --heads; None without that flag.

    Raises:
        ValueError: the folder holds no heads, or heads of another backbone.
    """
    return TreeDecoding(save_load.load(flags.heads, model)) if isinstance(flags.heads, str) else None


def add_ends(rows: SourceRows, own: int | list[int] | None) -> None:
    """Add the end tokens of the backbone's settings to those of the tokenizer and of the template."""
    own = [] if own is None else own if isinstance(own, list) else [own]
    rows.ends = list(dict.fromkeys([*rows.ends, *own]))


def refuse_long_prompts(writer: Writer | Server, settings: RegenerateConfig, rows: SourceRows) -> None:
    """
    Raises:
        ValueError: prompt and new tokens of a text, or of every conversation, exceed the backbone's positions.
    """
    if rows.is_chat:
        refuse_long_chats(writer, settings, rows)
    elif not writer.fits(range(1 + settings.prompt_tokens)):
        raise ValueError(
            f"--prompt-tokens {settings.prompt_tokens} and --max-new-tokens {settings.max_new_tokens} are more than "
            f"the backbone's {writer.longest} positions, of which one is for the token before a text; lower one."
        )


def refuse_long_chats(writer: Writer | Server, settings: RegenerateConfig, rows: SourceRows) -> None:
    """Raise ValueError where the first prompt of every conversation is too long; the search ends at one that fits."""
    any_prompt = False
    for prompt in rows.first_prompts():
        if writer.fits(prompt):
            return
        any_prompt = True
        if not writer.fits(range(1)):
            break
    if any_prompt:
        raise ValueError(
            f"--max-new-tokens {settings.max_new_tokens} and the first question of any conversation, in the chat "
            f"template, are more than the backbone's {writer.longest} positions; lower it, or give shorter "
            f"conversations."
        )


def settings_of_the_text(
    config: TrainConfig, flags: RegenerateFlags, rows: SourceRows, writer: Writer | Server
) -> dict[str, Any]:
    """All settings that the lines depend on, which a resumed run must share."""
    backbone, data = config.backbone, config.data
    template = None if rows.template is None else hashlib.sha256(rows.template.encode()).hexdigest()[:16]
    return {
        "backbone": backbone.name_or_path,
        "revision": backbone.revision,
        **identify(writer),
        "quantization": backbone.quantization,
        "tokenizer": backbone.tokenizer,
        "sources": [dataclasses.asdict(source) for source in data.train],
        "rows": rows.fingerprint,
        "lines": rows.lines,
        "ends": rows.ends,
        "data.seed": data.seed,
        "chat_template": template,
        **flags.decide_the_text,
    }


def identify(writer: Writer | Server) -> dict[str, Any]:
    """What identifies the weights that write: their checksum, or a server's name for them, which cannot be checked."""
    if isinstance(writer, Server):
        return {"server's model": writer.model, "prompts": "tokens" if writer.as_tokens else "messages"}
    model = writer.model
    weights = fingerprint(model, without=("transformers_version",))
    return {"weights": weights, "dtype": str(model.dtype).removeprefix("torch.")}


def write_lines(rows: SourceRows, writer: Writer, output: OutputFile, total: int, tally: Tally) -> None:
    """Append all lines that the file does not have yet, up to `total`."""
    window = WINDOW * writer.config.batch_size
    start = time.perf_counter()
    with tqdm(total=total, initial=min(output.lines, total), desc="lines", unit="line", dynamic_ncols=True) as bar:
        for first in range(output.lines // window * window, total, window):
            lines = range(first, min(first + window, total))
            new = max(0, output.lines - first)
            made = rewrite_together(lines, rows, writer, tally)
            output.append(made[new:])
            tally.lines += len(made) - new
            bar.update(len(made) - new)
            bar.set_postfix_str(f"{tally.tokens / (time.perf_counter() - start):.0f} tokens/s")


def rewrite_together(lines: range, rows: SourceRows, writer: Writer, tally: Tally) -> list[dict[str, Any]]:
    """The lines of one window: all first prompts go through the backbone together, then all second ones, and so on."""
    finished: dict[int, dict[str, Any]] = {}
    pending: dict[int, tuple[Rewriting, RowPrompt]] = {}

    def resume(line: int, rewriting: Rewriting, step: Callable[[], RowPrompt]) -> None:
        try:
            pending[line] = (rewriting, step())
        except StopIteration as end:
            finished[line] = end.value

    for line in lines:
        rewriting = rows.rewriting(line, writer.fits, tally)
        resume(line, rewriting, rewriting.__next__)
    turn = 0
    while pending:
        prompted, pending = pending, {}
        keys: list[Key] = [(line, turn) for line in prompted]
        answers = writer.write([prompt.tokens for _, prompt in prompted.values()], keys)
        tally.tokens += sum(map(len, answers))
        for (line, (rewriting, _)), tokens in zip(prompted.items(), answers, strict=True):
            resume(line, rewriting, partial(rewriting.send, GeneratedAnswer(tokens, cut=tokens[-1] not in writer.ends)))
        turn += 1
    return [{"line": line, **finished[line]} for line in lines]
