"""What an evaluation measures: each head on held-out blocks, and tokens per pass of the heads alone."""
# B batch, T position, R supervised row of one head, K head

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor

from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.accuracy import HeadAccuracy, backbone_choices
from heads.interface.token_heads import TokenHeads
from train.config import EvaluationConfig
from train.loop.backbone_quality import Drift
from train.objective.model import TrainedModel

Inside = Callable[[Callable[[], Any]], Any]


@torch.no_grad()
def evaluate(
    model: TrainedModel,
    blocks: Any,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    batch_size: int,
    config: EvaluationConfig,
    accelerator: Any,
    *,
    inside: Inside | None = None,
    decoding_heads: Callable[[], TokenHeads | None] | None = None,
) -> dict[str, float]:
    """Metrics by name: `head1_top1`, `_top5`, `_loss`, `_agreement`, …, `backbone_top1`, …, `tokens_per_pass`.

    `multi_token_loss` is the mean over the backbone and its heads: log PPL_{1:K+1} (DynaMo, figure 6). Heads with a
    draft vocabulary have none: their `_loss` is over the labels that they score, whose share is `head1_coverage`, ….

    Every block is measured by exactly one process, and every prompt too where processes need not keep step. The heads'
    measured accuracy by rank is stored in them, so that the tree grows from it here and after loading.

    Args:
        inside: runs a function with all weights gathered, where an engine shards them; every process then makes the
            same number of passes.
        decoding_heads: gives the heads to decode with; the model's own in the backbone's dtype where it is not given.
    """
    was_training = model.training
    model.eval()
    meters, drift = measure_blocks(model, blocks, collate, batch_size, accelerator, inside)
    found = {f"backbone_{name}": getattr(meters[0], name) for name in ("loss", "top1", "top5")}
    if model.trains_backbone:
        found["backbone_tokens"] = meters[0].count
    if model.teacher is not None:
        found["backbone_kl"] = drift.mean
    for k, meter in enumerate(meters[1:], start=1):
        found |= {f"head{k}_{name}": getattr(meter, name) for name in ("loss", "top1", "top5", "agreement")}
    if model.token_heads is not None:
        if model.token_heads.draft_tokens_S is None:
            found["multi_token_loss"] = sum(meter.loss for meter in meters) / len(meters)
        else:
            found |= {f"head{k}_coverage": meter.coverage for k, meter in enumerate(meters[1:], start=1)}
        model.token_heads.measured_accuracy = [meter.accuracy_by_rank for meter in meters[1:]]
        decoder = decoding_heads() if decoding_heads else model.token_heads.in_dtype(model.backbone.dtype)
        assert decoder is not None
        decoder.measured_accuracy = model.token_heads.measured_accuracy
        found["tokens_per_pass"] = measure_decoding(decoder, blocks, config, accelerator, inside)
    model.train(was_training)
    return found


@torch.no_grad()
def evaluate_backbone(
    model: TrainedModel,
    blocks: Any,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    batch_size: int,
    accelerator: Any,
    *,
    inside: Inside | None = None,
) -> float:
    """The backbone's own mean loss on the same blocks; the heads are not run."""
    was_training = model.training
    model.eval()
    meters, _ = measure_blocks(model, blocks, collate, batch_size, accelerator, inside, with_heads=False)
    model.train(was_training)
    return meters[0].loss


def measure_blocks(
    model: TrainedModel,
    blocks: Any,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    batch_size: int,
    accelerator: Any,
    inside: Inside | None,
    *,
    with_heads: bool = True,
) -> tuple[list[HeadAccuracy], Drift]:
    """Over all blocks and processes: the backbone (index 0) and each head, and the backbone's way from the original."""
    run = inside or (lambda function: function())
    meters, drift = [HeadAccuracy() for _ in range(model.num_heads * with_heads + 1)], Drift()
    for mine in shares(len(blocks), batch_size, accelerator.process_index, accelerator.num_processes):
        counted = (meters, drift) if mine else ([HeadAccuracy() for _ in meters], Drift())
        batch = collate([blocks[i] for i in mine or [0]])
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        run(lambda batch=batch, counted=counted: measure(model, batch, *counted))  # type: ignore[misc]
    sums = torch.tensor([drift.count, drift.total], dtype=torch.float64, device=accelerator.device)
    count, total = accelerator.reduce(sums, reduction="sum").tolist()
    return [add_over_processes(meter, accelerator) for meter in meters], Drift(count=int(count), total=total)


