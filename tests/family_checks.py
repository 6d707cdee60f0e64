"""What tests of families share: a backbone in float64, teacher-forced states, drafting step by step, greedy text."""
# B batch, T position, k drafted token, D model width

from __future__ import annotations

from typing import Any

import torch
from throwaway_families import fit
from tiny import left_padded, random_tokens, shared_model
from torch import Tensor

import heads
from heads.backbone.masks import causal, positions_within_documents, within_documents
from heads.backbone.model import Backbone, CommitPlan
from heads.interface.token_heads import TeacherForcing, TokenHeads

# Models run with sdpa in float64 where they have it: rounding is 1e-14 there. CodeGen's float32 softmax over rows of
# another length costs 1e-5 (tests/heads/backbone/test_backbone.py); an off-by-one moves states by units.
TOLERANCE = {"codegen": 1e-4}
DEFAULT_TOLERANCE = 1e-9


def backbone_of(name: str) -> Backbone:
    return Backbone(shared_model(name, "eager" if name == "codegen" else "sdpa", torch.float64))


def teacher_forced(token_heads: TokenHeads, tokens_BT: Tensor, documents_BT: Tensor) -> list[dict[tuple, Tensor]]:
    """For each head the states by (row of the batch, position), at every position whose label is in its document."""
    backbone = token_heads.backbone
    positions_BT = positions_within_documents(documents_BT)
    mask = backbone.mask_style.finish(within_documents(documents_BT), positions_BT, positions_BT, backbone.dtype)
    batch, length = tokens_BT.shape
    where = [
        [
            (b, t)
            for b in range(batch)
            for t in range(length - 1 - k)
            if documents_BT[b, t] == documents_BT[b, t + 1 + k]
        ]
        for k in range(1, token_heads.num_heads + 1)
    ]
    with torch.no_grad():
        _, taps = backbone.forward(
            tokens_BT, taps=token_heads.hidden_taps, attention_mask=mask, position_ids=positions_BT, use_cache=False
        )
        forcing = TeacherForcing(
            tokens_BT=tokens_BT,
            taps=taps,
            positions_BT=positions_BT,
            mask=mask,
            rows=[torch.tensor([b * length + t for b, t in at]) for at in where],
        )
        states = list(token_heads.teacher_forced(forcing))
    assert len(states) == token_heads.num_heads, "one head's states at a time, K in all"
    assert [len(s) for s in states] == [len(at) for at in where], "states at the supervised rows only"
    return [dict(zip(at, s, strict=True)) for at, s in zip(where, states, strict=True)]


@torch.no_grad()
def drafted(token_heads: TokenHeads, state: Any, tokens_Bk: Tensor) -> list[Tensor]:
    """Head 1 … K's states, step by step along given tokens x_{t+1} … x_{t+K}, one node a row."""
    rows_B = torch.arange(tokens_Bk.shape[0])
    level = token_heads.first_level(state)
    hidden = []
    for k in range(1, tokens_Bk.shape[1] + 1):
        hidden_BD, level = token_heads.step(k, level, tokens_Bk[:, k - 1], rows_B)
        hidden.append(hidden_BD)
    return hidden


@torch.no_grad()
def prefilled(token_heads: TokenHeads, prompts: list[list[int]]) -> tuple[Any, Any]:
    """The states of backbone and heads after left-padded prompts."""
    tokens_BT, mask_BT = left_padded(prompts)
    state, output = token_heads.backbone.prefill(tokens_BT, mask_BT.bool(), token_heads.taps)
    plan = CommitPlan.whole(mask_BT.bool())
    return state, token_heads.commit(None, output.tokens_BN, output.taps, output.positions_BN, plan)


def check_greedy(token_heads: TokenHeads, steps: int = 30, **options: Any) -> Any:
    """Tree decoding gives the backbone's greedy text, for heads fitted so that paths of all lengths are accepted."""
    fit(token_heads, torch.cat([random_tokens(1, 5, seed=seed) for seed in range(50, 54)]), steps=steps)
    model = token_heads.backbone.model
    prompts, mask = left_padded([random_tokens(n, seed=50).tolist() for n in (5, 3)])
    settings = {"max_new_tokens": 24, "do_sample": False, "attention_mask": mask, "eos_token_id": None}
    wanted = model.generate(prompts, **settings)
    decoding = heads.TreeDecoding(token_heads.eval(), lookup=0, **options)
    output = model.generate(prompts, **settings, return_dict_in_generate=True, custom_generate=decoding)
    assert torch.equal(output.sequences, wanted)
    return output.stats


def teacher_forced_logits(token_heads, tokens_BT):
    """Each head's logits along texts, as training computes them; and the backbone's hidden states that they read."""
    backbone = token_heads.backbone
    batch, length = tokens_BT.shape
    positions_BT = torch.arange(length).expand(batch, length)
    mask = backbone.mask_style.finish(causal(tokens_BT >= 0), positions_BT, positions_BT, backbone.dtype)
    with torch.no_grad():
        _, taps = backbone.forward(tokens_BT, taps=token_heads.hidden_taps, attention_mask=mask, use_cache=False)
        index_BT = torch.arange(batch * length).view(batch, length)
        rows = [index_BT[:, : length - 1 - k].flatten() for k in range(1, token_heads.num_heads + 1)]
        forcing = TeacherForcing(tokens_BT=tokens_BT, taps=taps, positions_BT=positions_BT, mask=mask, rows=rows)
        states = list(token_heads.teacher_forced(forcing))
        return [token_heads.projection(k)(hidden) for k, hidden in enumerate(states, start=1)], taps
