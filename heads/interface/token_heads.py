"""The one contract of a family of heads.

position t            t     t+1    t+2    t+3
backbone at t                x
head 1   at t                       x                 head k at t predicts x_{t+1+k}; a grounded head k also reads the
head 2   at t                              x          embeddings of x_{t+1} … x_{t+k}

A family is one file in heads/families/ with two names: `Config` (keyword-only dataclass) and `Heads` (a `TokenHeads`).
Trainer, decoder and checkpoints know this contract and never a family. The conformance suite
(tests/heads/families/test_families.py) runs every family found: teacher-forced states equal step-by-step drafting.
"""
# B batch, T position, N slot of one pass, M tree node of one level, R row (a supervised position), D model width

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heads.backbone.cache import TreeCache
from heads.backbone.draft_vocabulary import DraftVocabulary
from heads.backbone.model import Backbone, CommitPlan, Tap, Taps
from heads.backbone.projection import Projection
from heads.backbone.state import HiddenTap, HiddenTaps, hidden_taps
from heads.backbone.support import adapted_layers, added_to_output
from heads.interface.draft_vocabulary import SharedRows, StartedRows, check_draft_tokens, mark_chosen, unchosen
from heads.validation import validated, within

MAX_HEADS = 32


@validated
@dataclass(kw_only=True)
class HeadsConfig:
    """What every family's Config begins with.

    Attributes:
        num_heads: K, the number of heads; head k predicts the token k + 1 places ahead.
        draft_vocabulary: how many tokens the heads score: the most frequent ones of the training data, all other tokens
            are never drafted; None: every token (docs/families.md).
    """

    num_heads: int = within(1, MAX_HEADS, default=4)
    draft_vocabulary: int | None = within(1, default=None)


@dataclass(frozen=True, kw_only=True)
class TeacherForcing:
    """A training batch as heads see it: the true tokens and the backbone's states over them.

    Attributes:
        tokens_BT: the true tokens.
        taps: the backbone's hidden states of `hidden_taps`, each (B, T, D).
        positions_BT: positions, starting again at 0 in each packed document.
        mask: the attention mask that the backbone used, for families with layers of their own.
        rows: for head k at index k - 1, the supervised positions as indices into the flattened (B·T); a row r of head k
            has its tokens x_{t+1} … x_{t+1+k} at r+1 … r+1+k, all of the same document.
    """

    tokens_BT: Tensor
    taps: HiddenTaps
    positions_BT: Tensor
    mask: Any
    rows: Sequence[Tensor]

    def tap(self, tap: HiddenTap, rows_R: Tensor) -> Tensor:
        """(R, D)"""
        return self.taps[tap].flatten(0, 1)[rows_R]

    def token(self, ahead: int, rows_R: Tensor) -> Tensor:
        """(R,): x_{t+ahead} for each row."""
        return self.tokens_BT.flatten()[rows_R + ahead]


