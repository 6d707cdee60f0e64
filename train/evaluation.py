"""What an evaluation measures: each head on held-out blocks, and tokens per pass by the decoder that ships."""
# B batch, T position, R supervised row of one head, K head

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.accuracy import HeadAccuracy, backbone_choices
from heads.interface import TokenHeads
from train.config import EvaluationConfig
from train.model import TrainedModel
from train.targets import labels_at, supervised_rows


@torch.no_grad()
def evaluate(
    model: TrainedModel, batches: Iterable[dict[str, Tensor]], config: EvaluationConfig, accelerator: Any
) -> dict[str, float]:
    """Metrics by name: `head1_top1`, `_top5`, `_loss`, `_agreement`, …, `backbone_top1`, …, `tokens_per_pass`.

    The heads' measured accuracy by rank is stored in them, so that the tree grows from it here and after loading.
    """
    was_training = model.training
    model.eval()
    meters = [HeadAccuracy() for _ in range(model.num_heads + 1)]
    prompts: list[Tensor] = []
    for batch in batches:
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        measure(model, batch, meters)
        prompts += list(batch["input_ids"][:, : config.prompt_tokens])
    meters = [add_over_processes(meter, accelerator) for meter in meters]
    found = {f"backbone_{name}": getattr(meters[0], name) for name in ("loss", "top1", "top5")}
    for k, meter in enumerate(meters[1:], start=1):
        found |= {f"head{k}_{name}": getattr(meter, name) for name in ("loss", "top1", "top5", "agreement")}
    if model.token_heads is not None:
        model.token_heads.measured_accuracy = [meter.accuracy_by_rank for meter in meters[1:]]
        found["tokens_per_pass"] = tokens_per_pass(model.token_heads, spread(prompts, config.num_prompts), config)
    model.train(was_training)
    return found


def measure(model: TrainedModel, batch: dict[str, Tensor], meters: list[HeadAccuracy]) -> None:
    """Add one batch: the backbone (index 0) and each head, on its own supervised rows."""
    tokens_BT = batch["input_ids"]
    with torch.autocast(tokens_BT.device.type, enabled=False):
        teacher = model.teacher_forcing(tokens_BT, batch["loss_mask"], batch["document_ids"], also=("final",))
        unembedding = model.backbone.projection.without_norm()
        final_BTD = teacher.taps["final"].to(unembedding.weight.dtype)
        choices_BT = backbone_choices(unembedding, final_BTD)
        rows_R = supervised_rows(batch["loss_mask"], batch["document_ids"], 1)
        meters[0].update(
            unembedding, final_BTD.flatten(0, 1)[rows_R], labels_at(tokens_BT, rows_R, 1), choices_BT.flatten()[rows_R]
        )
        if model.token_heads is None:
            return
        for k, (projection, hidden_RD) in enumerate(model.states(teacher), start=1):
            rows_R = teacher.rows[k - 1]
            # The backbone chooses x_{t+1+k} at position t+k, k places behind the head's own.
            choices_R = choices_BT.flatten()[rows_R + k]
            meters[k].update(projection, hidden_RD, labels_at(tokens_BT, rows_R, k + 1), choices_R)


def add_over_processes(meter: HeadAccuracy, accelerator: Any) -> HeadAccuracy:
    sums = torch.tensor(meter.as_sums(), dtype=torch.float64, device=accelerator.device)
    return HeadAccuracy.from_sums(accelerator.reduce(sums, reduction="sum").tolist())


def spread(prompts: list[Tensor], count: int) -> list[Tensor]:
    """`count` prompts spread evenly over all.

    >>> spread([0, 1, 2, 3, 4, 5], 2)
    [0, 3]
    """
    if count >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // count] for i in range(count)]


def tokens_per_pass(token_heads: TokenHeads, prompts: list[Tensor], config: EvaluationConfig) -> float:
    """Tokens emitted for each backbone pass over the prompts, greedy, with the default tree."""
    if not prompts:
        return 0.0
    decoding = TreeDecoding(token_heads, tree=config.tree_nodes)
    model = token_heads.backbone.model
    tokens = passes = 0
    for prompt_T in prompts:
        output = model.generate(
            prompt_T[None],
            attention_mask=torch.ones_like(prompt_T[None]),
            max_new_tokens=config.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            custom_generate=decoding,
        )
        tokens += output.stats.tokens
        passes += output.stats.row_passes
    return tokens / max(1, passes)
