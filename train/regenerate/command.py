"""`python -m train regenerate-data`: its flags, and the way from rows to lines.

Lines are written in windows of some batches: within one, texts of like length are written together and conversations
turn by turn; then its lines are appended in order. Windows begin at fixed lines, so a run that goes on writes what it
would have written.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from tqdm.auto import tqdm

from heads.backbone.loading import load_backbone, load_tokenizer, read_vocab_size
from heads.checkpoint import save_load
from heads.checkpoint.opening import default_device
from heads.decoding.tree_decoding import TreeDecoding
from train.config import TrainConfig, read_config
from train.data.hidden_states import fingerprint
from train.regenerate.config import RegenerateConfig
from train.regenerate.output import OutputFile
from train.regenerate.rewriting import Rewriting, Tally
from train.regenerate.source import SourceRows
from train.regenerate.writing import Key, Writer

WINDOW = 4
"""Batches between two appends: more sort better by length, fewer lose less when a run is killed."""
NOT_COMPARED = ("batch_size",)
"""Fields that change the last bits of logits alone, so a run may go on with others (on a device with less memory)."""


def regenerate(arguments: list[str]) -> None:
    """Write a run's training data as its backbone would say it: answers of conversations, ends of texts.

    The file is data for training: `data.train: [{path: FILE.jsonl}]`. A run that was killed goes on where it stopped
    when the same command is given again.
    """
    options, rest = build_parser().parse_known_args(arguments)
    fields = [field.name for field in dataclasses.fields(RegenerateConfig)]
    settings = RegenerateConfig(**{name: getattr(options, name) for name in fields})
    settings.check()
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit {options.limit} was given; allowed are 1 row and more.")
    config = read_config(rest, prog="python -m train regenerate-data --out FILE.jsonl")
    if config.backbone.random_weights:
        raise ValueError("backbone.random_weights was given: such a backbone has nothing to say; give a trained one.")
    transformers.logging.set_verbosity_error()  # generate would remark on settings that are meant
    tokenizer = load_tokenizer(config.backbone)
    model = load_backbone(config.backbone, default_device())
    rows = SourceRows(config.data, settings, tokenizer, read_vocab_size(config.backbone))
    writer = Writer(model, settings, find_all_ends(model, rows), open_decoding(options.heads, model))
    refuse_long_prompts(writer, settings, rows)
    with OutputFile(options.out, what_decides(config, settings, rows, model)) as output:
        try:
            tally = write_lines(rows, writer, output, settings, options.limit)
        except KeyboardInterrupt:
            told = f"interrupted: {output.lines:,} lines are whole in {output.path}; the same command goes on.\n"
            sys.stderr.write(told)
            sys.exit(130)
        if output.lines == rows.lines:
            output.finish()
    report(output, settings, tally, rows.lines)


def build_parser() -> argparse.ArgumentParser:
    default = RegenerateConfig()
    parser = argparse.ArgumentParser(
        prog="python -m train regenerate-data",
        description=regenerate.__doc__,
        epilog="--config FILE and every flag of train.py may be given too; backbone and data are what is read of them: "
        "--config configs/demo/grounded.yaml --data.seed 1. See docs/data.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", required=True, metavar="FILE.jsonl", help="what is written, a line for each row; gone on with")
    add("--temperature", type=float, default=default.temperature, help="of draws; 0 is greedy (%(default)s)")
    add("--top-p", type=float, default=default.top_p, help="draw from the likeliest tokens of this sum (%(default)s)")
    add(
        "--max-new-tokens", type=int, default=default.max_new_tokens, metavar="N",
        help="tokens of an answer, or behind a text's prompt, at most (%(default)s)",
    )  # fmt: skip
    add(
        "--prompt-tokens", type=int, default=default.prompt_tokens, metavar="N",
        help="tokens of a text that stay as its prompt (%(default)s)",
    )  # fmt: skip
    add(
        "--prompts-per-text", type=int, default=default.prompts_per_text, metavar="N",
        help="places of a text, evenly spread, that a prompt is taken from (%(default)s)",
    )  # fmt: skip
    add("--batch-size", type=int, default=default.batch_size, metavar="N", help="rows written at once (%(default)s)")
    add("--limit", type=int, metavar="N", help="write the first N rows alone")
    add("--seed", type=int, default=default.seed, help="of the draws (%(default)s)")
    add("--heads", metavar="FOLDER", help="heads on this backbone, to write the same text faster")
    return parser


def open_decoding(folder: str | None, model: Any) -> TreeDecoding | None:
    """
    Raises:
        ValueError: no heads there, or heads of another backbone.
    """
    return None if folder is None else TreeDecoding(save_load.load(folder, model))


def find_all_ends(model: Any, rows: SourceRows) -> list[int]:
    """Those of the tokenizer and template, and those that the backbone's own generation settings name."""
    own = model.generation_config.eos_token_id
    own = [] if own is None else own if isinstance(own, list) else [own]
    rows.ends = list(dict.fromkeys([*rows.ends, *own]))
    return rows.ends


