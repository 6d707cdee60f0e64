"""Counted n-grams on disk: what DynaMo's co-occurrence masks (section 3.2.1) and superposed decoding look up.

A table is a folder of memory-mapped arrays, a trie of sorted n-grams, described by `ngrams.json`. The n-grams that
extend one prefix are a range, so that all combinations of some candidates are looked up together: the tokens of the
first position, the pairs seen that extend them, the triples seen that extend those. What was never seen costs nothing.

    order 1  counts of all tokens         a    b    c              n-grams starts[i] to starts[i + 1] extend
    order 2  tokens, counts, starts      a b   c    a c            n-gram i of the order before, sorted by
    order 3  tokens, counts, starts    b  c a  b   c  a            their last token

`heads.ngrams.counting` writes such a folder.
"""
# B batch, F n-grams found, K candidates of one position, V vocabulary

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heads.inside import find_inside
from heads.ngrams.files import HOW_TO_COUNT, array_names, checksum, fingerprint, open_array, read_description
from heads.ngrams.next_token import NextTokens
from heads.ngrams.trie import Counts, Ids, TrieOrder, as_type_of

PADDING = 1024  # rows that backbones add to their embedding beyond the tokenizer's tokens, at most


class NgramTable:
    """Counts of all n-grams up to an order within the documents of a corpus.

    The estimate p̂ of an n-gram is its count over the number of places where a document has n tokens in a row. N-grams
    that were dropped as rare (`min_count`) count as unseen.

    >>> import tempfile
    >>> from heads.ngrams.counting import count_ngrams
    >>> folder = tempfile.TemporaryDirectory()
    >>> table = count_ngrams([[0, 1, 2], [0, 1, 1]], folder=folder.name + "/table", order=2, vocab_size=4)
    >>> table.joint_counts([[0, 1], [1, 2]]).tolist()
    [[2, 0], [1, 1]]
    >>> table.next_counts([1])
    (array([1, 2]), array([1, 1]))
    >>> folder.cleanup()
    """

    def __init__(
        self, folder: Path, description: dict[str, Any], unigrams_V: Counts, orders: tuple[TrieOrder, ...]
    ) -> None:
        self.folder = folder
        self.description = description
        self.order: int = description["order"]
        self.vocab_size: int = description["vocab_size"]
        self.positions: tuple[int, ...] = tuple(description["positions"])
        """Places in the corpus where an n-gram begins, for each order from 1 on."""
        self.unigrams_V = unigrams_V
        self.orders = orders
        self._next_tokens = NextTokens(orders, self.vocab_size)

    @classmethod
    def open(cls, folder: str | Path, tokenizer: Any | None = None) -> NgramTable:
        """Map a table's files into memory.

        Args:
            tokenizer: the backbone's, to check that the table was counted with it.

        Raises:
            ValueError: no table there, a newer format, a file missing or of another length, or another tokenizer.
        """
        description = read_description(folder)
        names = array_names(description["order"])
        arrays = {name: open_array(find_inside(folder, name), description["files"][name]) for name in names}
        orders = tuple(
            TrieOrder(
                tokens_N=arrays[f"order{order}.tokens"],
                counts_N=arrays[f"order{order}.counts"],
                starts=arrays[f"order{order}.starts"],
            )
            for order in range(2, description["order"] + 1)
        )
        table = cls(Path(folder), description, arrays["order1.counts"], orders)
        if tokenizer is not None:
            table._check_tokenizer(tokenizer)
        return table

    @property
    def num_tokens(self) -> int:
        """Tokens of the corpus."""
        return self.positions[0]

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse a backbone's vocabulary that lacks a counted token, or exceeds the table's by more than padding.

        Raises:
            ValueError: the table was counted with another tokenizer.
        """
        used = 1 + int(np.flatnonzero(self.unigrams_V).max(initial=-1))
        if not used <= vocab_size <= self.vocab_size + PADDING:
            raise ValueError(
                f"The n-gram table {self.folder} was counted over {self.vocab_size:,} tokens and the backbone has "
                f"{vocab_size:,}, so it is of another tokenizer; {HOW_TO_COUNT}."
            )

    def verify(self) -> None:
        """Compare every file's checksum; `open` compares lengths alone.

        Raises:
            ValueError: a file holds something else.
        """
        for name in array_names(self.order):
            if checksum(find_inside(self.folder, name)) != self.description["files"][name]["crc32"]:
                raise ValueError(
                    f"{self.folder / name} does not hold what was written to it; copy the folder again, or "
                    f"{HOW_TO_COUNT}."
                )

    def joint_counts(self, candidates: Sequence[Any]) -> Tensor:
        """How often each combination of candidates was seen.

        Args:
            candidates: token ids of n ≤ order positions in a row: arrays, tensors or lists of lengths k_1 … k_n. A
                token that the table does not know was never seen.

        Returns:
            (k_1, …, k_n), int64, on the CPU.

        Raises:
            ValueError: more positions than the table's order, none at all, or candidates that are not ids from 0 on.
        """
        self._check_length(len(candidates))
        return torch.from_numpy(expand_repeats(self._counts, [as_ids(ids) for ids in candidates]))

    def cooccurrence(self, candidates: Sequence[Tensor], *, unseen: float = 0.0) -> Tensor:
        """The co-occurrence mask of DynaMo's equation 3: p̂(x_1 … x_n) / Π p̂(x_i) of every combination.

        It is 1 for independent tokens and multiplies a joint of independent predictions. By the paper's Theorem 1 the
        product is closest to them in an optimal transport whose cost is minus the mask's logarithm.

        Args:
            candidates: n ≤ order tensors of token ids, each (k_i,) or each (B, k_i).
            unseen: the count given to an n-gram never seen. With 0, as in the paper, its mask is 0. Above 0 its mask is
                `unseen` over the count expected of independent tokens, at most 1: this rules out common tokens that
                never met, and leaves rare ones as they were predicted. Where a token itself was never seen (0 / 0) the
                mask is 0 or, with `unseen` above 0, 1.

        Returns:
            (k_1, …, k_n) or (B, k_1, …, k_n), float32, on the candidates' device.

        Raises:
            ValueError: as `joint_counts`; candidates of different batches; an `unseen` that is negative or no number.
        """
        if not 0 <= unseen < math.inf:
            raise ValueError(f"unseen is {unseen}, the count of an n-gram never seen; give a number from 0 on.")
        self._check_length(len(candidates))
        batches = {tuple(ids.shape[:-1]) for ids in candidates}
        if any(len(batch) > 1 for batch in batches) or len(batches) > 1:
            shapes = ", ".join(str(tuple(ids.shape)) for ids in candidates)
            raise ValueError(f"Candidates of shapes {shapes} were given; give each (k,), or each (B, k) with one B.")
        single = batches == {()}
        rows = zip(*(ids.cpu()[None] if single else ids.cpu() for ids in candidates), strict=True)
        ratio = partial(self._ratio, unseen=unseen)
        masks = [expand_repeats(ratio, [as_ids(ids) for ids in row]) for row in rows]
        return torch.from_numpy(masks[0] if single else np.stack(masks)).to(candidates[0].device)

    def next_counts(self, prefix: Sequence[int]) -> tuple[Counts, Counts]:
        """The tokens seen after a prefix, in rising order, and how often; both are empty for a prefix never seen.

        Raises:
            ValueError: a prefix of `order` tokens or more.
        """
        if len(prefix) >= self.order:
            raise ValueError(
                f"A prefix of {len(prefix)} tokens was asked of the n-gram table {self.folder}, which serves up to "
                f"{self.order - 1}; give its last tokens, or count with a higher --order."
            )
        if not len(prefix):
            tokens = np.flatnonzero(self.unigrams_V)
            return tokens, self.unigrams_V[tokens].astype(np.int64)
        node = operator.index(prefix[0])
        if not 0 <= node < self.vocab_size:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        for trie_order, token in zip(self.orders, prefix[1:], strict=False):
            start, end = trie_order.range_of(node)
            wanted = as_type_of(trie_order.tokens_N, np.asarray(token))
            node = start + int(trie_order.tokens_N[start:end].searchsorted(wanted))
            if node == end or trie_order.tokens_N[node] != token:
                return np.zeros(0, np.int64), np.zeros(0, np.int64)
        trie_order = self.orders[len(prefix) - 1]
        seen = slice(*trie_order.range_of(node))
        return trie_order.tokens_N[seen].astype(np.int64), trie_order.counts_N[seen].astype(np.int64)

    @property
    def max_order(self) -> int:
        """The longest n-grams of `next_token_probabilities`."""
        return self.order

    def next_token_probabilities(self, contexts_NC: Tensor, tokens_NM: Tensor) -> Tensor:
        """Probabilities of next tokens under the n-gram model of each order (superposed decoding, equation 5).

        Args:
            contexts_NC: the last tokens of each text, at least `order` - 1 where it has them; -1 where it is shorter.
            tokens_NM: the tokens asked for after each text.

        Returns:
            (N, order - 1, M), float64, on the device of `tokens_NM`: for n = 2 … order the share of each token among
            all that were counted after the last n - 1 tokens, 0 where these were never seen.
        """
        found_NOM = self._next_tokens.probabilities(contexts_NC.cpu().numpy(), tokens_NM.cpu().numpy())
        return torch.from_numpy(found_NOM).to(tokens_NM.device)

    def _check_length(self, length: int) -> None:
        if not 1 <= length <= self.order:
            raise ValueError(
                f"A joint of {length} tokens was asked of the n-gram table {self.folder}, which serves 1 to "
                f"{self.order}; ask for fewer, or count with a higher --order."
            )

    def _find(self, candidates: Sequence[Ids]) -> tuple[Counts, NDArray[Any]]:
        """Which combinations of different candidates were seen, as places in the flattened joint, and how often."""
        ids_K, place_K = np.unique(candidates[0], return_index=True)
        seen_K = self._unigrams(ids_K) > 0
        nodes_F, places_F, counts_N = ids_K[seen_K].astype(np.int64), place_K[seen_K], self.unigrams_V
        for trie_order, ids in zip(self.orders, candidates[1:], strict=False):
            ids_K, place_K = np.unique(ids, return_index=True)
            above_F, ranks_F, nodes_F = trie_order.find(nodes_F, ids_K, self.vocab_size)
            places_F = places_F.take(above_F) * len(ids_K) + place_K.take(ranks_F)
            counts_N = trie_order.counts_N
        return places_F, counts_N.take(nodes_F)

    def _counts(self, candidates: Sequence[Ids]) -> NDArray[Any]:
        counts = np.zeros([len(ids) for ids in candidates], np.int64)
        places_F, counts_F = self._find(candidates)
        counts.reshape(-1)[places_F] = counts_F
        return counts

    def _ratio(self, candidates: Sequence[Ids], unseen: float) -> NDArray[Any]:
        common = [self._unigrams(ids) for ids in candidates]
        # 1 / Π p̂ for a count of 1. Tokens never seen count as 1 here: no n-gram that was found holds one.
        weight = reduce(np.multiply.outer, [self.num_tokens / np.maximum(seen_K, 1) for seen_K in common])
        weight /= max(1, self.positions[len(candidates) - 1])
        mask = np.zeros(weight.shape, np.float32)
        if unseen:
            never = reduce(np.logical_or.outer, [seen_K == 0 for seen_K in common])
            mask[...] = np.where(never, 1.0, np.minimum(1.0, unseen * weight))
        places_F, counts_F = self._find(candidates)
        ratio_F = counts_F * weight.reshape(-1).take(places_F)
        mask.reshape(-1)[places_F] = np.minimum(ratio_F, np.finfo(np.float32).max, out=ratio_F)
        return mask

    def _unigrams(self, ids_K: Ids) -> Counts:
        return np.where(ids_K < self.vocab_size, self.unigrams_V.take(ids_K, mode="clip"), 0)

    def _check_tokenizer(self, tokenizer: Any) -> None:
        counted_with = self.description["tokenizer_sha256"]
        if counted_with is None:
            self.check_vocab(len(tokenizer))
        elif counted_with != fingerprint(tokenizer):
            raise ValueError(
                f"The n-gram table {self.folder} was counted with the tokenizer {self.description.get('tokenizer')!r} "
                f"and the backbone's is another one, with other tokens or ids; {HOW_TO_COUNT}."
            )


def as_ids(ids: Any) -> Ids:
    """Candidates of one position as an array."""
    array = ids.cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 0)):
        raise ValueError(
            f"The candidates of a position are token ids from 0 on in one dimension; got {array.dtype} of shape "
            f"{array.shape}{f' from {array.min()} on' if array.size else ''}."
        )
    return array.astype(np.int32)


def expand_repeats(look_up: Callable[[Sequence[Ids]], NDArray[Any]], candidates: Sequence[Ids]) -> NDArray[Any]:
    """The array that `look_up` gives for candidates, some of which occur more than once.

    Each distinct candidate of a position is looked up once, and its entries are copied to all of its places.

    Args:
        look_up: takes distinct ids for each position, and gives an array with one axis for each position.
    """
    different, places = zip(*(np.unique(ids, return_inverse=True) for ids in candidates), strict=True)
    if all(len(ids) == len(given) for ids, given in zip(different, candidates, strict=True)):
        return look_up(candidates)
    repeated: NDArray[Any] = look_up(different)[np.ix_(*places)]
    return repeated
