"""Held-out text cut into blocks, and the teacher-forced predictions of the backbone and each head along a block.

A block is read without the text before it. `read_blocks` takes blocks from the user's files or from the text that was
held out when the backbone was trained. `predict` runs one pass and yields the backbone's hidden states, then those of
head 1, 2, …, from which accuracy and perplexity are computed.
"""
# B block, T position, R row (a position of some block), C row of a chunk, k candidate, D model width, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name that everybody knows

from heads.backbone.loading import max_positions
from heads.backbone.masks import causal
from heads.backbone.projection import Projection
from heads.checkpoint.opening import Opened
from heads.data.standard_library import STDLIB
from heads.decoding.dynamo.candidates import Candidates, take_candidates
from heads.evaluation.accuracy import CHUNK_ELEMENTS
from heads.interface.token_heads import TeacherForcing, TokenHeads

BATCH = 8
"""Blocks that are read in one pass."""


class Block(NamedTuple):
    """Tokens of one text; `text` numbers the text that they come from."""

    tokens_T: Tensor
    text: int


def read_blocks(
    opened: Opened,
    files: Sequence[Path],
    count: int,
    block_tokens: int,
    documents: Sequence[Sequence[int]] | None = None,
) -> list[Block]:
    """At most `count` blocks of `block_tokens` tokens, spread evenly over all texts.

    A text's last, shorter block is used only if it is the whole text.

    Args:
        documents: token ids of texts, used instead of files and held-out text.

    Raises:
        ValueError: blocks too short for the heads or too long for the backbone, or texts that give no block.
    """
    (token_heads,) = opened.token_heads.values()
    least, most = token_heads.num_heads + 2, max_positions(opened.model)
    if block_tokens < least or (most is not None and block_tokens > most):
        above = "" if most is None else f" to {most} (the backbone's positions)"
        raise ValueError(f"--block-tokens {block_tokens} was given; these heads are measured on {least}{above} tokens.")
    blocks = [
        Block(torch.tensor(tokens[start : start + block_tokens], dtype=torch.long), number)
        for number, tokens in enumerate(tokenise_texts(opened, files) if documents is None else documents)
        for start in range(0, max(1, len(tokens) - block_tokens + 1), block_tokens)
    ]
    blocks = [block for block in blocks if len(block.tokens_T) >= least]
    if not blocks:
        raise ValueError(f"No text has the {least} tokens that these heads need to be measured; give longer texts.")
    count = min(count, len(blocks))
    return [blocks[i * len(blocks) // count] for i in range(count)]


def tokenise_texts(opened: Opened, files: Sequence[Path]) -> Iterator[list[int]]:
    """The tokens of each document of the files, as training reads them; of held-out text if there are no files."""
    from heads.data.documents import DataConfig, SourceConfig, load_documents

    record = Path(opened.source) / "training.json"
    if not files and not record.is_file():
        raise ValueError(
            f"The backbone {opened.source} does not record which text was held out (no {record.name} with "
            f"heldout_files); give --text FILE."
        )
    for file in files:
        if not file.exists():
            raise ValueError(f"The text {file} does not exist; give a .txt or .jsonl file.")
    sources = [SourceConfig(path=str(file)) for file in files]
    config = DataConfig(train=sources, heldout_list=None if files else str(record))
    for source in sources or [SourceConfig(path=STDLIB, split="heldout")]:
        for row in load_documents(source, config, opened.tokenizer, streaming=True).rows:
            if row["status"] == "bad":
                raise ValueError(f"{row['problem']}; repair the text.")
            if row["status"] == "ok":
                yield row["input_ids"]


def check_blocks(blocks: Sequence[Block], num_heads: int) -> None:
    """Check that every block has a position from which the backbone and all heads have a true token to predict.

    Raises:
        ValueError: no blocks, or one that is too short.
    """
    shortest = min((len(block.tokens_T) for block in blocks), default=0)
    if shortest < num_heads + 2:
        raise ValueError(
            f"The shortest block has {shortest} tokens (0: there is none), but {num_heads} heads are measured on "
            f"blocks of {num_heads + 2} tokens and more; give longer texts."
        )


def stack(blocks: Sequence[Block], ahead: int, device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """Blocks padded to (B, T), the rows R with `ahead` tokens after them, and the number of such rows in each block."""
    tokens_BT = torch.nn.utils.rnn.pad_sequence([block.tokens_T for block in blocks], batch_first=True).to(device)
    counts = [len(block.tokens_T) - ahead for block in blocks]
    rows = [torch.arange(count, device=device) + b * tokens_BT.shape[1] for b, count in enumerate(counts)]
    return tokens_BT, torch.cat(rows), counts


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Hidden states of the backbone or of one head at some rows of the flattened (B · T), with their projection."""

    rows_R: Tensor
    hidden_RD: Tensor
    projection: Projection

    def logits(self) -> Iterator[Tensor]:
        """(C, V) in float32, chunk by chunk."""
        weight = self.projection.weight
        for hidden_CD in torch.split(self.hidden_RD, max(1, CHUNK_ELEMENTS // weight.shape[0])):
            yield self.projection(hidden_CD.to(weight.dtype)).float()

    def log_probs(self, tokens_R: Tensor) -> Tensor:
        """(R,): log p of one token a row; float64 on the CPU, for sums."""
        found: list[Tensor] = []
        for logits_CV in self.logits():
            start = sum(map(len, found))
            found.append(-F.cross_entropy(logits_CV, tokens_R[start : start + len(logits_CV)], reduction="none"))
        return torch.cat(found).double().cpu()

    def candidates(self, top_k: int, temperature: float, place: int) -> Candidates:
        """The candidates of x_{t+place} (R, k), after temperature and top-k as in `generate`."""
        tops = [
            torch.softmax(logits_CV / temperature, dim=-1).topk(min(top_k, logits_CV.shape[1]))
            for logits_CV in self.logits()
        ]
        found = take_candidates(torch.cat([top.values for top in tops]), top_k, place=place)
        tokens_Rk = torch.cat([top.indices for top in tops])
        return Candidates(tokens_Bk=tokens_Rk.gather(1, found.tokens_Bk), probs_Bk=found.probs_Bk)


@torch.no_grad()
def predict(token_heads: TokenHeads, tokens_BT: Tensor, rows: Sequence[Tensor]) -> Iterator[Prediction]:
    """The backbone's predictions, then each head's, from one pass along the true tokens.

    Args:
        tokens_BT: blocks, padded on the right.
        rows: for each n = 1 … K + 1 the positions (R,) to predict x_{t+n} from, as indices into the flattened
            (B · T); x_{t+n} lies in the row's block.
    """
    backbone = token_heads.backbone
    positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
    may_attend = causal(torch.ones_like(tokens_BT, dtype=torch.bool))  # every row that is read precedes the padding
    mask = backbone.mask_style.finish(may_attend, positions_BT, positions_BT, backbone.dtype)
    given = {"attention_mask": None if backbone.recurrence is not None else mask, "position_ids": positions_BT}
    final_BTD, taps = backbone.forward(tokens_BT, taps=token_heads.hidden_taps, use_cache=False, **given)
    own = backbone.projection.without_norm()
    yield Prediction(rows_R=rows[0], hidden_RD=final_BTD.flatten(0, 1)[rows[0]], projection=own)
    forcing = TeacherForcing(tokens_BT=tokens_BT, taps=taps, positions_BT=positions_BT, mask=mask, rows=rows[1:])
    for k, hidden_RD in enumerate(token_heads.teacher_forced(forcing), start=1):
        yield Prediction(rows_R=rows[k], hidden_RD=hidden_RD, projection=token_heads.projection(k))
