"""Sizes of the loss, measured in processes of their own."""

from __future__ import annotations

from rich.console import Console

from benchmarks.training import loss_size


def test_the_peak_of_each_loss_is_measured_in_a_process_of_its_own(monkeypatch) -> None:
    """In the package's `__main__`, which a new process does not import, the function was not found."""
    monkeypatch.setattr(loss_size, "VOCABULARIES", (8_000,))
    ((row),) = loss_size.memory_table(Console(quiet=True))
    assert row["full_logits_bytes"] == 1024 * 4 * 8_000 * 4
    assert row["plain_bytes"] > row["chunked_bytes"] > 0
