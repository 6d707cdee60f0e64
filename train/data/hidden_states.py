"""Store a frozen backbone's hidden states: it runs once over the blocks, and every epoch reads the files.

    $HF_DATASETS_CACHE/headway/hidden-states-<fingerprint>/shard-00000.bin    (blocks, taps, T, D) as raw memory
                                                          shard-00000.json   its size and checksum, written last

The fingerprint covers the blocks, the backbone's weights and settings, the taps and the dtype, so a folder never serves
a run with other states. A shard counts as complete when its checksum file exists and matches; any other shard is
computed again, so an interrupted pass resumes at its first unfinished shard. Each process writes its own shards and
reads all of them. An inference server may compute the states (train/data/served_states.py). Attention masks and
positions are not stored: they follow from `document_ids`.
"""
# B block of a batch, N tap, T position in a block, D model width

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from datasets.fingerprint import Hasher
from torch import Tensor
from tqdm.auto import tqdm

from heads.data.documents import cache_file
from train.config.states_server import StatesServerConfig
from train.data.served_states import ServedStates
from train.objective.model import TrainedModel

logger = logging.getLogger(__name__)

SHARD_BYTES = 2**28
READ_BYTES = 2**24
BLOCKS_PER_READ = 1024
StatesOf = Callable[[Tensor, Tensor], Tensor]  # tokens and document ids (B, T) to states (B, N, T, D)


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
    """Which file holds the states of which block.

    >>> sizes = {"blocks": 10, "taps": 1, "length": 4, "width": 8, "shard_bytes": 400}
    >>> layout = ShardLayout(folder=Path("f"), dtype=torch.float32, **sizes)
    >>> layout.block_bytes, layout.blocks_per_shard, layout.shards, list(layout.blocks_of(3))
    (128, 3, 4, [9])
    """

    folder: Path
    blocks: int
    taps: int
    length: int
    width: int
    dtype: torch.dtype
    shard_bytes: int = SHARD_BYTES

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, T, D) of one block."""
        return self.taps, self.length, self.width

    @property
    def block_bytes(self) -> int:
        return self.taps * self.length * self.width * self.dtype.itemsize

    @property
    def blocks_per_shard(self) -> int:
        return max(1, self.shard_bytes // self.block_bytes)

    @property
    def shards(self) -> int:
        return -(-self.blocks // self.blocks_per_shard)

    def blocks_of(self, shard: int) -> range:
        return range(self.blocks)[shard * self.blocks_per_shard : (shard + 1) * self.blocks_per_shard]

    def file(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.bin"

    def read(self, shard: int) -> Tensor:
        """(blocks, N, T, D), memory-mapped."""
        shape = (len(self.blocks_of(shard)), *self.shape)
        elements = len(self.blocks_of(shard)) * self.block_bytes // self.dtype.itemsize
        return torch.from_file(str(self.file(shard)), shared=False, size=elements, dtype=self.dtype).view(shape)


class CachedBlocks(torch.utils.data.Dataset):
    """Blocks whose items also hold their hidden states (N, T, D)."""

    def __init__(self, blocks: Dataset, layout: ShardLayout) -> None:
        self.blocks = blocks
        self.layout = layout

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """A whole batch for a DataLoader, several times as fast as one block at a time."""
        rows = self.blocks.__getitems__(indices)
        return [{**row, "hidden_states": self._states(index)} for row, index in zip(rows, indices, strict=True)]

    def _states(self, index: int) -> Tensor:
        shard, row = divmod(index, self.layout.blocks_per_shard)
        return self._shards[shard][row]

    @cached_property
    def _shards(self) -> list[Tensor]:
        return [self.layout.read(shard) for shard in range(self.layout.shards)]


def cache_hidden_states(
    model: TrainedModel,
    blocks: Dataset,
    *,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    batch_size: int,
    dtype: torch.dtype | None,
    context: Callable[[], AbstractContextManager[Any]],
    server: StatesServerConfig | None = None,
) -> CachedBlocks:
    """The blocks with their hidden states; states that are not on the disk yet are computed first.

    Args:
        server: computes the missing states if it has a URL.
        dtype: dtype of the stored states; None takes the backbone's.
        context: the context of the training forward (autocast).

    Raises:
        ValueError: the disk has too little room, or shards of other processes are not on it.
    """
    with context():
        layout = plan_layout(model, blocks, dtype or model.backbone.dtype, server)
    state = PartialState()
    mine = range(state.process_index, layout.shards, state.num_processes)
    missing = [shard for shard in mine if not is_whole(layout, shard)]
    refuse_a_full_disk(layout, missing)
    compute: StatesOf = model.hidden_states
    if server is not None and server.url is not None and missing:
        compute, batch_size = ServedStates(server, model), max(batch_size, server.concurrency)
    with (
        torch.no_grad(),
        context(),
        tqdm(
            total=sum(len(layout.blocks_of(shard)) for shard in missing),
            desc="hidden states",
            unit="block",
            disable=not state.is_main_process or not missing,
        ) as bar,
    ):
        for shard in missing:
            write_shard(layout, shard, compute, model.backbone.device, blocks, collate, batch_size, bar)
    state.wait_for_everyone()
    refuse_what_others_lack(layout)
    return CachedBlocks(blocks, layout)


def plan_layout(
    model: TrainedModel, blocks: Dataset, dtype: torch.dtype, server: StatesServerConfig | None = None
) -> ShardLayout:
    assert model.token_heads is not None, "the config's check refuses this"
    taps = model.stored_taps
    kind = model.backbone.device.type
    autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
    settings = (
        fingerprint_of_blocks(blocks),
        fingerprint(model.model),
        taps,
        str(dtype),
        autocast,
        model.attend_across_documents,
        *([] if server is None or server.url is None else ["server"]),  # a server's kernels round differently
    )
    folder = cache_file("hidden-states", Hasher.hash(settings)).with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    length = len(blocks[0]["input_ids"])
    return ShardLayout(
        folder=folder, blocks=len(blocks), taps=len(taps), length=length, width=model.backbone.hidden_size, dtype=dtype
    )


def fingerprint(model: Any, without: Collection[str] = ()) -> str:
    """Hash of a backbone's settings and of every byte of its weights, independent of its path and files.

    Args:
        without: settings that are left out of the hash.
    """
    settings = [item for item in model.config.to_diff_dict().items() if item[0] not in without]
    digest = xxhash.xxh3_64(repr(sorted(settings, key=str)).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def fingerprint_of_blocks(blocks: Dataset) -> str:
    """Hash of the tokens and document ids; the dataset's own `_fingerprint` depends on a path and a time."""
    columns = ["input_ids", "document_ids"]
    digest = xxhash.xxh3_64(repr((len(blocks), len(blocks[0][columns[0]]))).encode())
    for table in blocks.select_columns(columns).with_format("arrow").iter(batch_size=BLOCKS_PER_READ):
        for name in columns:
            digest.update(table[name].combine_chunks().flatten().to_numpy())
    return digest.hexdigest()


