"""The questions of superposed decoding's steps: 8 drafts, orders 2 to 6, 8 next tokens."""
# S step, N draft, C context, M next token asked for

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAFTS, ORDER, ASKED, STEPS = 8, 6, 8, 60


class Questions(NamedTuple):
    contexts_SNC: NDArray[np.int64]
    tokens_SNM: NDArray[np.int64]

    @property
    def asked(self) -> int:
        """The number of probabilities that all steps ask for."""
        return self.tokens_SNM.size * (ORDER - 1)


def make_questions(documents: Sequence[Any], frequent: NDArray[np.int64]) -> Questions:
    """Steps along documents, as drafts grow: each asks for the token that followed and for 7 frequent ones.

    >>> found = make_questions([np.arange(100)] * 9, np.arange(50))
    >>> found.contexts_SNC.shape, found.tokens_SNM.shape
    ((60, 8, 5), (60, 8, 8))
    >>> found.contexts_SNC[1, 0].tolist(), int(found.tokens_SNM[1, 0, 0])
    ([1, 2, 3, 4, 5], 6)
    """
    length = STEPS + ORDER - 1
    texts = np.array([ids[:length] for ids in documents if len(ids) >= length][:DRAFTS], np.int64)
    if len(texts) < DRAFTS:
        raise ValueError(f"{DRAFTS} documents of {length} tokens are needed behind those that are counted.")
    windows_NSC = np.lib.stride_tricks.sliding_window_view(texts, ORDER - 1, axis=1)[:, :STEPS]
    followed_SN = texts[:, ORDER - 1 :].T
    rng = np.random.default_rng(0)
    others = np.array([rng.choice(frequent, ASKED - 1, replace=False) for _ in range(STEPS * DRAFTS)])
    tokens_SNM = np.concatenate([followed_SN[..., None], others.reshape(STEPS, DRAFTS, -1)], axis=2)
    return Questions(np.ascontiguousarray(windows_NSC.transpose(1, 0, 2)), tokens_SNM)
