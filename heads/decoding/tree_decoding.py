"""Decoding with a token tree and a looked-up chain, lossless as heads/decoding/loop.py says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heads.backbone.compiling.compiled_backbone import compiled
from heads.backbone.support import fastest_mode
from heads.decoding.acceptance.rules import Rule, read_rule
from heads.decoding.defaults import AnyTree, SettingsByBatch
from heads.decoding.loop import VerifiedRun
from heads.decoding.proposers.heads import HeadsDrafter, compiled_drafting
from heads.decoding.request.entry import (
    Call,
    Decoding,
    check_flag,
    check_generator,
    check_generator_device,
    check_heads,
    check_token_heads,
)
from heads.decoding.request.output import DecodingOutput
from heads.decoding.reuse import ReusableCaches, check_keeps
from heads.interface.token_heads import TokenHeads


class TreeDecoding(Decoding):
    """Hand it to `generate`: `model.generate(**inputs, custom_generate=heads.TreeDecoding(token_heads))`.

    Args:
        token_heads: heads on the very model that `generate` is called on.
        tree: a `Tree`, a `DynamicTree`, a list of paths, a JSON file of paths or of `headway tune-tree`, or a node
            budget. None takes the tree.json that the heads were loaded with, if it was made for this kind of device,
            dtype and number of rows (its static tree where the rule samples drafts); else a default tree, grown from
            the heads' measured accuracy where their checkpoint has it. `Tree.root_only()` drafts nothing.
        lookup: length of a chain that is copied from after the last earlier occurrence of the text's last tokens, and
            verified beside the heads' tree (prompt lookup). While whole chains are accepted, only the chain is
            verified, and its length doubles up to four times `lookup`. 0: no chain. None: the length in the tree.json
            that is used, else 10.
        keep_caches: for conversations: the caches stay when a call ends, and the next call reads only what its prompt
            adds to the text so far. Calls have one row; the text is the same either way. `forget()` frees the caches.
            Call it after editing weights through `.data`, or a module's attributes that are no tensors; other changes
            of weights, modules, hooks and adapters, the heads' too, are noticed.
        generator: source of randomness for sampling; None is torch's global one, as in `generate`.
        rule: which drafts are accepted where a request samples (docs/decode.md): "exact" samples from the backbone
            and follows the drafts that agree; "rejection" samples the drafts too and accepts them by modified rejection
            sampling, which is lossless as well; "typical" or `heads.TypicalRule(…)` accepts likely drafts and is lossy.
            Greedy text is the same under all of them.
        compile: run passes, and the drafting of static trees, as compiled graphs of fixed shapes, which is faster where
            passes are short, after seconds of compiling for each new shape. Sampled drafts and dynamic trees are
            drafted uncompiled. None: as the tree.json that is used says (`headway tune-tree --compile`), else False.

    Attributes:
        tree, lookup: those for one row; `settings.at(rows)` has those of any batch size.

    Raises:
        ValueError: no heads; a tree that is malformed, deeper than the heads draft or, where the rule samples drafts,
            dynamic; an unknown rule; `compile` or `keep_caches` with a backbone that does not allow it; or a flag that
            is neither true nor false.
    """

    def __init__(
        self,
        token_heads: TokenHeads,
        tree: AnyTree | None = None,
        generator: torch.Generator | None = None,
        *,
        lookup: int | None = None,
        keep_caches: bool = False,
        rule: str | Rule = "exact",
        compile: bool | None = None,
    ) -> None:
        check_token_heads(token_heads)
        self.token_heads = token_heads
        self.generator = check_generator(generator)
        self.rule = read_rule(rule, generator)
        compile = check_flag(compile, "compile", or_none=True)
        self.settings = SettingsByBatch(token_heads, tree, lookup, compile, self.rule)
        of_one_row = self.settings.at(1)
        self.tree, self.lookup = of_one_row.tree, of_one_row.lookup
        compiles = any(one.compile for one in (of_one_row, *self.settings.by_batch.values()))
        self.backbone = compiled(token_heads.backbone) if compiles else token_heads.backbone
        self.drafting = compiled_drafting(token_heads) if compiles else None
        self.reusable: ReusableCaches[HeadsDrafter] | None = None
        if check_flag(keep_caches, "keep_caches"):
            check_keeps(token_heads.backbone)
            self.reusable = ReusableCaches(token_heads)

    reads_images = True

    def check_model(self, model: Any) -> None:
        check_heads(self.token_heads, model)

    def decode(self, model: Any, call: Call) -> Tensor | DecodingOutput:
        if self.rule.samples_drafts and not call.request.greedy:  # drafts are sampled where the heads are
            check_generator_device(self.generator, call.tokens_BT.device, self.token_heads.backbone.heads_device)
        settings = self.settings.of_call(len(call.tokens_BT))
        drafter = HeadsDrafter(
            self.token_heads,
            settings.tree,
            settings.indices,
            lookup=settings.lookup,
            graphs=self.drafting if settings.compile else None,
            samples_drafts=self.rule.samples_drafts,
            generator=self.generator,
        )
        backbone = self.backbone if settings.compile else self.token_heads.backbone
        mode = torch.no_grad if settings.compile else fastest_mode(backbone.model, self.token_heads)
        return VerifiedRun(backbone, drafter, self.rule, call, settings.max_depth, self.reusable, mode).decode()

    def forget(self) -> None:
        """Free the caches that the last call left; the next call reads its whole prompt."""
        if self.reusable is not None:
            self.reusable.forget()
