"""Write lines with a server, which answers many rows at a time; they are appended in the rows' order.

A row is answered turn by turn, and at most `concurrency` rows are in progress. A finished line waits for those before
it. So that one long conversation does not block the others, up to `AHEAD` · `concurrency` lines are started or waiting.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from tqdm.auto import tqdm

from train.regenerate.output import OutputFile
from train.regenerate.server import Server
from train.regenerate.source import SourceRows

AHEAD = 8


async def write_served_lines(
    rows: SourceRows, server: Server, output: OutputFile, total: int, concurrency: int
) -> None:
    """Append all lines that the file does not have yet, up to `total`.

    Raises:
        ValueError: the server cannot be asked any more; lines before the first that is missing are in the file.
    """
    gate = asyncio.Semaphore(concurrency)
    waiting: deque[asyncio.Task[dict[str, Any]]] = deque()
    lines = iter(range(output.lines, total))
    start = time.perf_counter()

    async def write_line(line: int) -> dict[str, Any]:
        async with gate:
            return {"line": line, **await rewrite(line, rows, server)}

    try:
        with tqdm(total=total, initial=min(output.lines, total), desc="lines", unit="line", dynamic_ncols=True) as bar:
            while True:
                while len(waiting) < AHEAD * concurrency and (line := next(lines, None)) is not None:
                    waiting.append(asyncio.create_task(write_line(line)))
                if not waiting:
                    return
                await asyncio.wait([waiting[0]])
                made = take_finished(waiting)
                output.append(made)
                server.tally.lines += len(made)
                bar.update(len(made))
                bar.set_postfix_str(f"{server.tally.tokens / (time.perf_counter() - start):.0f} tokens/s")
                if not made:
                    waiting[0].result()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def take_finished(waiting: deque[asyncio.Task[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Remove and return the finished lines at the front."""
    made = []
    while waiting and waiting[0].done() and waiting[0].exception() is None:
        made.append(waiting.popleft().result())
    return made


async def rewrite(line: int, rows: SourceRows, server: Server) -> dict[str, Any]:
    """The new fields of one line; the answers of a conversation are asked for one after the other."""
    rewriting = rows.rewriting(line, server.fits, server.tally)
    turn = 0
    try:
        prompt = next(rewriting)
        while True:
            prompt = rewriting.send(await server.answer(prompt, (line, turn)))
            turn += 1
    except StopIteration as end:
        return dict(end.value)
