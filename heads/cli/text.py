"""The commands `headway generate` and `headway chat`: text goes to stdout, what is said about it to stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import torch
import typer

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import Opened, open_draft_model, open_heads
from heads.cli.conversation import Conversation, converse
from heads.cli.options import (
    BackboneOption,
    Color,
    ColorOption,
    CompileOption,
    DraftModelOption,
    DtypeOption,
    Heads,
    Highlight,
    LookupOption,
    NewTokens,
    Penalty,
    Plain,
    Seed,
    Temperature,
    TopK,
    TopP,
    TreeOption,
    read_tree_option,
    say_aside,
    use_color,
)
from heads.cli.speaker import Decoding, Sampling, Speaker
from heads.decoding.draft_model_decoding import DraftModelDecoding
from heads.decoding.proposers.draft_length import DEFAULT_K
from heads.decoding.tree_decoding import TreeDecoding


def generate_command(
    heads: Heads,
    prompt: Annotated[str | None, typer.Option(help="Text to go on from; by default what comes in by a pipe.")] = None,
    backbone: BackboneOption = None,
    max_new_tokens: NewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: Penalty = 1.0,
    tree: TreeOption = None,
    lookup: LookupOption = None,
    compile: CompileOption = None,
    draft_model: DraftModelOption = None,
    plain: Plain = False,
    highlight: Highlight = False,
    color: ColorOption = "auto",
    seed: Seed = 0,
    dtype: DtypeOption = "auto",
) -> None:
    """Stream the text that follows a prompt; the last line, on stderr, says how fast."""
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty)
    text = read_prompt(prompt)
    opened = open_heads([heads], backbone, dtype)
    decoding = build_decoding(
        opened, tree, lookup, compile, draft_model, plain, highlight, dtype, greedy=temperature == 0
    )
    speaker = build_speaker(opened, decoding, sampling, max_new_tokens, highlight, color)
    torch.manual_seed(seed)
    stream = speaker.speak(speaker.encode(text))
    typer.echo()
    say_aside(stream.summary(), color)


def chat_command(
    heads: Heads,
    backbone: BackboneOption = None,
    max_new_tokens: NewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    repetition_penalty: Penalty = 1.0,
    tree: TreeOption = None,
    lookup: LookupOption = None,
    compile: CompileOption = None,
    draft_model: DraftModelOption = None,
    plain: Plain = False,
    highlight: Highlight = False,
    color: ColorOption = "auto",
    seed: Seed = 0,
    dtype: DtypeOption = "auto",
) -> None:
    """Talk with a chat model. /reset begins anew, /exit or end of input leaves, Ctrl-C stops an answer."""
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, repetition_penalty=repetition_penalty)
    opened = open_heads([heads], backbone, dtype)
    greedy = temperature == 0
    decoding = build_decoding(
        opened, tree, lookup, compile, draft_model, plain, highlight, dtype, greedy=greedy, keep_caches=True
    )
    speaker = build_speaker(opened, decoding, sampling, max_new_tokens, highlight, color)
    torch.manual_seed(seed)
    converse(Conversation(speaker), say=lambda text: say_aside(text, color))


def read_prompt(prompt: str | None) -> str:
    """The prompt, or what a pipe brings, without its last line break."""
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError("No prompt was given; give --prompt TEXT, or send the text through a pipe.")
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise ValueError("The prompt is empty; give at least one word.")
    return prompt


def build_decoding(
    opened: Opened,
    tree: str | None,
    lookup: int | None,
    compile: bool | None,
    draft_model: str | None,
    plain: bool,
    highlight: bool,
    dtype: Dtype,
    *,
    greedy: bool,
    keep_caches: bool = False,
) -> Decoding | None:
    """How to decode; None is plain generation.

    Raises:
        ValueError: options that have no meaning together.
    """
    of_heads = any(option is not None for option in (tree, lookup, compile))
    drafts = highlight or draft_model is not None or of_heads
    if plain and drafts:
        raise ValueError(
            "--plain drafts nothing, so --highlight, --tree, --lookup, --compile and --draft-model have no meaning "
            "with it; "
            "leave out --plain."
        )
    if plain:
        return None
    if draft_model is None:
        (token_heads,) = opened.token_heads.values()
        shape = read_tree_option(tree)
        return TreeDecoding(token_heads, shape, lookup=lookup, compile=compile, keep_caches=keep_caches)
    if of_heads:
        raise ValueError("--draft-model drafts in place of the heads; leave out --tree, --lookup, --compile with it.")
    # Greedy text does not depend on the length; sampled text does, and --seed is to repeat it.
    return DraftModelDecoding(open_draft_model(draft_model, dtype), "adaptive" if greedy else DEFAULT_K)


def build_speaker(
    opened: Opened, decoding: Decoding | None, sampling: Sampling, new_tokens: int, highlight: bool, color: Color
) -> Speaker:
    return Speaker(
        model=opened.model,
        tokenizer=opened.tokenizer,
        decoding=decoding,
        sampling=sampling,
        new_tokens=new_tokens,
        highlight=highlight and use_color(sys.stdout, color),
    )
