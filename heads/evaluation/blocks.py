"""Pieces of text to measure on: of files, or of the text that the backbone never saw."""
# T position

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from heads.backbone.loading import max_positions
from heads.checkpoint.opening import Opened
from heads.data.documents import DataConfig, SourceConfig, load_documents
from heads.data.sources import STDLIB
from heads.evaluation.perplexity import Block


def read_blocks(opened: Opened, files: Sequence[Path], count: int, block_tokens: int) -> list[Block]:
    """`count` pieces at most, spread over all pieces of the texts.

    A text is cut into pieces of `block_tokens` tokens; a shorter rest counts only if it is the whole text.

    Raises:
        ValueError: pieces too short for the heads or too long for the backbone, or texts that give no piece.
    """
    (token_heads,) = opened.token_heads.values()
    least, most = token_heads.num_heads + 2, max_positions(opened.model)
    if block_tokens < least or (most is not None and block_tokens > most):
        above = "" if most is None else f" to {most} (the backbone's positions)"
        raise ValueError(f"--block-tokens {block_tokens} was given; these heads are measured on {least}{above} tokens.")
    pieces = [
        Block(torch.tensor(tokens[start : start + block_tokens], dtype=torch.long), number)
        for number, tokens in enumerate(read_texts(opened, files))
        for start in range(0, max(1, len(tokens) - block_tokens + 1), block_tokens)
    ]
    pieces = [piece for piece in pieces if len(piece.tokens_T) >= least]
    if not pieces:
        raise ValueError(f"No text has the {least} tokens on which these heads can be judged; give longer texts.")
    count = min(count, len(pieces))
    return [pieces[i * len(pieces) // count] for i in range(count)]


def read_texts(opened: Opened, files: Sequence[Path]) -> Iterator[list[int]]:
    """The tokens of each document of the files, as training reads them; of held-out text where there are no files."""
    record = Path(opened.source) / "training.json"
    if not files and not record.is_file():
        raise ValueError(
            f"The backbone {opened.source} does not say which text it never saw (no {record.name} with "
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
