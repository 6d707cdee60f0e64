"""Conversations as token ids, with a mask that is True on the assistant's replies and their end-of-turn tokens.

A chat template renders the conversation, and the ids are those of `tokenizer.apply_chat_template`. The mask comes from
the replies' character spans in that text and the tokenizer's offsets, so that repeated words, several turns and merged
spaces cannot shift it. A row whose spans are ambiguous is refused.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from heads.data.conversations import BadRowError, Message
from heads.data.rendering import RefusedByTemplateError, Rendered, Renderer, renderer_of

logger = logging.getLogger(__name__)

# U+2063 is invisible but not white space, so templates that trim a turn keep it.
TURN_STAND_IN = "\u2063headway-turn\u2063"

VICUNA_TEMPLATE = """\
{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- else -%}
{{- 'A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, ' -}}
{{- "detailed, and polite answers to the user's questions." -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- ' ' if loop.first or loop.previtem.role == 'system' else '' -}}{{- 'USER: ' + message.content + ' ' -}}
{%- elif message.role == 'assistant' -%}
{{- 'ASSISTANT:' -}}{%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}
{%- elif not loop.first or message.role != 'system' -%}
{{- raise_exception('the vicuna template knows user and assistant turns after one system turn, not ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}
"""


@functools.cache
def warn_once(sentence: str) -> None:
    logger.warning(sentence)


def encode_chat(tokenizer: PreTrainedTokenizerBase, template: str, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat, up to the place where the assistant's next reply begins.

    Raises:
        BadRowError: the template refuses the messages.
    """
    try:
        text, _ = renderer_of(template).render(messages, **tokenizer.special_tokens_map, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except RefusedByTemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise BadRowError(
            f"The chat template refuses turns of {roles} ({error}); give turns that the template knows."
        ) from None


def choose_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    """The Jinja source of "vicuna", of a file, or of the tokenizer (vicuna with a warning if it has none).

    Raises:
        ValueError: vicuna lacks an eos_token, or the file is not UTF-8.
        FileNotFoundError: there is no such file.
    """
    if chat_template is None and not tokenizer.chat_template:
        warn_once("The tokenizer has no chat template; the built-in vicuna template is used.")
        chat_template = "vicuna"
    if chat_template is None:
        return tokenizer.get_chat_template()
    if chat_template == "vicuna":
        if tokenizer.eos_token is None:
            raise ValueError(
                "The vicuna template ends a reply with eos_token, which this tokenizer lacks; set eos_token."
            )
        return VICUNA_TEMPLATE
    if not Path(chat_template).is_file():
        raise FileNotFoundError(f"chat_template {chat_template!r} is neither 'vicuna' nor a file; give one of the two.")
    try:
        return Path(chat_template).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"chat_template {chat_template!r} is no text in UTF-8 ({error}); give a Jinja file.") from None


class ChatEncoder:
    """Encodes conversations with one tokenizer and one template.

    By the vicuna template, [user "Hi", assistant "Hello."] becomes
    "<s>A chat between ... questions. USER: Hi ASSISTANT: Hello.</s>", and the mask is True on " Hello.</s>".
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str):
        if not tokenizer.is_fast:
            raise ValueError(
                f"Chat data needs character offsets, which {type(tokenizer).__name__} cannot give; "
                "load the tokenizer in its fast form (tokenizer.json)."
            )
        self.tokenizer = tokenizer
        self.template = template
        self.has_markers = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template) is not None
        added = tokenizer.added_tokens_decoder.values()
        self.special_texts = tuple({str(token) for token in added if token.special} | {*tokenizer.all_special_tokens})
        self.renderer = Renderer(template)
        with contextlib.suppress(BadRowError):  # a template may refuse this conversation and accept the data's
            self.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}])

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of the rendered conversation, and for each whether it belongs to a reply.

        Raises:
            BadRowError: the template refuses the conversation, or the spans of its replies are unknown.
        """
        text, spans = self.marked_spans(messages) if self.has_markers else self.found_spans(messages)
        spans = [self.fit_to_end_of_turn(text, start, end) for start, end in spans]
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return encoded["input_ids"], mask_tokens(encoded["offset_mapping"], spans)

    def render(self, messages: Sequence[Message], **settings: Any) -> Rendered:
        """The rendered text, and the spans that the template marks.

        Raises:
            BadRowError: the template refuses the conversation.
        """
        try:
            return self.renderer.render(messages, **self.tokenizer.special_tokens_map, **settings)
        except RefusedByTemplateError as error:
            raise BadRowError(f"the chat template refuses the conversation: {error}") from None

    def marked_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Text and the character spans inside {% generation %} markers.

        `apply_chat_template(return_assistant_tokens_mask=True)` cannot be used: it looks up the token at a span's first
        and last character. If the tokenizer trims offsets (GPT-2, GPT-NeoX), a space there has no token, and the other
        spans are dropped or everything to the end is marked.
        """
        return self.render(messages, return_assistant_tokens_mask=True)

    def found_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Text and the assistant's character spans, for templates without markers."""
        text = self.render(messages)[0]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return text, [self.find_span(text, messages, turn) for turn in turns]

    def find_span(self, text: str, messages: Sequence[Message], turn: int) -> tuple[int, int]:
        """The span from the end of the generation prompt before a turn to the end of the conversation up to that turn.

        A plain template renders both as prefixes of the whole text. Other templates render a turn differently once
        further turns follow (Qwen3 drops earlier thinking) or have no generation prompt. For them a stand-in replaces
        the turn's text, and the span lies between the unchanged text before and after it.
        """
        prompt = self.render(messages[:turn], add_generation_prompt=True)[0]
        answered = self.render(messages[: turn + 1])[0]
        has_prompt = prompt != self.render(messages[:turn])[0]
        if has_prompt and text.startswith(prompt) and text.startswith(answered) and len(prompt) < len(answered):
            return len(prompt), len(answered)
        replaced = [dict(message) for message in messages]
        replaced[turn]["content"] = TURN_STAND_IN
        before, _, after = self.render(replaced)[0].partition(TURN_STAND_IN)
        start, end = len(before), len(text) - len(after)
        if TURN_STAND_IN in after or start >= end or not (text.startswith(before) and text.endswith(after)):
            raise BadRowError(f"the chat template drops or rewrites turn {turn + 1}, so its mask is unknown")
        start = len(prompt) if has_prompt and text.startswith(prompt) else start
        end = len(answered) if text.startswith(answered) else end
        return start, end

    def fit_to_end_of_turn(self, text: str, start: int, end: int) -> tuple[int, int]:
        """The span, with its end moved to just after its end-of-turn token: on over spaces, or back over white space.

        "<a>Hello.<|im_end|>\\n"  ->  the span ends after <|im_end|>, whether or not it held that token or the break
        """
        trimmed = len(text[:end].rstrip())
        if trimmed > start and text[start:trimmed].endswith(self.special_texts):
            return start, trimmed
        following = end + len(text[end:]) - len(text[end:].lstrip(" "))
        found = [special for special in self.special_texts if text.startswith(special, following)]
        return start, following + max(map(len, found)) if found else end


def mask_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """True for tokens that share a character with a span.

    A token without width is a space whose offsets were trimmed; it covers what lies between its neighbours.

    >>> mask_tokens([(0, 4), (4, 6), (6, 9)], spans=[(5, 7)])
    [False, True, True]
    """
    mask, covered = [], 0
    for start, end in offsets:
        start = min(start, covered) if start == end else start
        covered = max(covered, end)
        mask.append(any(start < span_end and end > span_start for span_start, span_end in spans))
    return mask
