"""Evaluation on held-out blocks: accuracy of each head, tokens per pass, and the change of the backbone by training.

    PPL_1 = exp(mean of -log p(x_{t+1} | x_≤t))      KL = mean of Σ_v p(v) log(p(v) / q(v)), p the teacher's, q trained

PPL_1 "before" comes from the evaluation at step 0 (`trainer.eval_on_start`), or from a pass of the backbone alone over
the held-out blocks where there is no such evaluation. KL is measured where there is a teacher
(train/objective/teacher.py).
"""
# B batch, T position, R supervised row of one head, C rows of one chunk, D model width, V vocabulary

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.backbone.projection import Projection
from heads.decoding.tree_decoding import TreeDecoding
from heads.evaluation.accuracy import CHUNK_ELEMENTS, HeadAccuracy, backbone_choices
from heads.interface.token_heads import TokenHeads
from train.config import EvaluationConfig
from train.loop.batches import collate
from train.objective.model import TrainedModel
from train.objective.unembedding import widen

Inside = Callable[[Callable[[], Any]], Any]


@dataclass(frozen=True, kw_only=True)
class HeldOutBlocks:
    """Held-out blocks, and the run that is measured on them; every process measures its share.

    Attributes:
        inside: runs a function with all weights gathered, where an engine shards them; every process then makes the
            same number of passes. None where no engine shards weights.
        decoding_heads: returns the heads to decode with, in the backbone's dtype; every process calls it.
    """

    model: TrainedModel
    blocks: Any
    batch_size: int
    config: EvaluationConfig
    accelerator: Any
    inside: Inside | None
    decoding_heads: Callable[[], TokenHeads | None]

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Metrics by name: `head1_top1`, `_top5`, `_loss`, `_agreement`, …, `backbone_top1`, …, `tokens_per_pass`.

        `multi_token_loss` is the mean over the backbone and its heads: log PPL_{1:K+1} (DynaMo, figure 6). It is left
        out with a draft vocabulary, where head k's `_loss` covers only the share `headk_coverage` of the labels.

        The accuracy by rank is stored in the heads, so that trees are grown from it here and after loading.
        """
        with self.evaluating():
            meters, drift = self.measure_blocks(self.model.num_heads)
            found = {f"backbone_{name}": getattr(meters[0], name) for name in ("loss", "top1", "top5")}
            if self.model.trains_backbone:
                found["backbone_tokens"] = meters[0].count
            if self.model.teacher is not None:
                found["backbone_kl"] = drift.mean
            return found | self.of_heads(meters)

    def of_heads(self, meters: list[HeadAccuracy]) -> dict[str, float]:
        """The heads' metrics and tokens per pass; empty without heads."""
        token_heads, found = self.model.token_heads, dict[str, float]()
        for k, meter in enumerate(meters[1:], start=1):
            found |= {f"head{k}_{name}": getattr(meter, name) for name in ("loss", "top1", "top5", "agreement")}
        if token_heads is None:
            return found
        if token_heads.draft_tokens_S is None:
            found["multi_token_loss"] = sum(meter.loss for meter in meters) / len(meters)
        else:
            found |= {f"head{k}_coverage": meter.coverage for k, meter in enumerate(meters[1:], start=1)}
        token_heads.measured_accuracy = [meter.accuracy_by_rank for meter in meters[1:]]
        decoder = self.decoding_heads()
        assert decoder is not None
        decoder.measured_accuracy = token_heads.measured_accuracy
        found["tokens_per_pass"] = measure_decoding(decoder, self.blocks, self.config, self.accelerator, self.inside)
        return found

    @torch.no_grad()
    def backbone_loss(self) -> float:
        """The backbone's own mean loss, without running the heads."""
        with self.evaluating():
            return self.measure_blocks(0)[0][0].loss

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the context, the model is in eval mode and uncompiled, since each pass of decoding has new shapes."""
        was_training = self.model.training
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):
            yield
        self.model.train(was_training)

    def measure_blocks(self, num_heads: int) -> tuple[list[HeadAccuracy], Drift]:
        """Measure the backbone (index 0) and its first heads on all blocks, each block in exactly one process."""
        run = self.inside or (lambda function: function())
        meters, drift = [HeadAccuracy() for _ in range(num_heads + 1)], Drift()
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        for mine in shares(len(self.blocks), self.batch_size, process, processes):
            counted = (meters, drift) if mine else ([HeadAccuracy() for _ in meters], Drift())
            batch = collate([self.blocks[i] for i in mine or [0]])
            batch = {name: tensor.to(self.accelerator.device) for name, tensor in batch.items()}
            run(lambda batch=batch, counted=counted: measure_batch(self.model, batch, *counted))  # type: ignore[misc]
        sums = torch.tensor([drift.count, drift.total], dtype=torch.float64, device=self.accelerator.device)
        count, total = self.accelerator.reduce(sums, reduction="sum").tolist()
        return [add_over_processes(meter, self.accelerator) for meter in meters], Drift(count=int(count), total=total)


def measure_batch(model: TrainedModel, batch: dict[str, Tensor], meters: list[HeadAccuracy], drift: Drift) -> None:
    """Add one batch to the meters of the backbone (index 0) and of the first heads, on their supervised rows."""
    with torch.autocast(batch["input_ids"].device.type, enabled=False):
        states = model.backbone_states(batch["input_ids"], batch["loss_mask"], batch["document_ids"], lookahead=0.0)
        assert states.final_BTD is not None, "the backbone ran"
        choices_BT = backbone_choices(model.backbone.projection.without_norm(), states.final_BTD)
        heads = model.head_rows(states, with_backbone=True)
        for rows in itertools.islice(heads, len(meters)):
            choices_R = choices_BT.flatten()[rows.predicting_rows()]
            meters[rows.head].update(rows.projection, rows.hidden_RD, rows.labels_R, choices_R)
            if (teacher := rows.distillation) is not None:
                drift.update(teacher.projection, teacher.hidden(), rows.projection, rows.hidden_RD)


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
    """The numbers below `total` that one process measures, batch by batch; all processes have equally many batches.

    A process that has no number left gets an empty share, so that it makes as many passes as the others.

    >>> [list(share) for share in shares(5, 2, 0, 2)], [list(share) for share in shares(5, 2, 1, 2)]
    ([[0, 2], [4]], [[1, 3], []])
    """
    for start in range(0, total, batch_size * num_processes):
        yield range(start + process, min(total, start + batch_size * num_processes), num_processes)


def measure_decoding(
    token_heads: TokenHeads, blocks: Any, config: EvaluationConfig, accelerator: Any, inside: Inside | None = None
) -> float:
    """Tokens per pass over prompts from held-out blocks.

    Each prompt is decoded by one process. Where weights are sharded, all processes decode all prompts: every pass needs
    all processes, and a prompt takes the same number of passes in each.
    """
    chosen = spread(len(blocks), config.num_prompts)
    if inside is None:
        chosen = chosen[accelerator.process_index :: accelerator.num_processes]
    prompts = [choose_prompt(blocks[i], config.prompt_tokens).to(accelerator.device) for i in chosen]
    run = inside or (lambda function: function())
    counts = torch.tensor(run(lambda: count_decoding(token_heads, prompts, config)), device=accelerator.device)
    # All processes need the same number, since they save the best heads together.
    counts = accelerator.reduce(counts, reduction="sum") if inside is None else broadcast(counts)
    tokens, passes = counts.tolist()
    return tokens / max(1, passes)


def choose_prompt(block: Mapping[str, Any], length: int) -> Tensor:
    """At most `length` tokens of one document before the block's first supervised ones, such as a chat's first reply.

    Heads learn nothing of the users' turns, so what is decoded after these would not be theirs to draft. A block in
    which no supervised token follows an unsupervised one of its document, such as plain text, gives its first tokens.

    >>> chat = {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [1, 0, 0, 1, 1], "document_ids": [0, 1, 1, 1, 1]}
    >>> choose_prompt(chat, 8), choose_prompt(chat, 1), choose_prompt(chat | {"loss_mask": [1] * 5}, 2)
    (tensor([2, 3]), tensor([3]), tensor([1, 2]))
    """
    ids_T, supervised_T, documents_T = (torch.tensor(block[n]) for n in ("input_ids", "loss_mask", "document_ids"))
    begins_T = supervised_T[1:].bool() & ~supervised_T[:-1].bool() & (documents_T[1:] == documents_T[:-1])
    if not begins_T.any():
        return ids_T[:length]
    end = int(begins_T.nonzero()[0]) + 1
    document = int((documents_T == documents_T[end]).nonzero()[0])
    return ids_T[max(document, end - length) : end]


def count_decoding(token_heads: TokenHeads, prompts: list[Tensor], config: EvaluationConfig) -> tuple[int, int]:
    """Emitted tokens and backbone passes over the prompts, greedy, with the heads alone (no prompt lookup)."""
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


@dataclass(kw_only=True)
class Drift:
    """Running sum of the KL divergence from the teacher.

    >>> drift, p = Drift(), Projection(weight=torch.tensor([[0.0], [1.0]]))
    >>> drift.update(p, torch.zeros(1, 1), p, torch.full((1, 1), 2.0))   # (½, ½) against softmax(0, 2)
    >>> round(drift.mean, 4)                                               # ½ log(½ / 0.1192) + ½ log(½ / 0.8808)
    0.4338
    """

    count: int = 0
    total: float = 0.0

    @torch.no_grad()
    def update(self, teacher: Projection, teacher_RD: Tensor, trained: Projection, hidden_RD: Tensor) -> None:
        """Add rows, given the hidden states of teacher and trained backbone at the same positions."""
        chunk_rows = max(1, CHUNK_ELEMENTS // len(trained.weight))
        for start in range(0, len(hidden_RD), chunk_rows):
            rows = slice(start, start + chunk_rows)
            log_p_CV = log_probabilities(teacher, teacher_RD[rows])
            log_q_CV = log_probabilities(trained, hidden_RD[rows])
            self.total += float(F.kl_div(log_q_CV, log_p_CV, reduction="sum", log_target=True))
        self.count += len(hidden_RD)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)


def log_probabilities(projection: Projection, hidden_CD: Tensor) -> Tensor:
    """(C, V) log-probabilities, in at least float32."""
    return torch.log_softmax(widen(projection(hidden_CD.to(projection.weight.dtype))), dim=-1)


def quality(before: float, found: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """PPL_1 before and after, from mean losses; their number of tokens; and the KL divergence where it was measured.

    >>> quality(0.0, {"backbone_loss": math.log(2.0), "backbone_tokens": 1200})
    {'before': 1.0, 'after': 2.0, 'tokens': 1200}
    """
    after, tokens = found[f"{prefix}backbone_loss"], int(found[f"{prefix}backbone_tokens"])
    result = {"before": perplexity(before), "after": perplexity(after), "tokens": tokens}
    if (drift := found.get(f"{prefix}backbone_kl")) is not None:
        result["kl_to_original"] = drift
    return result


def perplexity(loss: float) -> float:
    """exp(loss); infinite where a float would overflow.

    >>> round(perplexity(2.0), 3), perplexity(1e9)
    (7.389, inf)
    """
    return math.exp(loss) if loss < math.log(1e300) else math.inf