def refuse_long_prompts(writer: Writer, settings: RegenerateConfig, rows: SourceRows) -> None:
    """
    Raises:
        ValueError: prompts of texts leave too little room, or those of all conversations do.
    """
    if rows.is_chat:
        refuse_long_chats(writer, settings, rows)
    elif not writer.fits(range(1 + settings.prompt_tokens)):
        raise ValueError(
            f"--prompt-tokens {settings.prompt_tokens} and --max-new-tokens {settings.max_new_tokens} are more than "
            f"the backbone's {writer.longest} positions, of which one is for the token before a text; lower one."
        )


def refuse_long_chats(writer: Writer, settings: RegenerateConfig, rows: SourceRows) -> None:
    """The first conversation that fits ends the search; it is through all of them only where every one is too long."""
    asked = False
    for prompt in rows.first_prompts():
        if writer.fits(prompt):
            return
        asked = True
        if not writer.fits(range(1)):
            break
    if asked:
        raise ValueError(
            f"--max-new-tokens {settings.max_new_tokens} and the first question of any conversation, in the chat "
            f"template, are more than the backbone's {writer.longest} positions; lower it, or give shorter "
            f"conversations."
        )


def what_decides(config: TrainConfig, settings: RegenerateConfig, rows: SourceRows, model: Any) -> dict[str, Any]:
    """All that the lines depend on; what a run that goes on must have as well."""
    backbone, data = config.backbone, config.data
    template = None if rows.template is None else hashlib.sha256(rows.template.encode()).hexdigest()[:16]
    kept = {name: value for name, value in dataclasses.asdict(settings).items() if name not in NOT_COMPARED}
    return {
        "backbone": backbone.name_or_path,
        "revision": backbone.revision,
        "weights": fingerprint(model, without=("transformers_version",)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": backbone.quantization,
        "tokenizer": backbone.tokenizer,
        "sources": [dataclasses.asdict(source) for source in data.train],
        "rows": rows.fingerprint,
        "lines": rows.lines,
        "ends": rows.ends,
        "data.seed": data.seed,
        "chat_template": template,
        **kept,
    }


def write_lines(
    rows: SourceRows, writer: Writer, output: OutputFile, settings: RegenerateConfig, limit: int | None
) -> Tally:
    """All lines that the file does not have yet; of the first `limit` rows alone where it is given."""
    total = rows.per_row * (len(rows) if limit is None else min(limit, len(rows)))
    window = WINDOW * settings.batch_size
    tally = Tally()
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
    return tally


def rewrite_together(lines: range, rows: SourceRows, writer: Writer, tally: Tally) -> list[dict[str, Any]]:
    """The lines of one window: every row's first question together, then every row's second, until all are through."""
    finished: dict[int, dict[str, Any]] = {}
    asking: dict[int, tuple[Rewriting, list[int]]] = {}

    def go_on(line: int, rewriting: Rewriting, step: Callable[[], list[int]]) -> None:
        try:
            asking[line] = (rewriting, step())
        except StopIteration as end:
            finished[line] = end.value

    for line in lines:
        rewriting = rows.rewriting(line, writer.fits, tally)
        go_on(line, rewriting, rewriting.__next__)
    turn = 0
    while asking:
        asked, asking = asking, {}
        keys: list[Key] = [(line, turn) for line in asked]
        answers = writer.write([prompt for _, prompt in asked.values()], keys)
        tally.tokens += sum(map(len, answers))
        for (line, (rewriting, _)), answer in zip(asked.items(), answers, strict=True):
            go_on(line, rewriting, partial(rewriting.send, answer))
        turn += 1
    return [{"line": line, **finished[line]} for line in lines]


def report(output: OutputFile, settings: RegenerateConfig, tally: Tally, total: int) -> None:
    told = [
        f"{output.path}: {output.lines:,} of {total:,} lines, {tally.lines:,} of them written now with "
        f"{tally.tokens:,} tokens",
        f"{tally.cut_texts:,} texts were ended by --max-new-tokens" if tally.cut_texts else "",
        f"{tally.cut_answers:,} conversations end before an answer that --max-new-tokens {settings.max_new_tokens} "
        f"cut; raise it to keep such answers"
        if tally.cut_answers
        else "",
        f"{tally.shortened:,} conversations end before an answer that was empty or too long" if tally.shortened else "",
        f"{tally.bad:,} bad rows have empty lines; the first: {tally.first_problem}" if tally.bad else "",
    ]
    sys.stdout.write("\n".join(filter(None, told)) + "\n")