class TokenHeads(nn.Module):
    """Heads 1 … K of one family on one backbone.

    Drafting has three verbs. `commit` moves what a pass committed into the family's state, `first_level` makes the
    level above the root from that state, and `step(k, …)` goes one level deeper for many nodes together. The decoder
    never looks into states and levels.
    """

    draft_tokens_S: Tensor | None
    """Ids of the tokens that the heads score, ascending, saved with them; None: all."""

    grounded: ClassVar[bool] = False
    """Whether heads read drafted tokens; if they do, drafting goes level by level and nodes of one row differ."""

    def __init__(self, config: HeadsConfig, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone  # a plain object: nothing of the backbone is registered here
        self.register_buffer("draft_tokens_S", unchosen(config.draft_vocabulary, backbone))
        self._vocab_size = len(backbone.projection.weight)  # read now: ZeRO-3 takes the weight's shape away later
        self._shared_rows = SharedRows()
        self._unchosen = config.draft_vocabulary is not None
        self.register_load_state_dict_post_hook(mark_chosen)  # type: ignore[no-untyped-call]
        self.backbone_was_trained = False
        """The backbone was trained together with these heads, so it is saved with them."""
        self.measured_accuracy: list[list[float]] | None = None
        """accuracy[k - 1][r]: measured share of positions at which rank r of head k was right; trees grow from it."""
        self.tuned_tree: Any = None
        """The tree that `headway tune-tree` fitted to them, as heads/decoding/tuned_file.py parses it; None: none."""
        self.checksum: str | None = None
        """sha256 of the tensors that they were loaded from, by which a tuned tree knows its heads."""

    @property
    def num_heads(self) -> int:
        return self.config.num_heads

    @property
    def max_depth(self) -> int:
        """The deepest level that they can draft: K, unless the family's step and projection work beyond K."""
        return self.num_heads

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The tokens that the heads score, where these are not all.

        Raises:
            ValueError: the tokens are not chosen yet.
        """
        if self.draft_tokens_S is None:
            return None
        if self._unchosen:
            raise ValueError(f"Draft tokens of these {self.family} heads are not chosen; call choose_draft_tokens.")
        return DraftVocabulary(tokens_S=self.draft_tokens_S, size=self._vocab_size)

    @property
    def num_scored(self) -> int:
        return self.backbone.vocab_size if self.draft_tokens_S is None else len(self.draft_tokens_S)

    @torch.no_grad()
    def choose_draft_tokens(self, tokens: Tensor | Sequence[int]) -> None:
        """Choose the tokens that new heads with a draft vocabulary score; their own unembeddings start from these rows.

        Raises:
            ValueError: invalid ids, another number of them, or heads that score every token.
        """
        if self.draft_tokens_S is None:
            raise ValueError(f"{self.family} heads without draft_vocabulary score every token; give draft_vocabulary.")
        if self.draft_tokens_S.is_meta:  # no tensor has content there
            self._unchosen = False
            return
        ids_S = check_draft_tokens(tokens, len(self.draft_tokens_S), self.backbone.vocab_size)
        self.draft_tokens_S.copy_(ids_S)
        self._unchosen = False
        for module in self.modules():
            if isinstance(module, StartedRows):
                module.start_from(self.draft_tokens_S, self.backbone)
        for k in range(1, self.num_heads + 1):
            if len(self.projection(k).weight) != len(ids_S) or self.projection(k).vocabulary is None:
                raise ValueError(f"Heads of the family {self.family!r} know no draft vocabulary; leave it out.")

    def scored(self, projection: Projection) -> Projection:
        """A head's record as `projection` has to return it: over the scored tokens.

        Args:
            projection: the backbone's record, whose rows are gathered, or one whose weight has these rows only.
        """
        if (vocabulary := self.draft_vocabulary) is None:
            return projection
        weight, bias = projection.weight, projection.bias
        if weight is self.backbone.projection.weight:
            weight, bias = self._shared_rows.of(weight, bias, vocabulary.tokens_S)
        return replace(projection, weight=weight, bias=bias, vocabulary=vocabulary)

    def refresh(self) -> None:
        """Prepare for a new text: follow changes of the backbone, and forget copies of its weights.

        Raises:
            ValueError: a change that these heads cannot follow: more or fewer tokens, an adapter or a hook on an output
                layer that they share, an adapter on a layer that they share.
        """
        self.backbone.refresh()
        self._shared_rows = SharedRows()
        vocab_size = len(self.backbone.projection.weight)
        if vocab_size != self._vocab_size:
            raise ValueError(
                f"The backbone's vocabulary has {vocab_size} tokens, and had {self._vocab_size} when these heads were "
                f"put on it; resize embeddings before heads.load or heads.create."
            )
        if any(adapted_layers(module) for module in self.borrowed):
            raise ValueError(
                f"The backbone's last layer, which {self.family} heads with lora_rank run as their own, has got an "
                f"adapter; merge it, and load the heads on the merged backbone."
            )
        if self.shares_unembedding and not self.backbone.output_layer_is_its_record():
            raise ValueError(
                f"{self.family} heads that share the backbone's unembedding score with its weight and bias, and its "
                f"output layer{added_to_output(self.backbone.model)} now does more than that; give heads with "
                f"unembeddings of their own, or an output layer as it was."
            )

    @property
    def shares_unembedding(self) -> bool:
        """Whether some head scores with the backbone's unembedding, or rows of it."""
        own = {id(parameter) for parameter in self.parameters()}
        return any(id(self.projection(k).weight) not in own for k in range(1, self.num_heads + 1))

    def in_dtype(self, dtype: torch.dtype) -> TokenHeads:
        """These heads, or a copy in another dtype on the same backbone: trained in float32, decoded in its dtype."""
        if all(p.dtype == dtype for p in self.parameters() if p.is_floating_point()):
            return self
        return copy.deepcopy(self, {id(self.backbone): self.backbone}).to(dtype)

    def forward(self, model: Any, *_: Any, **__: Any) -> Any:
        """Refuse a call: `generate` makes one if it is given heads as `custom_generate`, where a decoder belongs.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"custom_generate was given {self.family} heads themselves for a {type(model).__name__}; give a decoder "
            f"that has them, such as custom_generate=heads.TreeDecoding(token_heads)."
        )

    @property
    def family(self) -> str:
        """The family's name: its file in heads/families/."""
        return type(self).__module__.rpartition(".")[2]

    @property
    @abstractmethod
    def taps(self) -> tuple[Tap, ...]:
        """What a decoding pass records for `commit`."""

    @property
    def hidden_taps(self) -> tuple[HiddenTap, ...]:
        """The hidden states of the backbone that `taps` read: what teacher forcing is given."""
        return hidden_taps(self.taps)

    def run_stack(
        self, index: int, hidden_BND: Tensor, positions_BN: Tensor, mask: Any, cache: TreeCache | None
    ) -> Tensor:
        """For a family with a `StackTap` among its taps: the stack's layers over the hidden states that it reads.

        Args:
            index: the tap's.
            cache: layers write to it under indices after the backbone's own, and they are committed alike.
        """
        raise NotImplementedError(f"{self.family} heads have no layers over the context")

    @property
    def borrowed(self) -> Sequence[nn.Module]:
        """Modules of the backbone whose weights these heads use without calling them; engines keep them gathered."""
        return ()

    @abstractmethod
    def projection(self, k: int) -> Projection:
        """From head k's hidden states to logits; families return `self.scored(…)`, which applies a draft vocabulary."""

    @abstractmethod
    def teacher_forced(self, batch: TeacherForcing) -> Iterator[Tensor]:
        """Yield head k's hidden states (R_k, D) at `batch.rows[k - 1]`, for k = 1 … K, one head at a time."""

    @abstractmethod
    def commit(self, state: Any, tokens_BN: Tensor, taps: Taps, positions_BN: Tensor, plan: CommitPlan) -> Any:
        """The family's state after a pass, of whose N slots `plan` commits some. The first state is None."""

    @abstractmethod
    def keep_rows(self, state: Any, rows_R: Tensor) -> Any:
        """The state of some rows of the batch; the others have ended."""

    @abstractmethod
    def keep_slots(self, state: Any, num_slots: int) -> Any:
        """The state as it was when the first `num_slots` slots were committed; the next call is `commit`."""

    @abstractmethod
    def first_level(self, state: Any) -> Any:
        """The level above the root: one entry a row, from the last committed position.

        Levels are tensors, or tuples, lists and dicts of them. Their first axis counts rows here and nodes after a
        step; a tensor that all nodes of a row share, such as committed keys, may keep one entry a row.
        """

    @abstractmethod
    def step(self, k: int, level: Any, tokens_M: Tensor, parents_M: Tensor) -> tuple[Tensor, Any]:
        """Head k's hidden states (M, D) at M nodes of depth k - 1, and the level that these nodes form.

        Args:
            k: 1 … K; the nodes' children are drafted tokens of depth k.
            level: what `first_level` or the step before returned.
            tokens_M: the nodes' tokens x_{t+k}; for k = 1 the root tokens.
            parents_M: for each node its parent's index in `level`; for k = 1 its row.
        """
