"""Parameter groups of the optimizer with their rates; every trained parameter is in exactly one group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from train.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    settings = config.optimizer
    groups = optimizer_groups(
        model, heads_rate=config.rates.heads, base_rate=config.rates.base, weight_decay=settings.weight_decay
    )
    return torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True)


def optimizer_groups(
    model: nn.Module, *, heads_rate: float, base_rate: float | None, weight_decay: float
) -> list[dict[str, Any]]:
    """AdamW groups of heads and backbone: matrices with weight decay, vectors (biases, norms) without.

    Raises:
        ValueError: nothing is trained.
    """
    rates = {"token_heads.": heads_rate, "model.": base_rate}
    groups = [
        {
            "name": f"{prefix}{'matrices' if is_matrix else 'vectors'}",
            "params": [p for _, p in trained(model, prefix) if (p.ndim >= 2) == is_matrix],
            "lr": rate,
            "weight_decay": weight_decay if is_matrix else 0.0,
        }
        for prefix, rate in rates.items()
        for is_matrix in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    check_groups(model, groups)
    return groups


def trained(model: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if name.startswith(prefix) and p.requires_grad]


def check_groups(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    listed = [id(p) for group in groups for p in group["params"]]
    wanted = [id(p) for p in model.parameters() if p.requires_grad]
    if not wanted:
        raise ValueError(
            "Nothing is trained: no parameter asks for a gradient; give a family, or family: null for the backbone."
        )
    assert sorted(listed) == sorted(wanted), "every trained parameter is in exactly one group"
    assert all(group["lr"] is not None for group in groups), "a trained group has no rate"
