"""Render chat templates, which are downloaded programs, in a child process with limits of time and memory.

A template with `{{ 1/0 }}`, an endless loop or `'a' * 10**10` makes only its conversation a bad row; after three that
exceed a limit, an error ends the run. A check inside this process could not stop every template, since a single
operation can take hours or gigabytes. The child is forked, which takes milliseconds, sets its own limits, and exits
after some seconds without a request.

    this process ── messages, pickled ──► child: SECONDS of computing, MEBIBYTES beyond the parent's memory
                 ◄── text and spans, JSON ──      for each conversation, MAX_CHARACTERS of text
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

SECONDS = 5.0  # of computing for one conversation; an ordinary one takes a millisecond
MEBIBYTES = 512
MAX_CHARACTERS = 1 << 24
MAX_OVERRUNS = 3  # conversations over the limits, after which the template is refused
OVER = (1, -signal.SIGPROF, -signal.SIGALRM)
"""Exit codes of a child that took too much memory or time; after any other one a new child is started."""
IDLE_SECONDS = 10.0  # then a child exits, since it holds a copy of the parent's memory
SHOWN_CHARACTERS = 200  # of a template's own error message
LIMITS = f"{SECONDS:g} s of computing, {MEBIBYTES} MiB or {MAX_CHARACTERS:,} characters"

Rendered = tuple[str, list[tuple[int, int]]]


class RefusedByTemplateError(ValueError):
    """A template does not render a conversation; the message is the template's own if it has one."""


class Renderer:
    """Renders conversations with one template. Threads take turns; a forked or unpickled copy has its own child.

    >>> Renderer("{{ messages[0].content }}!").render([{"role": "user", "content": "Hi"}])
    ('Hi!', [])
    """

    def __init__(self, template: str) -> None:
        self.template = template
        self.overruns = 0
        self._begin_here()

    def __reduce__(self) -> tuple[Any, ...]:
        return Renderer, (self.template,)

    def render(self, messages: Sequence[dict[str, Any]], **settings: Any) -> Rendered:
        """The text, and the spans inside {% generation %} markers if `return_assistant_tokens_mask` asks for them.

        Raises:
            RefusedByTemplateError: the template raises an error, or exceeds a limit.
            ValueError: it is not Jinja, or exceeded a limit for several conversations.
        """
        if self._pid != os.getpid():
            self._begin_here()
        request = (list(messages), settings)
        if not hasattr(os, "fork"):  # Windows: errors are caught, but nothing is limited
            return self._read(answer(self.template, *request))
        with self._lock:
            return self._read(self._ask(request))

    def _begin_here(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._child: Child | None = None

    def _ask(self, request: Any) -> dict[str, Any]:
        for _ in range(2):  # an idle child may have exited just now, or been killed
            if self._child is None:
                self._child = Child(self.template)
            try:
                self._child.connection.send(request)
                return dict(json.loads(self._child.connection.recv_bytes()))
            except (EOFError, OSError):
                left, self._child = self._child.wait(), None
                if os.waitstatus_to_exitcode(left) in OVER:
                    return {"over": True}
            except BaseException:  # the reply may still arrive, and the next request would get it
                child, self._child = self._child, None
                child.end()
                raise
        return {"over": True}

    def _read(self, reply: dict[str, Any]) -> Rendered:
        if "syntax" in reply:
            raise ValueError(f"The chat template is not valid Jinja: {reply['syntax']}.")
        if "refused" in reply:
            raise RefusedByTemplateError(reply["refused"])
        if "over" in reply:
            self.overruns += 1
            if self.overruns >= MAX_OVERRUNS:
                raise ValueError(
                    f"The chat template took more than {LIMITS} for {self.overruns} conversations; use another "
                    f"template, such as chat_template: vicuna."
                )
            raise RefusedByTemplateError(f"it takes more than {LIMITS}")
        return reply["text"], [(start, end) for start, end in reply["spans"]]


class Child:
    """A forked process that renders until it has had no request for IDLE_SECONDS."""

    def __init__(self, template: str) -> None:
        self.connection, end = Pipe()
        self.pid = os.fork()
        if not self.pid:
            serve(end, template)
        end.close()
        self._stop = weakref.finalize(self, stop, self.pid, os.getpid())

    def end(self) -> None:
        self._stop()
        self.connection.close()

    def wait(self) -> int:
        """Wait for the child to end; returns its status, as `os.waitpid` does."""
        self._stop.detach()
        self.connection.close()
        return os.waitpid(self.pid, 0)[1]


def stop(pid: int, parent: int) -> None:
    if os.getpid() == parent:  # a process that was forked from the parent must not stop its child
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def serve(connection: Any, template: str) -> NoReturn:
    """The child's loop. It exits without a message; the parent reads its exit code."""
    try:
        detach(connection)
        limit_memory()
        while connection.poll(IDLE_SECONDS):
            request = connection.recv()
            # Without a handler both signals end the process, even within one operation.
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.setitimer(signal.ITIMER_REAL, 20 * SECONDS)
            content = json.dumps(answer(template, *request)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(content)
        os._exit(0)
    finally:
        os._exit(1)


def detach(connection: Connection) -> None:
    """Drop the parent's signal handlers, and its open files, which another process may wait to see closed."""
    for number in (signal.SIGTERM, signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))


def limit_memory() -> None:
    import resource  # absent where there is no fork

    statm = Path("/proc/self/statm")
    if statm.is_file():  # other systems do not show the memory in use, so only time is limited there
        in_use = int(statm.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = in_use + MEBIBYTES * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def answer(template: str, messages: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """One rendered conversation, or the reason why there is none.

    >>> answer("{{ 1/0 }}", [], {})
    {'refused': 'ZeroDivisionError: division by zero'}
    """
    try:
        texts, spans = render_jinja_template([messages], chat_template=template, **settings)
        if len(texts[0]) > MAX_CHARACTERS:
            return {"over": True}
        texts[0].encode()  # half a surrogate pair is no text
        return {"text": texts[0], "spans": spans[0] if spans else []}
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": f"line {error.lineno}: {error.message}"}
    except MemoryError:
        return {"over": True}
    except jinja2.TemplateError as error:
        return {"refused": str(error)[:SHOWN_CHARACTERS]}
    except Exception as error:  # whatever a template's operations raise
        return {"refused": f"{type(error).__name__}: {error}"[:SHOWN_CHARACTERS]}


@functools.lru_cache(maxsize=4)
def renderer_of(template: str) -> Renderer:
    """One renderer for the calls of this process."""
    return Renderer(template)
