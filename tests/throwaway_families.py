"""Two families that live in the tests only, and what tests need to build and randomise heads of any family.

`kv`: one decoder layer of the backbone's class a head, over an inner tap, with a KV cache of its own.
`own_output`: one recurrent cell that is fed with its own output and with the drafted tokens.
Neither is position-wise, so they hold the contract where the library's own families do not.
"""
# B batch, A kept slot, S committed slot, M tree node, R row, D model width

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from plain_text import plain_generate
from tiny import random_tokens, shared_model
from torch import Tensor, nn

import heads
from heads.backbone.cache import TreeCache
from heads.backbone.masks import causal
from heads.backbone.model import Backbone, CommitPlan, Tap, Taps
from heads.backbone.projection import Projection
from heads.interface.token_heads import HeadsConfig, TeacherForcing, TokenHeads


@dataclass(kw_only=True)
class KvState:
    """What the layers have kept: a cache a head, which slots are real, and each head's newest output."""

    caches: list[TreeCache]
    valid_BS: Tensor
    positions_BS: Tensor
    newest: list[Tensor]


class KvHeads(TokenHeads):
    """Head k is a layer of its own over the tap one layer before the end."""

    taps: tuple[Tap, ...] = (1,)  # type: ignore[assignment]

    def __init__(self, config: HeadsConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        self.bodies = nn.ModuleList(copy_layer(backbone) for _ in range(config.num_heads))

    def projection(self, k: int) -> Projection:
        return self.scored(self.backbone.projection)

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        for k, layer in enumerate(self.bodies, start=1):
            hidden_BTD = self.backbone.run_layer(layer, batch.taps[1], batch.positions_BT, batch.mask)
            yield hidden_BTD.flatten(0, 1)[batch.rows[k - 1]]

    def commit(
        self, state: KvState | None, tokens_BN: Tensor, taps: Taps, positions_BN: Tensor, plan: CommitPlan
    ) -> KvState:
        hidden_BAD, positions_BA = plan.select(taps[1]), plan.select(positions_BN)
        batch, kept = positions_BA.shape
        if state is None:
            state = KvState(
                caches=[TreeCache() for _ in self.bodies],
                valid_BS=plan.valid_BA[:, :0],
                positions_BS=positions_BA[:, :0],
                newest=[torch.zeros_like(hidden_BAD[:, 0]) for _ in self.bodies],
            )
        before_BAS = state.valid_BS[:, None, :].expand(batch, kept, -1)
        may_attend_BAS = torch.cat([before_BAS, causal(plan.valid_BA)], dim=2)
        positions_BS = torch.cat([state.positions_BS, positions_BA], dim=1)
        mask = self.backbone.mask_style.finish(may_attend_BAS, positions_BA, positions_BS, self.backbone.dtype)
        newest = []
        for layer, cache, old_BD in zip(self.bodies, state.caches, state.newest, strict=True):
            output_BAD = self.backbone.run_layer(layer, hidden_BAD, positions_BA, mask, cache)
            cache.commit(None, kept)
            newest.append(torch.where(plan.valid_BA.any(dim=1)[:, None], plan.last(output_BAD), old_BD))
        valid_BS = torch.cat([state.valid_BS, plan.valid_BA], dim=1)
        return KvState(caches=state.caches, valid_BS=valid_BS, positions_BS=positions_BS, newest=newest)

    def keep_rows(self, state: KvState, rows_R: Tensor) -> KvState:
        for cache in state.caches:
            cache.keep_rows(rows_R)
        newest = [newest_BD[rows_R] for newest_BD in state.newest]
        return KvState(
            caches=state.caches, valid_BS=state.valid_BS[rows_R], positions_BS=state.positions_BS[rows_R], newest=newest
        )

    def keep_slots(self, state: KvState, num_slots: int) -> KvState:
        for cache in state.caches:
            cache.keep_slots(num_slots)
        valid_BS, positions_BS = state.valid_BS[:, :num_slots], state.positions_BS[:, :num_slots]
        return KvState(caches=state.caches, valid_BS=valid_BS, positions_BS=positions_BS, newest=state.newest)

    def first_level(self, state: KvState) -> list[Tensor]:
        return state.newest

    def step(self, k: int, level: list[Tensor], tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, list[Tensor]]:
        chosen = [newest[parents_M] for newest in level]
        return chosen[k - 1], chosen


class OwnOutputHeads(TokenHeads):
    """h_0 is the final state at t; h_k = tanh(W [E(x_{t+k}) ; h_{k-1}] + b), one cell for all heads."""

    grounded = True
    taps: tuple[Tap, ...] = ("final",)  # type: ignore[assignment]

    def __init__(self, config: HeadsConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        self.cell = nn.Linear(2 * backbone.hidden_size, backbone.hidden_size)

    def projection(self, k: int) -> Projection:
        return self.scored(self.backbone.projection.without_norm())

    def advance(self, hidden_RD: Tensor, tokens_R: Tensor) -> Tensor:
        return torch.tanh(self.cell(torch.cat([self.backbone.embed(tokens_R), hidden_RD], dim=1)))

    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        for k in range(1, self.num_heads + 1):
            rows_R = batch.rows[k - 1]
            hidden_RD = batch.tap("final", rows_R)
            for ahead in range(1, k + 1):
                hidden_RD = self.advance(hidden_RD, batch.token(ahead, rows_R))
            yield hidden_RD

    def commit(self, state: Any, tokens_BN: Tensor, taps: Taps, positions_BN: Tensor, plan: CommitPlan) -> Tensor:
        kept_BD = plan.last(plan.select(taps["final"]))
        return kept_BD if state is None else torch.where(plan.valid_BA.any(dim=1)[:, None], kept_BD, state)

    def keep_rows(self, state: Tensor, rows_R: Tensor) -> Tensor:
        return state[rows_R]

    def keep_slots(self, state: Tensor, num_slots: int) -> Tensor:
        return state

    def first_level(self, state: Tensor) -> Tensor:
        return state

    def step(self, k: int, level: Tensor, tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, Tensor]:
        hidden_MD = self.advance(level[parents_M], tokens_M)
        return hidden_MD, hidden_MD


THROWAWAY = {"kv": KvHeads, "own_output": OwnOutputHeads}
FAMILIES = (*heads.families(), *THROWAWAY)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "grounded, prefix": ("grounded", {"prefix_layers": 1}),
    "grounded, as Hydra's code": (
        "grounded",
        {
            "prefix_layers": 1,
            "prefix_norm": True,
            "biases": True,
            "num_hidden_layers": 3,
            "normalize_embeddings": False,
        },
    ),
    "mlp_speculator, tied": ("mlp_speculator", {"inner_width": 20, "tie_weights": True, "scale_input": True}),
    "gru, prefix": ("gru", {"prefix_layers": 1, "hidden_offset": 1, "unembedding": "shared"}),
}
"""Families with options that change how they run over the context."""
OTHER_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamo, lora": ("dynamo", {"lora_rank": 2}),
    "mtp, per head": ("mtp", {"modules": "per_head", "first": "state", "reads": "last", "blank_first": True}),
}


