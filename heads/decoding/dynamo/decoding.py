"""Dynamic decoding: one to K + 1 tokens a pass, sampled from the heads' joint distribution, unverified (DynaMo).

Lossy, by name and by design: the text does not follow the backbone's distribution (heads/decoding/dynamo/joint.py says
why). With a threshold of 1 every pass emits one token, chosen exactly as plain `generate` chooses it.
heads/decoding/dynamo/candidates.py says how `generate`'s settings apply.
"""
# B batch, T prompt position, N token of a pass, V vocabulary, R row that is still running, D model width

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.backbone.model import Backbone, BackboneState, CommitPlan, Pass
from heads.decoding.dynamo.candidates import find_candidates, read_penalty
from heads.decoding.dynamo.joint import MAX_JOINT_ENTRIES, Cooccurrence, Decision, JointConfig, decide, largest_side
from heads.decoding.request.entry import Call, Decoding, check_heads, check_token_heads
from heads.decoding.request.output import DecodingOutput, DecodingStats, finish, record
from heads.decoding.request.request import Row
from heads.interface.token_heads import TokenHeads
from heads.ngrams.table import NgramTable


class DynamicDecoding(Decoding):
    """Lossy decoding: hand it to `generate`, as `custom_generate=heads.DynamicDecoding(token_heads, threshold=0.5)`.

    The paper's settings are these defaults with a co-occurrence table, and `do_sample=True, top_k=50, temperature=0.7,
    repetition_penalty=1.1` in the call of `generate`. With `do_sample=False` a pass emits the likeliest n-gram.

    `stats.accepted_per_depth[d - 1]` counts the passes of which at least d tokens came from heads: n > d.

    Args:
        token_heads: heads of a family that reads no drafted tokens, on the very model that `generate` is called on.
        threshold: ε_b, 0 to 1. Lower emits more tokens a pass and worse text: 0 always K + 1, 1 always one.
        cooccurrence: a table of n-grams up to K + 1 tokens or its folder; None does not mask.
        generator: source of randomness for sampling; None is torch's global one, as in `generate`.
        transparency: α_c of equation 6: the power of the co-occurrence ratio; 0 does not mask.
        adaptive: Otsu's threshold on top of the static one.
        blur: size of the Gaussian kernel before Otsu, odd; 1 does not blur.
        top_k: candidates of each place at most, where `generate`'s own processors leave more.

    Raises:
        ValueError: a setting outside its range, grounded heads, more heads than a joint distribution can hold, or a
            table of shorter n-grams or of another vocabulary.
    """

    def __init__(
        self,
        token_heads: TokenHeads,
        threshold: float = 0.5,
        cooccurrence: Cooccurrence | str | Path | None = None,
        generator: torch.Generator | None = None,
        *,
        transparency: float = 1.0,
        adaptive: bool = True,
        blur: int = 3,
        top_k: int = 50,
    ) -> None:
        self.config = JointConfig(
            threshold=threshold, transparency=transparency, adaptive=adaptive, blur=blur, top_k=top_k
        )
        check_token_heads(token_heads)
        check_independent(token_heads)
        self.token_heads = token_heads
        self.cooccurrence = open_cooccurrence(cooccurrence, token_heads.num_heads + 1, token_heads.backbone.vocab_size)
        self.generator = generator

    def check_model(self, model: Any) -> None:
        check_heads(self.token_heads, model)

    def decode(self, model: Any, call: Call) -> Tensor | DecodingOutput:
        if call.request.keep_scores or call.request.keep_logits:
            raise ValueError(
                "output_scores or output_logits was given, but dynamic decoding chooses n-grams, which have no scores "
                "of single tokens; leave it out or decode with plain generate."
            )
        return DynamicRun(self, call).decode()


