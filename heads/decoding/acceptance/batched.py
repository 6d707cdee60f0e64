"""The token that plain generation would choose after every node of a pass, for all nodes in one batch.

A walk from node to node calls each processor, and makes the host wait, once for every token. Here each processor gets
the nodes of all rows as one batch, each with its own prefix, and the host waits once. The processors must neither mix
rows nor depend on the order or length of a prefix, since shorter prefixes are padded with a token that they hold.

Samples are those of the walk: `torch.multinomial` takes argmax(p / E) with independent exponential E(x). A walk reaches
one node of each depth, so the nodes of a depth share one E, sampled in the walk's order. For a single row the generator
is then rewound to the last depth that the walk reached, so that a seed gives the same text.
"""
# B row, N tree node, R = B·N, D depth, L length so far, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from heads.decoding.request.request import Request, Row

ROW_BY_ROW = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
"""Processors that do not mix rows; subclasses of them might, and are not included."""


NUMBERS_PER_CALL = 2**15
"""How many scores a CPU processes in the time that one further call of a processor takes (a penalty takes 0.12 ms for
one node of 2k tokens and 0.22 ms for 24 of them; measured with vocabularies of 2k to 128k)."""

MAX_NUMBERS = 2**25
"""The most scores in one call, since processors make several copies of them."""


def is_faster(rows: Sequence[Row], logits_BNV: Tensor, depths: int) -> bool:
    """Whether one batch of all nodes is faster than a walk.

    On an accelerator it always is, since the host waits once. On a CPU the nodes that a walk would not reach cost time,
    so it is faster only for greedy requests, if a walk through half of the depths would take longer.
    """
    if logits_BNV.device.type != "cpu":
        return True
    _, nodes, vocabulary = logits_BNV.shape
    longest = max(len(row.tokens) for row in rows)
    return rows[0].request.greedy and nodes * (vocabulary + longest) <= NUMBERS_PER_CALL * depths / 2


def is_possible(request: Request, rows: Sequence[Row]) -> bool:
    """Whether no scores are returned, and all processors take nodes as rows.

    A repetition penalty must ignore fewer tokens than the text has, since the nodes after them are not in the order of
    a prefix.
    """
    keeps = request.keep_scores or request.keep_logits
    penalised = request.penalised_from < min(len(row.tokens) for row in rows)
    return not keeps and penalised and all(type(processor) in ROW_BY_ROW for processor in request.processors)


@dataclass
class ReplayableNoise:
    """Exponentials for all depths of a walk. `rewind` takes back those of depths that the walk did not reach.

    Attributes:
        generator: None is torch's global one for the device.
        states: the generator's state before the first depth of the last sample, and after each depth.
    """

    generator: torch.Generator | None
    states: list[Tensor] = field(default_factory=list)

    def sample(self, like_V: Tensor, depths: int) -> Tensor:
        """(D, V): exponentials, sampled depth by depth."""
        self.source = self.generator or global_generator(like_V.device)
        self.states, sampled = [self.source.get_state()], []
        for _ in range(depths):
            sampled.append(torch.empty_like(like_V).exponential_(generator=self.generator))
            self.states.append(self.source.get_state())
        return torch.stack(sampled)

    def rewind(self, used: int) -> None:
        """Set the generator back to its state after the first `used` depths of the last sample."""
        self.source.set_state(self.states[used])


def global_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.mps._get_default_mps_generator() if device.type == "mps" else torch.default_generator


def choose_at_nodes(
    rows: Sequence[Row],
    tokens_BN: Tensor,
    depth_BN: Tensor,
    sees_BNN: Tensor,
    logits_BNV: Tensor,
    depths: int,
    noise: ReplayableNoise,
) -> Tensor:
    """(B, N): the token after each node, on the rows' device; the host does not wait for it.

    Args:
        depths: how many depths a walk may reach, the root's included.
        noise: used where the request samples.
    """
    batch, nodes, vocabulary = logits_BNV.shape
    group = max(1, MAX_NUMBERS // (nodes * vocabulary))
    if batch <= group:
        return choose_for_group(rows, tokens_BN, depth_BN, sees_BNN, logits_BNV, depths, noise)
    return torch.cat(
        [
            choose_for_group(rows[i:j], tokens_BN[i:j], depth_BN[i:j], sees_BNN[i:j], logits_BNV[i:j], depths, noise)
            for i, j in ((start, start + group) for start in range(0, batch, group))
        ]
    )


def choose_for_group(
    rows: Sequence[Row],
    tokens_BN: Tensor,
    depth_BN: Tensor,
    sees_BNN: Tensor,
    logits_BNV: Tensor,
    depths: int,
    noise: ReplayableNoise,
) -> Tensor:
    scores_BNV = score_nodes(rows, tokens_BN, sees_BNN, logits_BNV)
    if rows[0].request.greedy:
        return scores_BNV.argmax(dim=-1)
    chosen = []
    for depth_N, scores_NV in zip(depth_BN.to(scores_BNV.device), scores_BNV, strict=True):
        p_NV = torch.softmax(scores_NV, dim=-1)
        noise_DV = noise.sample(p_NV[0], depths)
        chosen.append((p_NV / noise_DV[depth_N]).argmax(dim=-1))
    return torch.stack(chosen)


def score_nodes(rows: Sequence[Row], tokens_BN: Tensor, sees_BNN: Tensor, logits_BNV: Tensor) -> Tensor:
    """(B, N, V): float32 logits after the rows' processors, each node's with its own prefix.

    They are on the rows' device, as in plain generation; a backbone that is spread over devices may end on another.
    """
    scores_BNV = logits_BNV.to(rows[0].device, torch.float32)
    if not rows[0].processors:
        return scores_BNV
    batch, nodes, _ = logits_BNV.shape
    # For each node its own and its ancestors' tokens; the columns of other nodes repeat its own.
    ahead_BNN = torch.where(sees_BNN, tokens_BN[:, None, :], tokens_BN[:, :, None])
    texts_BNL = texts_of(rows)[:, None].expand(batch, nodes, -1)
    texts_RL = torch.cat([texts_BNL, ahead_BNN.to(texts_BNL.device)], dim=2).flatten(0, 1)
    scores_RV = scores_BNV.flatten(0, 1)
    for own in zip(*(row.processors for row in rows), strict=True):
        scores_RV = for_all_nodes(own, nodes)(texts_RL, scores_RV)
    return scores_RV.view(batch, nodes, -1)


def texts_of(rows: Sequence[Row]) -> Tensor:
    """(B, L): the rows' texts, shorter ones padded with their last token."""
    longest = max(len(row.tokens) for row in rows)
    texts = [row.prefix() for row in rows]
    if len(rows) == 1:
        return texts[0]
    return torch.cat([torch.cat([x_1L, x_1L[:, -1:].expand(1, longest - x_1L.shape[1])], dim=1) for x_1L in texts])


def for_all_nodes(own: Sequence[Any], nodes: int) -> Any:
    """One processor for the nodes of all rows; a repetition penalty is given the padding of each node's row."""
    paddings: list[Any] = [getattr(processor, "prompt_ignore_length", None) for processor in own]
    if not isinstance(paddings[0], Tensor):
        return own[0]
    processor = copy.copy(own[0])
    processor.prompt_ignore_length = torch.cat(paddings).repeat_interleave(nodes)
    return processor
