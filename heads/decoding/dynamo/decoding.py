"""Dynamic decoding: each pass emits 1 to K + 1 tokens, sampled from the heads' joint distribution, unverified (DynaMo).

It is lossy: the text does not follow the backbone's distribution (heads/decoding/dynamo/joint.py says why). With a
threshold of 1 every pass emits one token, chosen exactly as plain `generate` chooses it.
heads/decoding/dynamo/candidates.py says how `generate`'s settings apply.
"""
# B batch, T prompt position, N token of a pass, V vocabulary, R row that still runs, D model width

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heads.backbone.model import Backbone, BackboneState, CommitPlan, Pass
from heads.backbone.support import fastest_mode
from heads.decoding.dynamo.candidates import find_candidates, read_penalty
from heads.decoding.dynamo.cooccurrence import Cooccurrence, on_device, open_cooccurrence
from heads.decoding.dynamo.joint import Decision, check_independent, decide
from heads.decoding.dynamo.settings import JointConfig
from heads.decoding.dynamo.threshold import Adaptive
from heads.decoding.request.entry import Call, Decoding, check_generator, check_heads, check_token_heads
from heads.decoding.request.output import DecodingOutput, DecodingStats, finish, record
from heads.decoding.request.request import STATEFUL, Row, fork, may_keep_state
from heads.interface.token_heads import TokenHeads


class DynamicDecoding(Decoding):
    """Lossy decoding: hand it to `generate`, as `custom_generate=heads.DynamicDecoding(token_heads, threshold=0.5)`.

    The paper's settings are a co-occurrence table, `adaptive="static_first", blur=3`, and `do_sample=True, top_k=50,
    temperature=0.7, repetition_penalty=1.1` in the call of `generate`; its order of thresholds changed nothing on the
    demo heads (docs/decisions.md). With `do_sample=False` a pass emits the likeliest n-gram.

    `stats.accepted_per_depth[d - 1]` counts the passes that emitted at least d tokens of the heads.

    Args:
        token_heads: heads of a family that reads no drafted tokens, on the very model that `generate` is called on.
        threshold: ε_b, 0 to 1. Lower ones emit more tokens per pass, and worse text: 0 always K + 1, 1 always one.
        cooccurrence: a table of n-grams up to K + 1 tokens or its folder; None does not mask.
        generator: source of randomness for sampling; None is torch's global one, as in `generate`.
        transparency: α_c of equation 6, at least 0: the power of the co-occurrence ratio, with a table; 0 does not
            mask.
        adaptive: how Otsu's threshold is combined with the static one (heads/decoding/dynamo/threshold.py lists the
            four ways; "static_first" is Algorithm 1's order); None leaves it out.
        blur: size of the Gaussian kernel before Otsu, odd; 1 does not blur.
        top_k: the most candidates of each place in an n-gram; `generate`'s processors may leave fewer.

    Raises:
        ValueError: a setting outside its range or without what it acts on, grounded heads, more heads than a joint
            distribution can hold, or a table of shorter n-grams or of another vocabulary.
    """

    def __init__(
        self,
        token_heads: TokenHeads,
        threshold: float = 0.5,
        cooccurrence: Cooccurrence | str | Path | None = None,
        generator: torch.Generator | None = None,
        *,
        transparency: float = 1.0,
        adaptive: Adaptive | None = "otsu_first",
        blur: int = 1,
        top_k: int = 50,
    ) -> None:
        self.config = JointConfig(
            threshold=threshold, transparency=transparency, adaptive=adaptive, blur=blur, top_k=top_k
        )
        if cooccurrence is None and transparency not in (0, 1):  # 1 is the default
            raise ValueError(
                f"transparency={transparency} was given without a co-occurrence table, and nothing is masked then; "
                f"give cooccurrence too, or leave transparency out."
            )
        check_token_heads(token_heads)
        check_independent(token_heads)
        self.token_heads = token_heads
        order, backbone = token_heads.num_heads + 1, token_heads.backbone
        table = open_cooccurrence(cooccurrence, order, backbone.vocab_size)
        self.cooccurrence = on_device(table, order, backbone.heads_device)
        self.generator = check_generator(generator)

    def check_model(self, model: Any) -> None:
        check_heads(self.token_heads, model)

    def decode(self, model: Any, call: Call) -> Tensor | DecodingOutput:
        if call.request.keep_scores or call.request.keep_logits:
            raise ValueError(
                "output_scores or output_logits was given, but dynamic decoding chooses n-grams, which have no scores "
                "of single tokens; leave it out or decode with plain generate."
            )
        if any(isinstance(processor, STATEFUL) for processor in call.request.processors):
            raise ValueError(
                "A watermark was asked for, whose processor keeps a state from token to token, but dynamic decoding "
                "chooses n-grams; leave watermarking_config out or decode with TreeDecoding."
            )
        return DynamicRun(self, call).decode()