class DynamicRun:
    """One `generate` call."""

    def __init__(self, decoding: DynamicDecoding, call: Call) -> None:
        self.decoding = decoding
        self.token_heads = decoding.token_heads
        self.backbone: Backbone = self.token_heads.backbone
        self.call = call
        self.heads = range(1, self.token_heads.num_heads + 1)
        self.projections = [self.token_heads.projection(k) for k in self.heads]
        self.stats = DecodingStats(accepted_per_depth=[0] * self.token_heads.num_heads)

    @torch.no_grad()
    def decode(self) -> Tensor | DecodingOutput:
        self.backbone.check_length(self.call.valid_BT, self.call.request.max_length)
        rows = self.call.rows()
        self.stats.drafted = [[] for _ in rows]
        with self.stats.time("prefill"):
            state, heads_state, logits_BV = self.prefill()
        while True:
            running = [row for row in rows if not row.done]
            self.stats.count_pass(len(running))
            with self.stats.time("draft"):
                logits = [logits_BV, *self.predict(heads_state, len(rows))]
            with self.stats.time("accept"):
                decision = self.decide(running, logits)
                new = self.emit(rows, running, decision, logits_BV)
            if all(row.done for row in rows):
                return finish(rows, self.stats, self.call.streamer)
            with self.stats.time("verify"):
                output = self.read(state, rows, new)
            with self.stats.time("commit"):
                plan = CommitPlan.from_paths([range(len(tokens)) for tokens in new], output.tokens_BN.device)
                state, heads_state, logits_BV = self.commit(state, heads_state, output, plan)

    def prefill(self) -> tuple[BackboneState, Any, Tensor]:
        """The prompt's pass: the states behind it and the backbone's next-token logits."""
        heads_state = None

        def commit(output: Pass, plan: CommitPlan) -> None:
            nonlocal heads_state
            heads_state = self.token_heads.commit(heads_state, output.tokens_BN, output.taps, output.positions_BN, plan)

        state, output = self.backbone.read(
            self.call.tokens_BT, self.call.valid_BT, self.token_heads.taps, commit=commit
        )
        return state, heads_state, self.backbone.logits(output.final_BND[:, -1])

    def predict(self, heads_state: Any, batch: int) -> list[Tensor]:
        """Lines 1 to 3: the logits (B, V) of heads 1 … K at the last committed position."""
        rows_B = torch.arange(batch, device=self.backbone.heads_device)
        unread_B = torch.zeros_like(rows_B)  # heads that are not grounded read no drafted token
        level = self.token_heads.first_level(heads_state)
        logits = []
        for k in self.heads:
            hidden_BD, level = self.token_heads.step(k, level, unread_B, rows_B)
            logits.append(self.projections[k - 1].spread(self.projections[k - 1](hidden_BD), -torch.inf))
        return logits

    def decide(self, running: list[Row], logits: list[Tensor]) -> Decision:
        """Lines 5 to 18 for the rows that are still running."""
        config = self.decoding.config
        penalty, seen_RV = read_penalty(running, self.backbone.vocab_size)
        return decide(
            find_candidates(running, logits, config.top_k),
            config,
            cooccurrence=self.decoding.cooccurrence,
            seen_BV=seen_RV,
            penalty=penalty,
        )

    def emit(self, rows: list[Row], running: list[Row], decision: Decision, logits_BV: Tensor) -> list[list[int]]:
        """Sample and emit each row's n-gram; the tokens that the backbone has to read, none for a row that ended."""
        chosen: dict[int, list[int]] = {}
        for here in decision.ngrams:
            ngrams = here.best() if self.call.request.greedy else here.sample(self.decoding.generator)
            chosen |= {running[r].index: ngram for r, ngram in zip(here.rows_R.tolist(), ngrams, strict=True)}
        for row in running:
            self.emit_row(row, chosen.get(row.index) or [row.choose(logits_BV[row.index])])
        return [[] if row.done else chosen.get(row.index) or row.tokens[-1:] for row in rows]

    def emit_row(self, row: Row, ngram: list[int]) -> None:
        """Append tokens until the row ends, count and stream them; all but the first are the heads'."""
        before = len(row.tokens)
        for token in ngram:
            row.emit(token)
            if row.done:
                break
        drafted = [i > 0 for i in range(len(row.tokens) - before)]
        record(row, drafted, self.stats, self.call.streamer)

    def read(self, state: BackboneState, rows: list[Row], new: list[list[int]]) -> Pass:
        """The backbone's pass over the new tokens, a chain in each row; shorter rows are filled up."""
        longest = max(len(tokens) for tokens in new)
        filled = [tokens + row.tokens[-1:] * (longest - len(tokens)) for row, tokens in zip(rows, new, strict=True)]
        device = rows[0].device
        last_B1 = torch.tensor([[max(0, len(tokens) - 1)] for tokens in new], device=device)
        depth_BN = torch.arange(longest, device=device).minimum(last_B1)  # a backbone may have no position for more
        sees_NN = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        return self.backbone.verify(
            state, torch.tensor(filled, device=device), depth_BN, sees_NN, self.token_heads.taps
        )

    def commit(
        self, state: BackboneState, heads_state: Any, output: Pass, plan: CommitPlan
    ) -> tuple[BackboneState, Any, Tensor]:
        """Keep the new tokens in all states, and the logits behind each row's last one."""
        heads_state = self.token_heads.commit(heads_state, output.tokens_BN, output.taps, output.positions_BN, plan)
        logits_BV = self.backbone.logits(plan.newest(output.final_BND))
        return self.backbone.commit(state, output, plan), heads_state, logits_BV


def check_independent(token_heads: TokenHeads) -> None:
    """Check that the product of the heads is a joint distribution, and one that is small enough.

    Raises:
        ValueError: heads that read drafted tokens, or too many of them.
    """
    if token_heads.grounded:
        raise ValueError(
            f"Heads of the family {token_heads.family!r} are grounded (they read drafted tokens), and dynamic decoding "
            f"multiplies heads that read the text only; use TreeDecoding, or heads of another family."
        )
    places = token_heads.num_heads + 1
    if largest_side(places) < 2:
        most = max(n for n in range(2, places) if largest_side(n) >= 2) - 1
        raise ValueError(
            f"The joint distribution of {places} tokens with two candidates each has more than {MAX_JOINT_ENTRIES} "
            f"entries; use at most {most} heads, there are {token_heads.num_heads}."
        )


def open_cooccurrence(table: Cooccurrence | str | Path | None, order: int, vocab_size: int) -> Cooccurrence | None:
    """A table, or the table in a folder, that knows n-grams of `order` tokens of this vocabulary.

    Raises:
        ValueError: shorter n-grams, or another vocabulary.
    """
    if table is None:
        return None
    if isinstance(table, str | Path):
        table = NgramTable.open(table)
    table.check_vocab(vocab_size)
    if table.order < order:
        raise ValueError(
            f"The co-occurrence table counts n-grams of {table.order} tokens but the heads make joint distributions "
            f"of {order}; count it again with order={order} or more."
        )
    return table