def measure(model: TrainedModel, batch: dict[str, Tensor], meters: list[HeadAccuracy], drift: Drift) -> None:
    """Add one batch: the backbone (index 0) and as many heads as there are meters, on their own supervised rows."""
    with torch.autocast(batch["input_ids"].device.type, enabled=False):
        states = model.backbone_states(batch["input_ids"], batch["loss_mask"], batch["document_ids"], lookahead=0.0)
        assert states.final_BTD is not None, "the backbone ran"
        choices_BT = backbone_choices(model.backbone.projection.without_norm(), states.final_BTD)
        heads = model.head_rows(states, with_backbone=True)
        for rows in itertools.islice(heads, len(meters)):
            choices_R = choices_BT.flatten()[rows.predicting_rows()]
            meters[rows.head].update(rows.projection, rows.hidden_RD, rows.labels_R, choices_R)
            if (teacher := rows.distillation) is not None:
                drift.update(teacher.projection, teacher.hidden_RD, rows.projection, rows.hidden_RD)


def add_over_processes(meter: HeadAccuracy, accelerator: Any) -> HeadAccuracy:
    sums = torch.tensor(meter.as_sums(), dtype=torch.float64, device=accelerator.device)
    return HeadAccuracy.from_sums(accelerator.reduce(sums, reduction="sum").tolist())


def spread(total: int, count: int) -> list[int]:
    """`count` numbers spread evenly below `total`.

    >>> spread(6, 2), spread(2, 5)
    ([0, 3], [0, 1])
    """
    count = min(count, total)
    return [i * total // count for i in range(count)]


def shares(total: int, batch_size: int, process: int, num_processes: int) -> Iterator[range]:
    """The numbers below `total` that one process measures, batch by batch: equally many batches in all processes.

    A process that has run out gets an empty share, so that it can keep step with the others.

    >>> [list(share) for share in shares(5, 2, 0, 2)], [list(share) for share in shares(5, 2, 1, 2)]
    ([[0, 2], [4]], [[1, 3], []])
    """
    for start in range(0, total, batch_size * num_processes):
        yield range(start + process, min(total, start + batch_size * num_processes), num_processes)


def measure_decoding(
    token_heads: TokenHeads, blocks: Any, config: EvaluationConfig, accelerator: Any, inside: Inside | None = None
) -> float:
    """Tokens per pass over prompts from the starts of held-out blocks.

    Each is decoded by one process. Where weights are sharded all processes decode all prompts: a pass takes every
    process, and the same prompt takes as many passes everywhere.
    """
    chosen = spread(len(blocks), config.num_prompts)
    if inside is None:
        chosen = chosen[accelerator.process_index :: accelerator.num_processes]
    prompts = [torch.tensor(blocks[i]["input_ids"][: config.prompt_tokens], device=accelerator.device) for i in chosen]
    run = inside or (lambda function: function())
    counts = torch.tensor(run(lambda: count_decoding(token_heads, prompts, config)), device=accelerator.device)
    # one answer for all processes: they act on it together
    counts = accelerator.reduce(counts, reduction="sum") if inside is None else broadcast(counts)
    tokens, passes = counts.tolist()
    return tokens / max(1, passes)


def count_decoding(token_heads: TokenHeads, prompts: list[Tensor], config: EvaluationConfig) -> tuple[int, int]:
    """Tokens emitted and backbone passes over the prompts: greedy, by the heads alone, in the backbone's dtype here."""
    decoding = TreeDecoding(token_heads, tree=config.tree_nodes, lookup=0)
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
    return tokens, passes
