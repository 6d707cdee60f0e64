"""The last output of `regenerate-data`: what was written, cut, bad or refused, and what a server did differently."""

from __future__ import annotations

import sys

from train.regenerate.config import RegenerateConfig
from train.regenerate.output import OutputFile
from train.regenerate.rewriting import Tally
from train.regenerate.server import Server


def report(output: OutputFile, settings: RegenerateConfig, tally: Tally, total: int) -> None:
    sentences = [
        f"{output.path}: {output.lines:,} of {total:,} lines, {tally.lines:,} of them generated now with "
        f"{tally.tokens:,} tokens",
        f"{tally.cut_texts:,} texts were ended by --max-new-tokens" if tally.cut_texts else "",
        f"{tally.cut_answers:,} conversations end before an answer that --max-new-tokens {settings.max_new_tokens} "
        f"cut; raise it to keep such answers"
        if tally.cut_answers
        else "",
        f"{tally.shortened:,} conversations end before an answer that was empty or too long" if tally.shortened else "",
        f"{tally.bad:,} bad rows have empty lines; the first: {tally.first_problem}" if tally.bad else "",
    ]
    sys.stdout.write("\n".join(filter(None, sentences)) + "\n")


def report_server(server: Server) -> None:
    """Report where a server did not do what it was asked."""
    tally = server.tally
    refused = sorted(tally.refused.items(), key=lambda item: -item[1])
    sentences = [
        *(f"{count:,} answers were refused by the server, and their rows end there: {why}" for why, count in refused),
        f"{tally.other_prompts:,} prompts were other tokens on the server than in training: its chat template is "
        f"another one; give --data.chat_template, and they are sent as tokens"
        if tally.other_prompts
        else "",
        f"{tally.without_thoughts:,} answers lack their reasoning, which the server had split off; start it without a "
        f"reasoning parser to keep it"
        if tally.without_thoughts
        else "",
        f"{tally.retokenized:,} texts came without token ids and were tokenised here, which may split words otherwise"
        if tally.retokenized
        else "",
        f"the server does not take {', '.join(server.left_out)}; it was asked without" if server.left_out else "",
    ]
    sys.stdout.write("".join(f"{sentence}\n" for sentence in sentences if sentence))
