"""Headway's decoding with a chain of drafts, to compare with other engines: each pass's drafted ids and accepted count.

`heads.TreeDecoding` counts on the same chain, but leaves out drafts after the last requested token; here none are.
"""
# T prompt position, B = 1 row, N node

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import heads
from heads.interface.token_heads import TokenHeads


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One text.

    Attributes:
        text: the new tokens, at least as many as requested.
        drafts: the drafted tokens that each pass after the prompt's verified.
        accepted: how many of them each pass accepted.
        begins: how many new tokens there were before each of these passes.
    """

    text: list[int]
    drafts: list[list[int]]
    accepted: list[int]
    begins: list[int]

    def accepted_per_depth(self, depth: int, within: int | None = None) -> list[int]:
        """How many passes accepted the draft of each depth.

        Args:
            within: count a draft only where it is among that many new tokens; None counts all.

        >>> chain = Chain(text=[1, 2, 3, 4], drafts=[[2, 3]], accepted=[2], begins=[1])
        >>> chain.accepted_per_depth(2), chain.accepted_per_depth(2, within=2)
        ([1, 1], [1, 0])
        """
        kept = [
            n if within is None else min(n, within - begin) for n, begin in zip(self.accepted, self.begins, strict=True)
        ]
        return [sum(n >= d for n in kept) for d in range(1, depth + 1)]


def chain_of(depth: int) -> heads.Tree:
    return heads.Tree([[0] * d for d in range(1, depth + 1)])


@torch.no_grad()
def run_chain(token_heads: TokenHeads, prompt_1T: Tensor, new_tokens: int, depth: int) -> Chain:
    """Draft `depth` tokens, verify, accept, until there are `new_tokens` (docs/decode.md has the loop)."""
    backbone, state_of_heads = token_heads.backbone, None

    def commit(output: Any, plan: heads.CommitPlan) -> None:
        nonlocal state_of_heads
        state_of_heads = token_heads.commit(state_of_heads, output.tokens_BN, output.taps, output.positions_BN, plan)

    everything = torch.ones_like(prompt_1T, dtype=torch.bool)
    state, output = backbone.read(prompt_1T, everything, token_heads.taps, commit=commit)
    text = backbone.logits(output.final_BND[:, -1]).argmax(dim=-1).tolist()
    chain = Chain(text=text, drafts=[], accepted=[], begins=[])
    tree = chain_of(depth)
    drafter = heads.TreeDrafter(token_heads, tree)
    while len(text) < new_tokens:
        chain.begins.append(len(text))
        nodes_BN = drafter.draft(state_of_heads, torch.tensor(text[-1:]))
        output = backbone.verify(state, nodes_BN, drafter.depth_N, drafter.sees_NN, token_heads.taps)
        paths, new = heads.accept_greedy(tree, nodes_BN, backbone.logits(output.final_BND))
        plan = heads.CommitPlan.from_paths(paths, output.tokens_BN.device)
        commit(output, plan)
        state = backbone.commit(state, output, plan)
        chain.drafts.append(nodes_BN[0, 1:].tolist())
        chain.accepted.append(len(new[0]) - 1)
        text.extend(new[0])
    return chain


def generated(token_heads: TokenHeads, prompt_1T: Tensor, new_tokens: int, depth: int) -> tuple[list[int], list[int]]:
    """The text of `generate` with the same chain, and the accepted drafts of each depth as it counts them."""
    output = token_heads.backbone.model.generate(
        prompt_1T,
        attention_mask=torch.ones_like(prompt_1T),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        custom_generate=heads.TreeDecoding(token_heads, chain_of(depth), lookup=0),
    )
    return output.sequences[0, prompt_1T.shape[1] :].tolist(), output.stats.accepted_per_depth
