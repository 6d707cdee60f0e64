"""lm-evaluation-harness on a backbone whose texts heads decode: the harness's own model class with another `generate`.

Likelihood tasks read the backbone's own logits, DynaMo's first-token head. Texts of generate-until tasks are decoded
with heads and, greedily, by plain `generate` too: they have to be equal, and `examine` says of each difference whether
rounding explains it. Requests that the model has too few positions for lose their beginning, as the harness has it, and
are counted.
"""
# B row of a batch, T prompt position

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heads.evaluation.lossless.answers import Answer
from heads.evaluation.lossless.verdicts import Finding, Scorer, examine
from heads.evaluation.methods import GreedySettings
from heads.extras import needs_extra

with needs_extra("eval", "Tasks of lm-evaluation-harness were asked for"):
    from lm_eval.models.huggingface import HFLM


@dataclass(kw_only=True)
class Decoded:
    """What heads did on generate-until requests."""

    tokens: int = 0
    passes: int = 0
    findings: list[Finding] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Counts of verdicts, tokens and passes.

        >>> Decoded(tokens=6, passes=3, findings=[Finding(prompt=1, verdict="same")]).as_dict()
        {'texts': 1, 'same': 1, 'rounding': 0, 'bug': 0, 'unknown': 0, 'tokens': 6, 'passes': 3}
        """
        found = Counter(finding.verdict for finding in self.findings)
        verdicts = {kind: found[kind] for kind in ("same", "rounding", "bug", "unknown")}
        return {"texts": len(self.findings), **verdicts, "tokens": self.tokens, "passes": self.passes}


class HeadsLM(HFLM):
    """A backbone for the harness.

    Attributes:
        decoding: a lossless method such as `TreeDecoding(…)`; None is plain `generate`.
        decoded: what it did.
        cut: requests that lost their beginning: a prompt with one of its answers, or a prompt to be continued.
    """

    def __init__(self, model: Any, tokenizer: Any, decoding: Any = None, batch_size: int = 8) -> None:
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        self.decoding = decoding
        self.decoded = Decoded()
        self.cut = 0

    @cached_property
    def scorer(self) -> Scorer:
        """Made once and where texts are compared, since of a model in half precision it holds a float32 copy."""
        return Scorer(model=self.model, settings=GreedySettings())

    def take_decoded(self) -> dict[str, Any] | None:
        """What heads did since the last call; None without heads."""
        found, self.decoded = self.decoded, Decoded()
        return None if self.decoding is None else found.as_dict()

    def take_cut(self) -> int:
        """How many requests lost their beginning since the last call."""
        found, self.cut = self.cut, 0
        return found

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **more: Any) -> Any:
        """Of a request the model reads all tokens but the last, which it scores."""
        self.cut += sum(len(prompt) + len(answer) > self.max_length + 1 for _, prompt, answer in requests)
        return super()._loglikelihood_tokens(requests, **more)

    def tok_batch_encode(
        self, strings: Any, padding_side: str = "left", left_truncate_len: int | None = None, truncation: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(B, T) tokens and mask: the last `left_truncate_len` of them. The harness sees the longest row alone."""
        tokens_BT, mask_BT = super().tok_batch_encode(strings, padding_side, truncation=truncation)
        if left_truncate_len is None:
            return tokens_BT, mask_BT
        self.cut += int((mask_BT.sum(dim=1) > left_truncate_len).sum())
        return tokens_BT[:, -left_truncate_len:], mask_BT[:, -left_truncate_len:]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **asked: Any) -> Tensor:
        """Rows one by one, since the harness's stop criterion belongs to whole batches and keeps a state."""
        mask_BT = asked.pop("attention_mask")
        new_tokens = max_length - context.shape[1]
        rows = [
            self._generate_row(row_T[kept_T.bool()][None], new_tokens, stop, asked)
            for row_T, kept_T in zip(context, mask_BT, strict=True)
        ]
        longest = max(len(new) for new in rows)
        padded = [[*new, *[self.tokenizer.pad_token_id] * (longest - len(new))] for new in rows]
        return torch.cat([context, context.new_tensor(padded).reshape(len(rows), longest)], dim=1)

    def _generate_row(self, prompt_1T: Tensor, new_tokens: int, stop: list[str], asked: dict[str, Any]) -> list[int]:
        length = prompt_1T.shape[1]
        given = dict(asked, attention_mask=torch.ones_like(prompt_1T))

        def generate(**more: Any) -> Any:
            return super(HeadsLM, self)._model_generate(prompt_1T, length + new_tokens, stop, **given, **more)

        if self.decoding is None:
            plain: list[int] = generate()[0, length:].tolist()
            return plain
        output = generate(custom_generate=self.decoding, return_dict_in_generate=True)
        new: list[int] = output.sequences[0, length:].tolist()
        self.decoded.tokens += len(new)
        self.decoded.passes += output.stats.row_passes
        if not asked.get("do_sample") and not asked.get("temperature"):
            self._compare(prompt_1T, generate()[0, length:].tolist(), new)
        return new

    def _compare(self, prompt_1T: Tensor, plain: list[int], new: list[int]) -> None:
        answers = (Answer(text=self.tok_decode(tokens), tokens=tokens) for tokens in (plain, new))
        number = len(self.decoded.findings) + 1
        self.decoded.findings.append(
            examine(number, *answers, prompt_1T=prompt_1T, scorer=self.scorer, tokenizer=self.tokenizer)
        )
