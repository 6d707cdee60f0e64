"""What the loss takes by its size: peak memory by vocabulary, and seconds by rows of a chunk.

These are the parts `memory` and `chunks` of `python -m benchmarks.training`. What runs in a process of its own has to
lie in a file that can be imported: a package's `__main__` can't.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from benchmarks.shared import figures_table, in_own_process
from benchmarks.training.training_speed import MIB, forget_peak, resident, take_turns
from heads.backbone.projection import Projection
from train.objective import chunks
from train.objective.losses import chunked_cross_entropy, plain_cross_entropy

VOCABULARIES = (2_048, 32_000, 128_256)
ROWS, WIDTH, HEADS = 1024, 64, 4
LOSSES = {"plain": plain_cross_entropy, "chunked": chunked_cross_entropy}
CHUNK_ROWS = (65, 130, 520)


def peak_of_one_step(loss_name: str, vocab: int, rows: int) -> int:
    """Peak bytes that K heads' losses and their backward add, on one frozen unembedding."""
    torch.set_num_threads(1)
    weight = torch.randn(vocab, WIDTH)
    hidden = [torch.randn(rows, WIDTH, requires_grad=True) for _ in range(HEADS)]
    labels = torch.randint(vocab, (rows,))
    before = forget_peak()
    torch.stack([LOSSES[loss_name](Projection(weight=weight), h, labels) for h in hidden]).sum().backward()
    return resident("VmHWM") - before


def chunk_table(console: Console, rounds: int, width: int = 512) -> list[dict[str, Any]]:
    """Milliseconds of one head's loss and gradients with a trained unembedding, by rows of a chunk, interleaved."""
    usual = chunks.CHUNK_ELEMENTS, chunks.LEAST_ROWS
    title = f"One loss with its gradients: {ROWS:,} rows, width {width}, float32"
    table = figures_table(title, "vocabulary", "rows in a chunk", "logits", "ms", "in use", left=0)
    found = []
    used = {vocab: chunks.rows_of_chunk(vocab, usual[0]["cpu"]) for vocab in VOCABULARIES[1:]}  # before steps set it
    for vocab, in_use in used.items():
        seconds = take_turns({str(rows): chunk_step(vocab, width, rows) for rows in (*CHUNK_ROWS, in_use)}, rounds)
        for rows, values in sorted(seconds.items(), key=lambda item: int(item[0])):
            milliseconds, size = 1000 * statistics.median(values), 4 * int(rows) * vocab / MIB
            found.append({"vocab": vocab, "rows": int(rows), "milliseconds": milliseconds})
            mark = "yes" if int(rows) == in_use else ""
            table.add_row(f"{vocab:,}", rows, f"{size:,.0f} MiB", f"{milliseconds:,.0f}", mark)
    chunks.CHUNK_ELEMENTS, chunks.LEAST_ROWS = usual
    console.print(table)
    return found


def chunk_step(vocab: int, width: int, rows: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    weight, hidden = (
        torch.randn(n, width, generator=generator).div_(width**0.5).requires_grad_() for n in (vocab, ROWS)
    )
    labels = torch.randint(vocab, (ROWS,), generator=generator)

    def step() -> None:
        chunks.CHUNK_ELEMENTS, chunks.LEAST_ROWS = {"cpu": rows * vocab}, 1
        weight.grad = None
        chunked_cross_entropy(Projection(weight=weight), hidden, labels).backward()

    return step


def memory_table(console: Console) -> list[dict[str, Any]]:
    rows = []
    title = f"Peak memory of loss and backward: {HEADS} heads, {ROWS:,} rows, width {WIDTH}, float32"
    table = figures_table(title, "vocabulary", "(rows, K, V) alone", "plain", "chunked", "plain / chunked", left=0)
    for vocab in VOCABULARIES:
        peaks = {name: in_own_process(peak_of_one_step, name, vocab, ROWS) for name in LOSSES}
        full = ROWS * HEADS * vocab * 4
        rows.append(
            {"vocab": vocab, "full_logits_bytes": full, **{f"{name}_bytes": peak for name, peak in peaks.items()}}
        )
        cells = [f"{full / MIB:,.0f} MiB", *(f"{peaks[name] / MIB:,.0f} MiB" for name in LOSSES)]
        table.add_row(f"{vocab:,}", *cells, f"{peaks['plain'] / max(1, peaks['chunked']):.1f}")
    console.print(table)
    return rows
