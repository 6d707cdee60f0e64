"""What is asked of the backbone for one row, and what becomes of its answers: a conversation turn by turn, or a text.

A row is a coroutine: it yields a prompt, is sent the tokens that the backbone wrote behind it, and returns the row's
new fields. So rows of any kind and number of turns go through the same batches.

    conversation   user 1 | answer 1 | user 2 | answer 2
    asked first    user 1 ->                                     a
    asked second   user 1 | a | user 2 ->                                b
    returned       user 1 | a | user 2 | b
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jinja2

from heads.data.chat import TURN_STAND_IN, ChatEncoder, Message, encode_chat

Rewriting: TypeAlias = Generator[list[int], list[int], dict[str, Any]]


@dataclass(kw_only=True)
class Tally:
    """What a user would want to know of a finished file.

    Attributes:
        bad: rows that are not what their format asks for; their lines are empty.
        first_problem: of the first of them.
        shortened: conversations that end before an answer that did not fit the backbone's positions or came out empty.
        cut_answers: conversations that end before an answer that --max-new-tokens cut.
        cut_texts: texts that --max-new-tokens ended.
    """

    lines: int = 0
    tokens: int = 0
    bad: int = 0
    first_problem: str = ""
    shortened: int = 0
    cut_answers: int = 0
    cut_texts: int = 0


def rewrite_chat(
    messages: Sequence[Message],
    *,
    tokenizer: Any,
    template: str,
    ends: Sequence[int],
    fits: Callable[[Sequence[int]], bool],
    tally: Tally,
) -> Rewriting:
    """The conversation with every answer written anew behind what was said before it, new answers included.

    A turn with tool_calls stays as it is, since the tools' answers belong to it. The last turn is one that was written.
    An answer that was cut is left out with all behind it: the template would end it with an end of turn, which the
    backbone never said and heads would learn.

    Raises:
        BadRowError: the template refuses the conversation.
    """
    told: list[Message] = []
    written = 0
    for message in messages:
        if message["role"] != "assistant" or "tool_calls" in message:
            told.append(message)
            continue
        prompt = encode_chat(tokenizer, template, told)
        answer = (yield prompt) if fits(prompt) else []
        if answer and answer[-1] not in ends:
            tally.cut_answers += 1
            break
        content = tokenizer.decode(answer, skip_special_tokens=True).strip()
        if not content:
            tally.shortened += 1
            break
        told.append({"role": "assistant", "content": content})
        written = len(told)
    return {"messages": told[:written]}


def continue_text(
    prompt: list[int], *, frame: Sequence[int], ends: Sequence[int], tokenizer: Any, tally: Tally
) -> Rewriting:
    """The prompt and what the backbone writes behind it, as tokens (what is trained on) and as text (to be read).

    The mask is 1 on what the backbone said: not on the prompt, nor on a frame that is not the end that it chose.

    Args:
        frame: tokens behind every text that training sees; they stand where the backbone ended the text itself.
    """
    answer = yield prompt
    said = [1] * len(answer)
    if answer and answer[-1] in ends:
        said = [*said[:-1], *[int(answer[-1:] == list(frame))] * len(frame)]
        answer = [*answer[:-1], *frame]
    else:
        tally.cut_texts += 1
    tokens = [*prompt, *answer]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return {"input_ids": tokens, "loss_mask": [0] * len(prompt) + said, "text": text}


def end_of_turn(tokenizer: Any, template: str) -> list[int]:
    """The token that the template puts behind an answer, where it is a special one.

    ChatML: "<|im_start|>assistant\\nHello.<|im_end|>\\n"  ->  the id of <|im_end|>, whatever eos_token is
    """
    encoder = ChatEncoder(tokenizer, template)
    try:
        text, _ = encoder.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": TURN_STAND_IN}])
    except jinja2.TemplateError:  # it may object to this conversation and take others
        return []
    after = text.partition(TURN_STAND_IN)[2].lstrip()
    found = sorted((special for special in encoder.special_texts if after.startswith(special)), key=len)
    return [int(tokenizer.convert_tokens_to_ids(found[-1]))] if found else []
