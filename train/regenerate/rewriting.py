"""The prompts of one row and what its answers are made into: a conversation turn by turn, or a text.

A row is a coroutine: it yields a prompt, is sent the tokens that the backbone generated after it, and returns the row's
new fields. So rows of any kind, with any number of turns, share batches.

    conversation    user 1 | answer 1 | user 2 | answer 2
    first prompt    user 1                                  ->  a
    second prompt   user 1 | a | user 2                     ->  b
    returned        user 1 | a | user 2 | b
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from heads.data.chat import TURN_STAND_IN, BadRowError, ChatEncoder, Message, encode_chat

Rewriting: TypeAlias = Generator[list[int], list[int], dict[str, Any]]


@dataclass(kw_only=True)
class Tally:
    """Counts that are reported to the user at the end.

    Attributes:
        bad: rows that do not have their format; their lines are empty.
        first_problem: what is wrong with the first bad row.
        shortened: conversations that end before an answer that was empty or did not fit the backbone's positions.
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
    """The conversation with every answer generated anew from the turns before it, new answers included.

    A turn with tool_calls stays as it is, since the tools' results belong to it. The last turn is a generated one. An
    answer that was cut is dropped together with all later turns: the template would end it with an end of turn, which
    the backbone did not generate and the heads would learn.

    Raises:
        BadRowError: the template rejects the conversation.
    """
    rewritten: list[Message] = []
    written = 0
    for message in messages:
        if message["role"] != "assistant" or "tool_calls" in message:
            rewritten.append(message)
            continue
        prompt = encode_chat(tokenizer, template, rewritten)
        answer = (yield prompt) if fits(prompt) else []
        if answer and answer[-1] not in ends:
            tally.cut_answers += 1
            break
        content = tokenizer.decode(answer, skip_special_tokens=True).strip()
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

    The mask is 1 on generated tokens: 0 on the prompt, and on a frame that replaces another end token.

    Args:
        frame: tokens that training puts after every text; they replace the end token that the backbone generated.
    """
    answer = yield prompt
    mask = [1] * len(answer)
    if answer and answer[-1] in ends:
        mask = [*mask[:-1], *[int(answer[-1:] == list(frame))] * len(frame)]
        answer = [*answer[:-1], *frame]
    else:
        tally.cut_texts += 1
    tokens = [*prompt, *answer]
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