def refuse_a_full_disk(layout: ShardLayout, missing: list[int]) -> None:
    """Log the size of stored states and how much of it is new. Every process calls this and gets the same result.

    Args:
        missing: the shards that this process will write.

    Raises:
        ValueError: the disk has too little room for what all processes together will write.
    """
    mine = sum(len(layout.blocks_of(shard)) for shard in missing) * layout.block_bytes
    needs, rooms = zip(*gather_object([(mine, shutil.disk_usage(layout.folder).free)]), strict=True)
    needed, free, total = sum(needs), min(rooms), layout.blocks * layout.block_bytes
    logger.info(
        f"hidden states: {layout.blocks:,} blocks of {layout.length} tokens, {layout.taps} tap(s) of {layout.width} in "
        f"{layout.dtype}: {total / 2**30:.2f} GiB in {layout.folder}, {needed / 2**30:.2f} GiB of it to be computed"
    )
    if needed > free:
        raise ValueError(
            f"cache_hidden_states needs {needed / 2**30:.1f} GiB more in {layout.folder}, and the disk has "
            f"{free / 2**30:.1f} GiB left; point HF_DATASETS_CACHE to a larger disk, set hidden_states_dtype to "
            f"bfloat16, or train without it."
        )


def refuse_what_others_lack(layout: ShardLayout) -> None:
    """Raise ValueError where shards of other processes are missing, as on machines that share no disk."""
    lacking = [shard for shard in range(layout.shards) if not checksum_file(layout, shard).is_file()]
    if lacking:
        raise ValueError(
            f"{layout.file(lacking[0])} was left to another process and is not here; cache_hidden_states needs a disk "
            f"that all machines share: point HF_DATASETS_CACHE there."
        )


def write_shard(
    layout: ShardLayout,
    shard: int,
    compute: StatesOf,
    device: torch.device,
    blocks: Dataset,
    collate: Callable[[list[Any]], dict[str, Tensor]],
    batch_size: int,
    bar: Any,
) -> None:
    """Write one shard under a temporary name, rename it when it is complete, then write its checksum."""
    unfinished, digest = layout.file(shard).with_suffix(".tmp"), xxhash.xxh3_64()
    indices = layout.blocks_of(shard)
    with unfinished.open("wb") as file:
        for start in range(0, len(indices), batch_size):
            rows = indices[start : start + batch_size]
            batch = {name: t.to(device) for name, t in collate([blocks[i] for i in rows]).items()}
            states_BNTD = compute(batch["input_ids"], batch["document_ids"]).to("cpu", layout.dtype)
            content: Any = states_BNTD.contiguous().flatten().view(torch.uint8).numpy()
            digest.update(content)
            file.write(content)
            bar.update(len(rows))
    size = unfinished.stat().st_size
    os.replace(unfinished, layout.file(shard))
    checksum_file(layout, shard).write_text(json.dumps({"bytes": size, "xxh3_64": digest.hexdigest()}) + "\n")


def checksum_file(layout: ShardLayout, shard: int) -> Path:
    return layout.file(shard).with_suffix(".json")


def is_whole(layout: ShardLayout, shard: int) -> bool:
    """Whether a shard has the size and checksum that were recorded when it was finished; warns of a damaged one."""
    noted, file = checksum_file(layout, shard), layout.file(shard)
    if not noted.is_file() or not file.is_file():
        return False
    try:
        wanted = json.loads(noted.read_text())
    except json.JSONDecodeError:
        wanted = {}
    if wanted != {"bytes": file.stat().st_size, "xxh3_64": checksum(file)}:
        noted.unlink()
        logger.warning("%s does not have its checksum; it is computed again.", file)
        return False
    return True


def checksum(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as content:
        while piece := content.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
