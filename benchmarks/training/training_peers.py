"""A training step beside those of other trainers: `python -m benchmarks.training.training_peers`.

Both sides have the same backbone, heads, batch and optimizer, and their losses must be equal. The table has the ratios
of their times and memory. The other side is one of

    Medusa            FasterDecoding/Medusa's loss, restated: the logits of all heads at all positions in one tensor,
                      then one cross-entropy a head over shifted labels
    Hydra             zankner/Hydra's loss on grounded heads, restated: the same, each head reading the next tokens
    Model-Optimizer   nvidia-modelopt's own medusa model, run by a Python that has it, which HEADWAY_MODELOPT names

The two sides take turns in one run. Peak memory is measured in a new process for each, as a process's peak never falls.
Accuracies, which the restated trainers compute beside the loss, are left out.
"""
# B batch, T position, K head, D model width, V vocabulary

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from benchmarks.shared import describe_cpu, figures_table, in_own_process, parser_of, run_benchmark, say, wide_console
from benchmarks.training.training_speed import (
    MIB,
    RATE,
    Workload,
    our_step,
    peak_of,
    seconds_of,
)
from heads.export.formats.medusa import medusa_tensors
from heads.interface.representation import PositionWiseHeads
from train.objective.model import TrainedModel

MODELOPT = "HEADWAY_MODELOPT"
CHILD = Path(__file__).with_name("modelopt_step.py")
EQUAL = 1e-5  # of the loss: float32 sums in another order over 32,000 logits and a thousand rows
PEERS = {
    "Medusa's loss, restated": "medusa",
    "Hydra's loss, restated": "grounded",
    "Model-Optimizer's medusa": "medusa",
}


def main() -> None:
    parser = parser_of("benchmarks.training.training_peers", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="interleaved steps of each side, after one that warms up")
    parser.add_argument("--vocab", type=int, default=32_000, help="tokens of the vocabulary")
    options = parser.parse_args()
    console = wide_console()
    table = figures_table(
        f"4 heads with unembeddings of their own, vocabulary {options.vocab:,}, 6 layers of width 512, 4 × 256 tokens, "
        f"float32, medians of {options.rounds} interleaved rounds",
        *("peer", "losses differ by", "tokens/s", "ours", "ours / peer", "range"),
        *("peak MiB", "ours", "ours / peer"),
    )
    for name, family in PEERS.items():
        workload = Workload(family=family, unembedding="own", vocab=options.vocab)
        table.add_row(name, *cells_of(name, workload, options.rounds))
    say(console, describe_cpu())
    console.print(table)
    say(console, f"Losses that differ by more than {EQUAL:g} of their size end this in an error.")


def cells_of(name: str, workload: Workload, rounds: int) -> list[str]:
    if name.startswith("Model-Optimizer"):
        if not (python := os.environ.get(MODELOPT)):
            return [f"not run: {MODELOPT} names no Python that has nvidia-modelopt"]
        with tempfile.TemporaryDirectory() as folder, ModelOptimizer(python, workload, Path(folder)) as peer:
            found = take_turns(peer.step, workload, rounds)
        peak = peer.bytes
    else:
        found = take_turns(timed(restated_step(workload.build(), workload.data_of_seed())), workload, rounds)
        peak = in_own_process(peak_of, restated_step, workload)
    return [*figures(found, workload), *memory(peak, in_own_process(peak_of, our_step, workload))]


def take_turns(peer: Callable[[], dict[str, float]], workload: Workload, rounds: int) -> list[dict[str, float]]:
    """Seconds and losses of both sides in each round; in the first, which warms up, both have the same weights."""
    ours = timed(our_step_with_loss(workload.build(), workload.data_of_seed()))
    found = []
    for _ in range(rounds + 1):
        one, other = peer(), ours()
        found.append({"peer": one["seconds"], "ours": other["seconds"], "losses": abs(one["loss"] / other["loss"] - 1)})
    return found