class DynamicRun:
    """One `generate` call; the caller's processors and criteria run outside of `mode`, the context of its passes."""

    def __init__(self, decoding: DynamicDecoding, call: Call) -> None:
        self.decoding = decoding
        self.token_heads = decoding.token_heads
        self.backbone: Backbone = self.token_heads.backbone
        self.mode = fastest_mode(self.backbone.model, self.token_heads)
        self.call = call
        self.heads = range(1, self.token_heads.num_heads + 1)
        self.projections = [self.token_heads.projection(k) for k in self.heads]
        self.stats = DecodingStats(accepted_per_depth=[0] * self.token_heads.num_heads)

    @torch.no_grad()
    def decode(self) -> Tensor | DecodingOutput:
        self.backbone.check_length(self.call.valid_BT, self.call.request.max_length)
        rows = self.call.rows()
        self.stats.drafted = [[] for _ in rows]
        with self.stats.time("prefill"), self.mode():
            state, heads_state, logits_RV = self.prefill()
        running = rows
        while True:
            self.stats.count_pass(len(running))
            with self.stats.time("draft"), self.mode():
                logits = [logits_RV, *self.predict(heads_state, len(running))]
            with self.stats.time("accept"):
                new = self.emit(running, self.decide(running, logits), logits)
            with self.stats.time("commit"), self.mode():
                state, heads_state, running, new = self.drop_ended(state, heads_state, running, new)
            if not running:
                return finish(rows, self.stats, self.call.streamer)
            with self.stats.time("verify"), self.mode():
                output = self.read(state, new)
            with self.stats.time("commit"), self.mode():
                plan = CommitPlan.from_paths([range(len(tokens)) for tokens in new], output.tokens_BN.device)
                state, heads_state, logits_RV = self.commit(state, heads_state, output, plan)

    def prefill(self) -> tuple[BackboneState, Any, Tensor]:
        """Read the prompts; the states after them and the backbone's next-token logits (B, V)."""
        heads_state = None

        def commit(output: Pass, plan: CommitPlan) -> None:
            nonlocal heads_state
            heads_state = self.token_heads.commit(heads_state, output.tokens_BN, output.taps, output.positions_BN, plan)

        state, output = self.backbone.read(
            self.call.tokens_BT, self.call.valid_BT, self.token_heads.taps, commit=commit
        )
        return state, heads_state, self.backbone.logits(output.final_BND[:, -1])

    def predict(self, heads_state: Any, batch: int) -> list[Tensor]:
        """Lines 1 to 3: the logits (R, V) of heads 1 … K after the last committed token; none if ε_b is 1."""
        if self.decoding.config.threshold == 1:
            return []
        rows_R = torch.arange(batch, device=self.backbone.heads_device)
        unread_R = torch.zeros_like(rows_R)  # any tokens will do: heads that are not grounded read none
        level = self.token_heads.first_level(heads_state)
        logits = []
        for k in self.heads:
            hidden_RD, level = self.token_heads.step(k, level, unread_R, rows_R)
            logits.append(self.projections[k - 1].spread(self.projections[k - 1](hidden_RD), -torch.inf))
        return logits

    def decide(self, running: list[Row], logits: list[Tensor]) -> Decision | None:
        """Lines 5 to 18; None if ε_b is 1, since one token is then emitted anyway."""
        config = self.decoding.config
        if config.threshold == 1:
            return None
        penalty, seen_RV = read_penalty(running, self.backbone.vocab_size)
        return decide(
            find_candidates(running, logits, config.top_k),
            config,
            cooccurrence=self.decoding.cooccurrence,
            seen_BV=seen_RV,
            penalty=penalty,
        )

    def emit(self, running: list[Row], decision: Decision | None, logits: list[Tensor]) -> list[list[int]]:
        """Choose and emit each row's n-gram, and return the tokens, which the backbone has to read next."""
        chosen: dict[int, list[int]] = {}
        for here in decision.ngrams if decision else ():
            ngrams = here.best() if self.call.request.greedy else here.sample(self.decoding.generator)
            chosen |= dict(zip(here.rows_R.tolist(), ngrams, strict=True))
        new = []
        for r, row in enumerate(running):
            of_row = [logits_RV[r] for logits_RV in logits]
            new.append(keep_allowed(row, chosen[r], of_row) if r in chosen else [row.choose(of_row[0])])
            self.emit_row(row, new[-1])
        return new

    def drop_ended(
        self, state: BackboneState, heads_state: Any, rows: list[Row], new: list[list[int]]
    ) -> tuple[BackboneState, Any, list[Row], list[list[int]]]:
        """Take rows that ended out of the batch, so that later passes are smaller."""
        running = [r for r, row in enumerate(rows) if not row.done]
        if 0 < len(running) < len(rows):
            running_R = torch.tensor(running, device=state.valid_BS.device)
            state, heads_state = state.keep_rows(running_R), self.token_heads.keep_rows(heads_state, running_R)
        return state, heads_state, [rows[r] for r in running], [new[r] for r in running]

    def emit_row(self, row: Row, ngram: list[int]) -> None:
        """Append tokens until the row ends, count and stream them; all but the first were drafted by heads."""
        before = len(row.tokens)
        for token in ngram:
            row.emit(token)
            if row.done:
                break
        drafted = [i > 0 for i in range(len(row.tokens) - before)]
        record(row, drafted, self.stats, self.call.streamer)

    def read(self, state: BackboneState, new: list[list[int]]) -> Pass:
        """The backbone's pass over the new tokens, a chain in each row; shorter rows repeat their last token."""
        longest = max(len(tokens) for tokens in new)
        filled = [tokens + tokens[-1:] * (longest - len(tokens)) for tokens in new]
        device = state.valid_BS.device
        last_R1 = torch.tensor([[len(tokens) - 1] for tokens in new], device=device)
        depth_RN = torch.arange(longest, device=device).minimum(last_R1)  # a backbone may have no position for more
        sees_NN = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        return self.backbone.verify(
            state, torch.tensor(filled, device=device), depth_RN, sees_NN, self.token_heads.taps
        )

    def commit(
        self, state: BackboneState, heads_state: Any, output: Pass, plan: CommitPlan
    ) -> tuple[BackboneState, Any, Tensor]:
        """The states with the new tokens, and the logits (R, V) after each row's last token."""
        heads_state = self.token_heads.commit(heads_state, output.tokens_BN, output.taps, output.positions_BN, plan)
        logits_RV = self.backbone.logits(plan.newest(output.final_BND))
        return self.backbone.commit(state, output, plan), heads_state, logits_RV


def keep_allowed(row: Row, ngram: list[int], logits: list[Tensor]) -> list[int]:
    """The n-gram, cut before the first token that a processor with a state forbids after the tokens before it.

    Such processors, grammars for instance, are called once for each emitted token, with that token's own prefix. The
    candidates were found by copies of them, which had read the likeliest tokens instead of the sampled ones.

    Args:
        logits: for each place in the n-gram its logits (V,).
    """
    if not any(map(may_keep_state, row.processors)):
        return ngram
    for i, token in enumerate(ngram):
        if i:  # the first token's candidates were found with its own prefix
            _, scores_1V = row.process(logits[i], ngram[:i], fork(row.processors))
            if scores_1V[0, token] == -torch.inf:
                return ngram[:i]
        row.process(logits[i], ngram[:i], row.processors)
        if token in row.request.eos_tokens:
            return ngram[: i + 1]
    return ngram
