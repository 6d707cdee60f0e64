"""Rewrite one row with the backbone's answers: a conversation turn by turn, or a text.

A row is a coroutine: it yields a prompt, is sent the backbone's answer, and returns the row's new fields. So rows of
any kind, with any number of turns, share batches, and are rewritten alike whether this process or a server answers.

    conversation    user 1 | answer 1 | user 2 | answer 2
    first prompt    user 1                                  ->  a
    second prompt   user 1 | a | user 2                     ->  b
    returned        user 1 | a | user 2 | b
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from heads.data.chat import TURN_STAND_IN, ChatEncoder, encode_chat
from heads.data.conversations import BadRowError, Message
from heads.data.rows import TEXT_OPTIONS


class RowPrompt(NamedTuple):
    """What the backbone is to answer.

    Attributes:
        tokens: the prompt as training encodes it.
        messages: the turns of a conversation; None for a text.
    """

    tokens: list[int]
    messages: tuple[Message, ...] | None = None


class GeneratedAnswer(NamedTuple):
    """What the backbone generated.

    Attributes:
        tokens: all generated tokens, an end token included; None where a server's text is used instead.
        cut: --max-new-tokens ended it.
        text: a server's text.
    """

    tokens: list[int] | None
    cut: bool
    text: str = ""

    def read_text(self, tokenizer: Any) -> str:
        return self.text if self.tokens is None else str(tokenizer.decode(self.tokens, skip_special_tokens=True))

    def read_tokens(self, tokenizer: Any) -> list[int]:
        return list(tokenizer(self.text, **TEXT_OPTIONS)["input_ids"]) if self.tokens is None else self.tokens


Rewriting: TypeAlias = Generator[RowPrompt, GeneratedAnswer | None, dict[str, Any]]
"""A row's coroutine; it is sent None in place of an answer that a server refused."""


@dataclass(kw_only=True)
class Tally:
    """Counts that are reported to the user at the end.

    Attributes:
        bad: rows that do not have their format; their lines are empty.
        first_problem: what is wrong with the first bad row.
        shortened: conversations that end before an answer that was empty or did not fit the backbone's positions.
        cut_answers: conversations that end before an answer that --max-new-tokens cut.
        cut_texts: texts that --max-new-tokens ended.
        refused: answers that a server did not give, by the reason that it gave.
        other_prompts: prompts that a server encoded as other tokens than training does.
        without_thoughts: answers from which a server had split off the reasoning.
        retokenized: answers of texts that a server gave without their tokens.
    """

    lines: int = 0
    tokens: int = 0
    bad: int = 0
    first_problem: str = ""
    shortened: int = 0
    cut_answers: int = 0
    cut_texts: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    other_prompts: int = 0
    without_thoughts: int = 0
    retokenized: int = 0


def rewrite_chat(
    messages: Sequence[Message],
    *,
    tokenizer: Any,
    template: str,
    fits: Callable[[Sequence[int]], bool],
    tally: Tally,
) -> Rewriting:
    """The conversation with every answer generated anew from the turns before it, new answers included.

    A turn with tool_calls stays as it is, since the tools' results belong to it. The result ends with a generated turn.
    An answer that was cut is dropped together with all later turns: the template would close it with an end of turn
    that the backbone did not generate, and the heads would learn that.

    Raises:
        BadRowError: the template rejects the conversation.
    """
    rewritten: list[Message] = []
    written = 0
    for message in messages:
        if message["role"] != "assistant" or "tool_calls" in message:
            rewritten.append(message)
            continue
        prompt = RowPrompt(encode_chat(tokenizer, template, rewritten), tuple(rewritten))
        answer = (yield prompt) if fits(prompt.tokens) else GeneratedAnswer([], cut=False)
        if answer is None:
            break
        if answer.cut:
            tally.cut_answers += 1
            break
        content = answer.read_text(tokenizer).strip()
        if not content:
            tally.shortened += 1
            break
        rewritten.append({"role": "assistant", "content": content})
        written = len(rewritten)
    return {"messages": rewritten[:written]}


def continue_text(
    prompt: list[int], *, frame: Sequence[int], ends: Sequence[int], tokenizer: Any, tally: Tally
) -> Rewriting:
    """The prompt and its continuation by the backbone, as tokens (for training) and as text (for people).

    The mask is 0 on the prompt and 1 on generated tokens. On the frame it is 1 only if the backbone generated the same
    end token.

    Args:
        frame: tokens that training puts after every text; they replace the end token that the backbone generated.
    """
    answer = yield RowPrompt(prompt)
    if answer is None:
        return {"input_ids": []}
    said = answer.read_tokens(tokenizer)
    tally.retokenized += answer.tokens is None
    end = said[-1:] if said and said[-1] in ends else []
    said, mask = said[: len(said) - len(end)], [1] * (len(said) - len(end))
    if answer.cut:
        tally.cut_texts += 1
    else:
        said, mask = [*said, *frame], [*mask, *[int(end == list(frame))] * len(frame)]
    tokens = [*prompt, *said]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return {"input_ids": tokens, "loss_mask": [0] * len(prompt) + mask, "text": text}


def end_of_turn(tokenizer: Any, template: str) -> list[int]:
    """The token that the template puts after an answer, if it is a special token.

    ChatML: "<|im_start|>assistant\\nHello.<|im_end|>\\n"  ->  the id of <|im_end|>, whatever eos_token is
    """
    encoder = ChatEncoder(tokenizer, template)
    try:
        text, _ = encoder.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": TURN_STAND_IN}])
    except BadRowError:  # the template may reject this conversation and accept others
        return []
    after = text.partition(TURN_STAND_IN)[2].lstrip()
    found = sorted((special for special in encoder.special_texts if after.startswith(special)), key=len)
    return [int(tokenizer.convert_tokens_to_ids(found[-1]))] if found else []