def figures(found: list[dict[str, float]], workload: Workload) -> list[str]:
    """
    Raises:
        ValueError: the losses of the two sides are not equal.
    """
    differs = max(one["losses"] for one in found[:2])
    if differs > EQUAL:
        raise ValueError(f"The two losses differ by {differs:.1e} of their size, and {EQUAL:g} is rounding.")
    ratios = [one["peer"] / one["ours"] for one in found[1:]]
    speeds = [workload.tokens / statistics.median(one[side] for one in found[1:]) for side in ("peer", "ours")]
    return [
        f"{differs:.0e}",
        *(f"{speed:,.0f}" for speed in speeds),
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}–{max(ratios):.2f}",
    ]


def memory(peer: int, ours: int) -> list[str]:
    return [f"{peer / MIB:,.0f}", f"{ours / MIB:,.0f}", f"{ours / peer:.2f}"]


def timed(step: Callable[[], Tensor]) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        losses: list[Tensor] = []
        seconds = seconds_of(lambda: losses.append(step()))
        return {"seconds": seconds, "loss": float(losses[0])}

    return run


def our_step_with_loss(model: TrainedModel, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    losses: list[Tensor] = []
    model.register_forward_hook(lambda _, __, output: losses.append(output["loss"].detach()))
    step = our_step(model, batch)

    def run() -> Tensor:
        losses.clear()
        step()
        return losses[0]

    return run


def restated_step(model: TrainedModel, batch: dict[str, Tensor]) -> Callable[[], Tensor]:
    """A step of Medusa's and Hydra's trainers: logits (K, B, T, V) of all positions first, then the losses."""
    heads, tokens_BT = model.token_heads, batch["input_ids"]
    assert isinstance(heads, PositionWiseHeads)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step() -> Tensor:
        with torch.no_grad():
            final_BTD = model.model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
        logits_KBTV = torch.stack([head_logits(heads, k, final_BTD, tokens_BT) for k in range(1, heads.num_heads + 1)])
        loss = torch.zeros(())
        for k, logits_BTV in enumerate(logits_KBTV, start=1):
            loss = loss + F.cross_entropy(logits_BTV[:, : -(1 + k)].flatten(0, 1), tokens_BT[:, 1 + k :].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def head_logits(heads: PositionWiseHeads, k: int, final_BTD: Tensor, tokens_BT: Tensor) -> Tensor:
    """(B, T, V): the logits of head k at every position; tokens beyond the end are 0; no loss reads what follows."""
    padded = F.pad(tokens_BT, (0, k))
    ahead_BTk = torch.stack([padded[:, i : i + tokens_BT.shape[1]] for i in range(1, k + 1)], dim=2)
    hidden_ND = heads.head(k, final_BTD.flatten(0, 1), ahead_BTk.flatten(0, 1))
    logits: Tensor = heads.projection(k)(hidden_ND)
    return logits.view(*tokens_BT.shape, -1)


class ModelOptimizer:
    """A process of the other Python, which holds the model and takes a step for each line (modelopt_step.py)."""

    def __init__(self, python: str, workload: Workload, folder: Path) -> None:
        model = workload.build()
        assert model.token_heads is not None
        model.model.save_pretrained(folder / "backbone")
        tensors = {name: tensor.contiguous() for name, tensor in medusa_tensors(model.token_heads, "medusa").items()}
        save_file(tensors, folder / "heads.safetensors")
        batch = {"input_ids": workload.data_of_seed()["input_ids"], "heads": torch.tensor(workload.heads)}
        save_file(batch, folder / "batch.safetensors")
        command = [python, str(CHILD), str(folder), str(torch.get_num_threads())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.bytes = 0
        self.answer("ready")

    def __enter__(self) -> ModelOptimizer:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.bytes = int(self.answer("bytes")["bytes"])
        self.process.wait()

    def step(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.answer("seconds")

    def answer(self, field: str) -> dict[str, float]:
        """The next line with this field; other lines are libraries' messages and are skipped.

        Raises:
            ValueError: the process ended.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and field in (found := json.loads(line)):
                return dict(found)
        raise ValueError(f"{CHILD.name} ended with exit code {self.process.wait()}; its errors stand above.")


if __name__ == "__main__":
    run_benchmark(main)
