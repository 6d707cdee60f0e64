"""Our training step beside a plain one and beside a lower bound.

(a) reference: backbone forward, one cross-entropy for each head over full logits
(b) ours: `TrainedModel`, as `train.py` builds it
(c) floor: the backbone's forward, measured, and the heads' unavoidable matrix products at the measured matmul rate

The three take turns in one process; (a) and (b) end in fused AdamW with the same arguments. Peak memory is measured in
a new process for each, as a process's peak never falls.
"""
# B batch, T position, R row, D model width, V vocabulary

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared import figures_table, in_own_process
from heads.backbone.model import Backbone
from heads.families import create
from heads.interface.representation import PositionWiseHeads
from train.loop.optimizer_groups import optimizer_groups
from train.objective.model import TrainedModel

MIB = 2**20
RATE = 1e-4
FASTER, SMALLER, FLOOR = 2.0, 0.5, 1.25
"""Targets: at least so many times (a)'s speed or at most this share of its peak, and (c) at most so much faster."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A random Llama-like backbone, heads on it, and batches whose blocks hold one document each."""

    family: str
    unembedding: str
    vocab: int = 32_000
    width: int = 512
    layers: int = 6
    heads: int = 4
    batch: int = 4
    length: int = 256

    @property
    def name(self) -> str:
        return f"{self.family}, {self.unembedding} unembedding"

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def build(self, device: str = "cpu", dtype: torch.dtype = torch.float32, **settings: Any) -> TrainedModel:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=self.width * 8 // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.width // 64),
            max_position_embeddings=self.length,
        )
        with torch.device(device):
            backbone = Backbone(LlamaForCausalLM(config).to(dtype).eval())
            token_heads = create(self.family, backbone, num_heads=self.heads, unembedding=self.unembedding)
        return TrainedModel(backbone, token_heads.float(), **settings).to(device).train()

    def data_of_seed(self, seed: int = 1) -> dict[str, Tensor]:
        """The same batch wherever it is made."""
        torch.manual_seed(seed)
        return self.data()

    def data(self, device: str = "cpu") -> dict[str, Tensor]:
        tokens_BT = torch.randint(self.vocab, (self.batch, self.length), device=device)
        everything_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        return {"input_ids": tokens_BT, "loss_mask": everything_BT, "document_ids": torch.zeros_like(tokens_BT)}


WORKLOADS = (
    Workload(family="medusa", unembedding="shared"),
    Workload(family="grounded", unembedding="shared"),
    Workload(family="grounded", unembedding="own"),
)


