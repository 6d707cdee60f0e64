"""What a training step costs with each of several configs: side by side, in turn, medians.

Seconds of whole trainings tell as much of what else the machine did as of the recipe. Here every config's model stands
beside the others and takes a step (forward with the backbone, loss, backward, AdamW) on the same tokens, again and
again in turn, so that a slow moment falls on all.
"""
# B block, T position

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from train.config import TrainConfig
from train.loop.building import build_model
from train.loop.optimizer_groups import optimizer_groups
from train.objective.model import TrainedModel


def step_seconds(configs: Mapping[str, TrainConfig], rounds: int, blocks: int) -> dict[str, float]:
    """Median seconds of a step of `blocks` blocks by name, on the CPU."""
    steps = {name: stepper(config, blocks) for name, config in configs.items()}
    for step in steps.values():
        step()  # the first pays for its optimizer's state
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def choose_first_tokens(model: TrainedModel) -> int:
    """How many tokens heads score; with a draft vocabulary the first ones, since nothing is counted here."""
    token_heads = model.token_heads
    if token_heads is None or token_heads.draft_tokens_S is None:
        return model.backbone.vocab_size
    token_heads.choose_draft_tokens(torch.arange(token_heads.num_scored))
    return token_heads.num_scored


def stepper(config: TrainConfig, blocks: int) -> Callable[[], None]:
    """One step of a run of this config; random tokens cost what others cost, here all of them such that are scored."""
    model = build_model(config, torch.device("cpu")).train()
    tokens = choose_first_tokens(model)
    groups = optimizer_groups(model, heads_rate=config.rates.heads, base_rate=config.rates.base, weight_decay=0.0)
    optimizer = torch.optim.AdamW(groups, fused=True)
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(tokens, (blocks, config.data.block_size), generator=generator)
    batch = {
        "input_ids": tokens_BT,
        "loss_mask": torch.ones_like(tokens_BT, dtype=torch.bool),
        "document_ids": torch.zeros_like(tokens_BT),
    }

    def step() -> None:
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
