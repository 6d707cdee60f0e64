"""The commands `headway generate` and `headway chat`: text goes to stdout, its speed and other remarks to stderr."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from heads.backbone.loading import Dtype
from heads.checkpoint.opening import Opened, open_draft_model
from heads.cli.option_groups import with_groups
from heads.cli.options import (
    ColorOptions,
    HeadsIfAny,
    LoadingOptions,
    SamplingOptions,
    TreeOptions,
    print_aside,
    use_color,
)
from heads.cli.writing.conversation import Conversation, converse
from heads.cli.writing.streaming import ExactDecoding, TextGenerator
from heads.decoding.draft_model_decoding import DraftModelDecoding
from heads.decoding.proposers.draft_length import DEFAULT_K
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tree_decoding import TreeDecoding


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(TreeOptions):
    """Drafting."""

    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder or hub name of a small model with the backbone's tokenizer that drafts instead of the heads.",
        ),
    ] = None
    plain: Annotated[bool, typer.Option("--plain", help="Draft nothing: the backbone's plain generate.")] = False

    @property
    def without_heads(self) -> bool:
        return self.plain or self.draft_model is not None

    def build(self, opened: Opened, dtype: Dtype, *, greedy: bool, keep_caches: bool = False) -> ExactDecoding | None:
        """The decoding method; None is plain generation."""
        if self.plain:
            return None
        if self.draft_model is not None:
            # Greedy text does not depend on the draft length; sampled text does, and --seed must reproduce it.
            return DraftModelDecoding(
                open_draft_model(self.draft_model, dtype),
                "adaptive" if greedy else DEFAULT_K,
                lookup=DEFAULT_LOOKUP if self.lookup is None else self.lookup,
                keep_caches=keep_caches,
            )
        (token_heads,) = opened.token_heads.values()
        return TreeDecoding(token_heads, self.shape, lookup=self.lookup, compile=self.compile, keep_caches=keep_caches)


WITHOUT_HEADS = "--draft-model MODEL, or --backbone MODEL and --plain,"


@with_groups
def generate_command(
    heads: HeadsIfAny = None,
    *,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text to continue; by default it is read from a pipe.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens to generate.")] = 128,
    sampling: SamplingOptions,
    decoding: DecodingOptions,
    colors: ColorOptions,
    loading: LoadingOptions,
) -> None:
    """Stream the text that follows a prompt; the last line, on stderr, has the speed."""
    check_options(decoding, colors, loading)
    text = read_prompt(prompt)
    opened = loading.open_any([heads] if heads else [], without_heads=decoding.without_heads, instead=WITHOUT_HEADS)
    method = decoding.build(opened, loading.dtype, greedy=sampling.greedy)
    text_generator = build_generator(opened, method, sampling, max_new_tokens, colors)
    torch.manual_seed(sampling.seed)
    streamed = text_generator.stream(text_generator.encode(text))
    typer.echo()
    print_aside(streamed.summary(), colors.color)
    if streamed.stopped:
        raise typer.Exit(130)


@with_groups
def chat_command(
    heads: HeadsIfAny = None,
    *,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens of an answer.")] = 512,
    sampling: SamplingOptions,
    decoding: DecodingOptions,
    colors: ColorOptions,
    loading: LoadingOptions,
) -> None:
    """Talk with a chat model. /reset starts a new conversation, /exit or end of input ends, Ctrl-C stops an answer."""
    check_options(decoding, colors, loading)
    opened = loading.open_any([heads] if heads else [], without_heads=decoding.without_heads, instead=WITHOUT_HEADS)
    method = decoding.build(opened, loading.dtype, greedy=sampling.greedy, keep_caches=True)
    text_generator = build_generator(opened, method, sampling, max_new_tokens, colors)
    torch.manual_seed(sampling.seed)
    converse(Conversation(text_generator), print_aside=lambda line: print_aside(line, colors.color))


def check_options(decoding: DecodingOptions, colors: ColorOptions, loading: LoadingOptions) -> None:
    """Refuse options that contradict each other.

    Raises:
        ValueError: --plain with options about drafting, --draft-model with options of the heads, or --pack with
            --compile.
    """
    if decoding.plain and (colors.highlight or decoding.draft_model is not None or decoding.any_given):
        raise ValueError(
            "--plain drafts nothing, so --highlight, --tree, --lookup, --compile and --draft-model have no effect with "
            "it; leave out --plain."
        )
    if decoding.draft_model is not None and not (decoding.tree is None and decoding.compile is None):
        raise ValueError("--draft-model drafts instead of the heads; leave out --tree and --compile with it.")
    decoding.refuse_packing(loading)


def read_prompt(prompt: str | None) -> str:
    """The prompt, or the text from a pipe without its last line break."""
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError("No prompt was given; give --prompt TEXT, or send the text through a pipe.")
        prompt = sys.stdin.read().removesuffix("\n")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes that were read as they came
        raise ValueError("The prompt is no text in UTF-8; give one.") from None
    if not prompt:
        raise ValueError("The prompt is empty; give at least one word.")
    return prompt


def build_generator(
    opened: Opened, method: ExactDecoding | None, sampling: SamplingOptions, new_tokens: int, colors: ColorOptions
) -> TextGenerator:
    return TextGenerator(
        model=opened.model,
        tokenizer=opened.tokenizer,
        decoding=method,
        sampling=sampling,
        new_tokens=new_tokens,
        highlight=colors.highlight and use_color(sys.stdout, colors.color),
    )
