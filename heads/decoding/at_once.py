"""What plain generation would choose behind every node of a pass, all at once: a pass then waits for the device once.

Walking node by node asks the device for one token before it knows the next node, a synchronisation for each emitted
token. Here each node's logits pass the processors as a row of their own, with the node's own prefix, one token is
chosen at each node, and all come over together. It takes processors whose rows do not depend on each other, nor on the
prefix's order or length: prefixes of different lengths are filled up with a token that they hold already.

Draws are those of the walk. `torch.multinomial` of one token is argmax(p / E) with independent exponential E(x); the
nodes of one depth share one E, of which a walk meets one node only, and E is drawn depth by depth as the walk would
draw it. For a single row, what was drawn for depths that were not reached is given back to the generator: the same seed
gives the same text.
"""
# B row, N tree node, D depth, L length so far, V vocabulary

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

from heads.decoding.request import Request, Row

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
"""These very classes: a subclass may do anything."""


def pays(device: torch.device) -> bool:
    """On a CPU nothing is waited for, and nodes that are not reached would be judged for nothing."""
    return device.type != "cpu"


def can_choose(request: Request, rows: Sequence[Row]) -> bool:
    """Nothing is to be kept of each token, and the processors take nodes as rows.

    A repetition penalty that leaves out more than the text so far would count a node's columns, which are no places.
    """
    keeps = request.keep_scores or request.keep_logits
    penalised = request.penalised_from < min(len(row.tokens) for row in rows)
    return not keeps and penalised and all(type(processor) in ROW_BY_ROW for processor in request.processors)


@dataclass
class Randomness:
    """Exponentials for one walk, and the way back for those that it did not use.

    Attributes:
        generator: None is torch's global one for the device.
    """

    generator: torch.Generator | None
    states: list[Tensor] = field(default_factory=list)

    def draw(self, like_V: Tensor, depths: int) -> Tensor:
        """(D, V), a depth at a time."""
        self.source = self.generator or global_generator(like_V.device)
        self.states, drawn = [self.source.get_state()], []
        for _ in range(depths):
            drawn.append(torch.empty_like(like_V).exponential_(generator=self.generator))
            self.states.append(self.source.get_state())
        return torch.stack(drawn)

    def give_back(self, used: int) -> None:
        """Of the depths drawn last, only the first `used` count."""
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
    randomness: Randomness,
) -> Tensor:
    """(B, N): the token after each node, on the rows' device; nothing is read from it.

    Args:
        depths: how many a walk may pass, the root's included.
        randomness: asked where the request samples.
    """
    chosen = []
    for b, row in enumerate(rows):
        scores_NV = score_nodes(row, tokens_BN[b], sees_BNN[b], logits_BNV[b])
        if row.request.greedy:
            chosen.append(scores_NV.argmax(dim=-1))
            continue
        p_NV = torch.softmax(scores_NV, dim=-1)
        waits_DV = randomness.draw(p_NV[0], depths)
        chosen.append((p_NV / waits_DV[depth_BN[b].to(row.device)]).argmax(dim=-1))
    return torch.stack(chosen)


def score_nodes(row: Row, tokens_N: Tensor, sees_NN: Tensor, logits_NV: Tensor) -> Tensor:
    """(N, V): float32 logits after the row's processors, each node's with its own prefix.

    They lie where plain generation has them, on the row's device, which may be another than a spread backbone's last.
    """
    scores_NV = logits_NV.to(row.device, torch.float32)
    if not row.processors:
        return scores_NV
    ahead_NN = torch.where(sees_NN, tokens_N[None, :], tokens_N[:, None])  # ancestors, and the node's own elsewhere
    text_NL = torch.cat([row.prefix().expand(len(tokens_N), -1), ahead_NN.to(row.device)], dim=1)
    for processor in row.processors:
        scores_NV = for_nodes(processor, len(tokens_N))(text_NL, scores_NV)
    return scores_NV


def for_nodes(processor: Any, nodes: int) -> Any:
    """A repetition penalty that holds the padding of its row holds it for each node."""
    padding = getattr(processor, "prompt_ignore_length", None)
    if isinstance(padding, Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = padding.expand(nodes)
    return processor