def copy_layer(backbone: Backbone) -> nn.Module:
    """A layer like the backbone's last that writes its keys and values to layer 0 of a cache."""
    layer = remove_hook_from_module(copy.deepcopy(backbone.layers[-1]), recurse=True)
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = 0
    return layer


def make_heads(family: str, backbone: Backbone, *, num_heads: int = 3, seed: int = 0, **config: Any) -> TokenHeads:
    """Heads of any family in the backbone's dtype, every parameter randomised: a start at zero would hide errors."""
    torch.manual_seed(seed)
    if family in VARIANTS or family in OTHER_VARIANTS:
        family, options = (VARIANTS | OTHER_VARIANTS)[family]
        config = options | config
    if family in THROWAWAY:
        draft_tokens = config.pop("draft_tokens", None)
        count = None if draft_tokens is None else len(draft_tokens)
        token_heads = THROWAWAY[family](HeadsConfig(num_heads=num_heads, draft_vocabulary=count), backbone)
        if draft_tokens is not None:
            token_heads.choose_draft_tokens(draft_tokens)
    else:
        token_heads = heads.create(family, backbone, num_heads=num_heads, **config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            width = parameter.shape[-1] if parameter.ndim > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / width**0.5
            parameter.add_(noise.to(parameter.device))
    return token_heads.to(backbone.dtype).eval()


FOLDER_OF_FITTED = "HEADWAY_TESTS_FITTED"
"""The variable of the environment in which tests/conftest.py names a folder that all processes of a test run share."""


@functools.cache
def fitted_heads(
    family: str,
    name: str,
    attn: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    num_heads: int = 3,
    draft_tokens: tuple[int, ...] | None = None,
) -> TokenHeads:
    """Heads fitted for a moment to the model's own greedy text, so that paths of every depth are accepted."""
    backbone = Backbone(shared_model(name, "eager" if name == "codegen" else attn, dtype))
    token_heads = make_heads(family, backbone, num_heads=num_heads, seed=1, draft_tokens=draft_tokens)
    name_of_file = "-".join(map(str, (family, name, attn, dtype, num_heads, draft_tokens))).replace("/", "_")
    with fitted_once(hashlib.sha256(name_of_file.encode()).hexdigest(), token_heads) as missing:
        if missing:
            fit(token_heads, torch.cat([random_tokens(1, 5, seed=seed) for seed in range(50, 56)]))
    return token_heads


@contextlib.contextmanager
def fitted_once(name: str, token_heads: TokenHeads) -> Iterator[bool]:
    """Weights that another process of the same test run has fitted; True if they are to be fitted here, for others.

    A fifth of the time of decoding tests was the fitting of the same heads in each of two processes.
    """
    folder = os.environ.get(FOLDER_OF_FITTED)
    file = Path(folder or "", name)
    if folder is None or not file.is_file():
        yield True
        if folder is not None:
            unfinished = file.with_suffix(f".{os.getpid()}")
            torch.save(token_heads.state_dict(), unfinished)
            unfinished.replace(file)
        return
    token_heads.load_state_dict(torch.load(file, weights_only=True))
    token_heads.requires_grad_(True)  # as fitting leaves them
    yield False


def fit(token_heads: TokenHeads, prompts_BT: Tensor, *, steps: int = 30, new_tokens: int = 24) -> float:
    """A plain loop: AdamW on the greedy continuations of the prompts; the last loss. The backbone gets no gradient."""
    backbone = token_heads.backbone
    with torch.no_grad():
        tokens_BT = plain_generate(
            backbone.model, prompts_BT, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        batch, length = tokens_BT.shape
        valid_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        positions_BT = torch.arange(length).expand(batch, length)
        mask = backbone.mask_style.finish(causal(valid_BT), positions_BT, positions_BT, backbone.dtype)
        _, taps = backbone.forward(
            tokens_BT, taps=token_heads.hidden_taps, attention_mask=mask, position_ids=positions_BT, use_cache=False
        )
    index_BT = torch.arange(batch * length).view(batch, length)
    rows = [index_BT[:, : length - 1 - k].flatten() for k in range(1, token_heads.num_heads + 1)]
    forcing = TeacherForcing(tokens_BT=tokens_BT, taps=taps, positions_BT=positions_BT, mask=mask, rows=rows)
    token_heads.requires_grad_(True)  # layers are copied from a shared model, which another test may have frozen
    parameters = list(token_heads.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    loss = torch.zeros(())
    for _ in range(steps):
        loss = torch.zeros((), dtype=backbone.dtype)
        for k, hidden_RD in enumerate(token_heads.teacher_forced(forcing), start=1):
            projection = token_heads.projection(k)
            entries_R, scored_R = projection.find(forcing.token(1 + k, rows[k - 1]))
            loss = loss + nn.functional.cross_entropy(projection(hidden_RD[scored_R]), entries_R[scored_R])
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return float(loss.detach())
