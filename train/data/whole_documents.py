"""Pack documents whole: each lies in one block if it fits in one, and the rest of a block is padding.

Cutting every document at the edges of blocks (train/data/blocks.py) wastes no position, but what follows an edge has
lost its beginning: a reply without its question. Best-fit decreasing (Ding et al. 2024, "Fewer Truncations Improve
Language Modeling") places the longest documents first, each in the fullest block that has room for it; a document that
is longer than a block is cut into whole blocks and a rest, which is placed like a document.

Documents are placed WINDOW at a time, in the order in which they come, so that streams are packed alike and memory
holds one window. Padding is a document of its own without targets, so nothing else has to know of it: attention,
positions and losses already separate documents.
"""
# D document of a window, T position in a document or block

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from train.data.blocks import Block, Document, fill, join_pieces, pack
from train.data.report import Filling

WINDOW = 4096
PADDING_ID = 0  # read by no other document and no loss

Piece = tuple[int, int, int]
"""A document's number, and where its piece starts and stops."""


def pack_whole(documents: Iterable[Document], block_size: int) -> Iterator[Block]:
    """Blocks of whole documents.

    ids [1 2 3], [4 5], [6 7], block_size 4  ->  input_ids [1 2 3 0], document_ids [0 0 0 1], and [4 5 6 7], [0 0 1 1]
    """
    remaining = iter(documents)
    while window := list(islice(remaining, WINDOW)):
        for pieces in place([len(ids_T) for ids_T, _ in window], block_size):
            found = [(window[d][0][start:stop], window[d][1][start:stop]) for d, start, stop in pieces]
            yield join_pieces([*found, *padding(block_size - sum(len(ids_T) for ids_T, _ in found))])


def padding(length: int) -> list[Document]:
    return [(np.full(length, PADDING_ID, np.int32), np.zeros(length, bool))] if length else []


def place(lengths_D: Sequence[int], block_size: int) -> list[list[Piece]]:
    """The pieces of each block of one window, placed by best fit, the longest first.

    The blocks are ordered by the number of their longest piece's document, so that the first blocks of a window are not
    those with the longest documents.

    >>> place([3, 2, 9, 1], block_size=4)
    [[(0, 0, 3), (2, 8, 9)], [(1, 0, 2), (3, 0, 1)], [(2, 0, 4)], [(2, 4, 8)]]
    """
    pieces = [
        (d, start, min(start + block_size, length))
        for d, length in enumerate(lengths_D)
        for start in range(0, length, block_size)
    ]
    blocks: list[list[Piece]] = []
    room: list[tuple[int, int]] = []  # free positions and number of each block that is not full, sorted
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        length = piece[2] - piece[1]
        found = bisect_left(room, (length, 0))
        free, block = room.pop(found) if found < len(room) else (block_size, len(blocks))
        if block == len(blocks):
            blocks.append([])
        blocks[block].append(piece)
        if free > length:
            insort(room, (free - length, block))
    return [sorted(block) for block in sorted(blocks, key=lambda block: block[0])]


def fill_whole(lengths_D: Sequence[int], block_size: int) -> Filling:
    """What `pack_whole` makes of documents of these lengths.

    >>> fill_whole([3, 2, 9, 1], block_size=4)
    Filling(blocks=4, cut=1, padding=1, dropped=0)
    """
    windows = [lengths_D[start : start + WINDOW] for start in range(0, len(lengths_D), WINDOW)]
    blocks = sum(len(place(window, block_size)) for window in windows)
    cut = sum(length > block_size for length in lengths_D)
    return Filling(blocks=blocks, cut=cut, padding=blocks * block_size - sum(lengths_D), dropped=0)


PACKINGS = {"cut": (pack, fill), "whole": (pack_whole, fill_whole)}
"""By `data.packing`: how documents become blocks, and what that makes of documents of given lengths."""