def reference_step(model: TrainedModel, batch: dict[str, Tensor]) -> Callable[[], None]:
    """(a): a plain training step of position-wise heads."""
    heads, tokens_BT = model.token_heads, batch["input_ids"]
    assert isinstance(heads, PositionWiseHeads)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=RATE, weight_decay=0.0, fused=True)

    def step() -> None:
        with torch.no_grad():
            final_BTD = model.model.get_decoder()(input_ids=tokens_BT, use_cache=False).last_hidden_state
        loss = torch.zeros((), device=tokens_BT.device)
        for k in range(1, heads.num_heads + 1):
            length = tokens_BT.shape[1] - 1 - k
            ahead_BTk = torch.stack([tokens_BT[:, i : i + length] for i in range(1, k + 1)], dim=2)
            hidden_RD = heads.head(k, final_BTD[:, :length].flatten(0, 1).float(), ahead_BTk.flatten(0, 1))
            logits_RV = heads.projection(k)(hidden_RD.to(heads.projection(k).weight.dtype))
            loss = loss + F.cross_entropy(logits_RV.float(), tokens_BT[:, 1 + k :].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def our_step(model: TrainedModel, batch: dict[str, Tensor]) -> Callable[[], None]:
    """(b): what the Trainer does between two batches, with dense masks unless it runs within document_attention."""
    base_rate = RATE if model.trains_backbone else None
    groups = optimizer_groups(model, heads_rate=RATE, base_rate=base_rate, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups, fused=True)

    def step() -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def heads_products(workload: Workload, model: TrainedModel) -> float:
    """FLOPs of the heads' unavoidable matrix products in one step, 2 for each multiply-add.

    A matrix takes three products: forward, its own gradient, its input's gradient. A head's first matrix reads frozen
    states, which need no gradient, and a frozen unembedding has none.
    """
    assert model.token_heads is not None
    total = 0.0
    for k in range(1, workload.heads + 1):
        rows = workload.batch * (workload.length - 1 - k)
        body = sum(p.numel() for n, p in model.token_heads.named_parameters() if n.startswith(f"bodies.{k - 1}."))
        unembedding = workload.vocab * workload.width * (3 if workload.unembedding == "own" else 2)
        total += 2 * rows * (2 * body + unembedding)
    return total


def matmul_step(workload: Workload, model: TrainedModel) -> tuple[Callable[[], None], float]:
    """The three products of one head's rows with an unembedding, and their FLOPs."""
    weight_VD = model.backbone.projection.weight.detach()
    rows = workload.tokens
    hidden_RD = torch.randn(rows, workload.width, device=weight_VD.device, dtype=weight_VD.dtype)
    logits_RV, gradient_VD = hidden_RD @ weight_VD.t(), torch.zeros_like(weight_VD)

    def step() -> None:
        torch.mm(hidden_RD, weight_VD.t(), out=logits_RV)
        torch.mm(logits_RV, weight_VD)
        gradient_VD.addmm_(logits_RV.t(), hidden_RD, alpha=1e-6)

    return step, 6.0 * rows * workload.width * workload.vocab


def backbone_step(model: TrainedModel, batch: dict[str, Tensor]) -> Callable[[], Any]:
    """The backbone's forward as (b) runs it."""
    return lambda: model.teacher_forcing(batch["input_ids"], batch["loss_mask"], batch["document_ids"])


def seconds_of(step: Callable[[], Any], device: str = "cpu") -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_turns(steps: dict[str, Callable[[], Any]], rounds: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of each step in each round, after a warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            seconds = seconds_of(step, device)
            if turn:
                found[name].append(seconds)
    return found


def measure(workload: Workload, rounds: int) -> dict[str, float]:
    """Medians over the rounds: seconds of (a), (b) and (c), and the ratios within a round."""
    batch, model = workload.data(), workload.build()
    product, product_flops = matmul_step(workload, model)
    steps = {
        "reference": reference_step(workload.build(), batch),
        "ours": our_step(model, batch),
        "backbone": backbone_step(model, batch),
        "products": product,
    }
    found = take_turns(steps, rounds)
    flops = heads_products(workload, model)
    found["floor"] = [b + flops * p / product_flops for b, p in zip(found["backbone"], found["products"], strict=True)]
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratio = {
        f"{over} / {under}": statistics.median(a / b for a, b in zip(found[over], found[under], strict=True))
        for over, under in (("reference", "ours"), ("ours", "floor"))
    }
    return {**medians, **ratio, "matmul_flops": product_flops / medians["products"], "heads_flops": flops}


def peak_of(make: Callable[..., Callable[[], Any]], workload: Workload) -> int:
    """Bytes that model, optimizer and two steps add to a process."""
    torch.set_num_threads(1)
    before = forget_peak()
    step = make(workload.build(), workload.data())
    for _ in range(2):
        step()
    return resident("VmHWM") - before


def forget_peak() -> int:
    """Reset the peak, which imports may have raised, and return the resident bytes now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the peak (Linux)."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def speed_table(console: Console, rounds: int) -> list[dict[str, Any]]:
    first = WORKLOADS[0]
    title = (
        f"Tokens per second: {first.heads} heads, vocabulary {first.vocab:,}, {first.layers} layers of width "
        f"{first.width}, {first.batch} × {first.length} tokens, float32, medians of {rounds} rounds"
    )
    speeds_of = ("(a) reference", "(b) ours", "(c) floor", "b / a", "c / b", "peak a", "peak b", "peak b / a")
    table = figures_table(title, "heads", *speeds_of)
    rows, verdicts = [], []
    for workload in WORKLOADS:
        found: dict[str, Any] = {"workload": workload.name, **measure(workload, rounds)}
        for kind, make in (("reference", reference_step), ("ours", our_step)):
            found[f"{kind}_peak"] = in_own_process(peak_of, make, workload)
        rows.append(found)
        speeds = [f"{workload.tokens / found[name]:,.0f}" for name in ("reference", "ours", "floor")]
        peaks = [found["reference_peak"], found["ours_peak"]]
        cells = [*speeds, f"{found['reference / ours']:.2f}", f"{found['ours / floor']:.2f}"]
        cells += [*(f"{peak / MIB:,.0f} MiB" for peak in peaks), f"{peaks[1] / peaks[0]:.2f}"]
        table.add_row(workload.name, *cells)
        verdicts.append(
            f"{workload.name}: {verdict(found['reference / ours'], peaks[1] / peaks[0], found['ours / floor'])}"
        )
    console.print(table)
    for line in verdicts:
        console.print(line)
    return rows


def verdict(faster: float, smaller: float, floor: float) -> str:
    """Which targets a row reaches: of b / a or peak b / a, and of c / b.

    >>> verdict(1.5, 0.4, 1.3)
    'b / a at least 2 or peak b / a at most 0.5: reached; c / b at most 1.25: not reached'
    """
    targets = {
        f"b / a at least {FASTER:g} or peak b / a at most {SMALLER:g}": faster >= FASTER or smaller <= SMALLER,
        f"c / b at most {FLOOR:g}": floor <= FLOOR,
    }
    return "; ".join(f"{target}: {'reached' if holds else 'not reached'}" for target, holds in targets.items())
