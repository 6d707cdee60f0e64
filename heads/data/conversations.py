"""Read a data set's turns as messages that chat templates accept, and tell bad rows from empty ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
ROLES = {"system": "system", "tool": "tool", "human": "user", "user": "user"}
ROLES |= dict.fromkeys(("assistant", "gpt", "chatgpt", "bard", "bing"), "assistant")


class BadRowError(ValueError):
    """A row does not have its format. It is skipped and counted; too many such rows stop the run."""


class EmptyRowError(ValueError):
    """A well-formed row has nothing to learn from. It is skipped and counted."""


class UnknownRoleError(BadRowError):
    """A turn has an unknown role."""

    def __init__(self, role: Any, number: int, known: Iterable[str]) -> None:
        super().__init__(f"turn {number} has the role {role!r}, which is none of {', '.join(known)}")
        self.role = str(role)


@dataclass
class Changes:
    """Changes to a conversation so that a template accepts it.

    Attributes:
        leading: replies before the first user's turn, which are dropped.
        joined: turns that were joined to the previous turn of the same role.
    """

    leading: int = 0
    joined: int = 0


def read_conversation(
    turns: Any, roles: Mapping[str, str] | None = None, changes: Changes | None = None
) -> list[Message]:
    """Messages, normalised, from turns with from/value or role/content keys.

    Args:
        roles: meanings of the data's own role names, beside those in ROLES.
        changes: counts what `normalise` changes.

    Raises:
        BadRowError: the turns do not have that form.
        EmptyRowError: as `normalise`.

    >>> read_conversation([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}])
    [{'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': 'Hello.'}]
    """
    if isinstance(turns, dict) and all(isinstance(values, list) for values in turns.values()):
        # A `datasets` sequence of structs arrives as one dict of lists.
        turns = [dict(zip(turns, values, strict=True)) for values in zip(*turns.values(), strict=False)]
    if not isinstance(turns, list):
        raise BadRowError(f"the conversation is {kind_of(turns)}, not a list of turns")
    known = {**ROLES, **(roles or {})}
    return normalise([read_turn(turn, number, known) for number, turn in enumerate(turns, start=1)], changes)


def read_turn(turn: Any, number: int, roles: Mapping[str, str] = ROLES) -> Message:
    """One turn as a message, with those of its other keys that templates know, such as tool_calls."""
    if not isinstance(turn, dict):
        raise BadRowError(f"turn {number} is {kind_of(turn)}, not a role with a text")
    turn = {key: value for key, value in turn.items() if value is not None}
    role, content = turn.pop("from", turn.pop("role", None)), turn.pop("value", turn.pop("content", ""))
    if not isinstance(role, str) or role not in roles:
        raise UnknownRoleError(role, number, roles)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if not isinstance(content, str):
        raise BadRowError(f"turn {number} has {kind_of(content)} for its text")
    extra = {key: turn[key] for key in ("name", "tool_calls", "tool_call_id", "reasoning_content") if turn.get(key)}
    return {"role": roles[role], "content": content, **extra}


def alpaca_messages(row: dict[str, Any]) -> list[Message]:
    """instruction (+ blank line + input) as the user's turn, output as the assistant's.

    >>> alpaca_messages({"instruction": "Add.", "input": "1 2", "output": "3"})
    [{'role': 'user', 'content': 'Add.\\n\\n1 2'}, {'role': 'assistant', 'content': '3'}]
    """
    for field in ("instruction", "output"):
        if not isinstance(row.get(field), str):
            raise BadRowError(f"{field!r} is {kind_of(row.get(field))}, not a text")
    if not isinstance(row.get("input") or "", str):
        raise BadRowError(f"'input' is {kind_of(row['input'])}, not a text")
    question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    return normalise([{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}])


def normalise(messages: Iterable[Message], changes: Changes | None = None) -> list[Message]:
    """A conversation as templates expect it: no empty turns, the user first, alternating roles, a reply at the end.

    Consecutive turns of one role are joined by a line break, unless they are of a tool or have keys beyond role and
    content. Replies before the first user turn are dropped, and so are turns after the last reply, from which nothing
    can be learned.

    Raises:
        EmptyRowError: no reply is left.
    """
    turns: list[Message] = []
    changes = changes or Changes()
    for message in messages:
        has_question = any(earlier["role"] == "user" for earlier in turns)
        if not message["content"].strip() and "tool_calls" not in message:
            continue
        if message["role"] in ("assistant", "tool") and not has_question:
            changes.leading += 1
            continue
        plain = set(message) == {"role", "content"} and message["role"] != "tool"
        if plain and turns and turns[-1]["role"] == message["role"] and set(turns[-1]) == set(message):
            message = {**message, "content": turns.pop()["content"] + "\n" + message["content"]}
            changes.joined += 1
        turns.append(message)
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    if not turns:
        raise EmptyRowError("no reply to a user's turn")
    return turns


def kind_of(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"
