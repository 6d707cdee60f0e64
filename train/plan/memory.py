"""Bytes per process under each engine, part by part: arithmetic on sizes, no model in sight.

An engine cuts weights, gradients and optimizer states into one share for each process or keeps them whole. What it
gathers for the moment of use and keeps for communication is counted at its upper bound:

    ddp        a flat copy of all gradients (its buckets)
    fsdp2      the root group and two units gathered (one in use, one fetched ahead), all units where the launch file
               keeps them gathered until backward; gradients of the root group and a unit, and what is summed of them
    zero1, 2   one bucket of gradients, DeepSpeed's 5·10⁸ elements or all there are
    zero3      what zero2 has, and gathered weights up to DeepSpeed's 10⁹ elements, at least as much as fsdp2

DeepSpeed keeps a float32 master copy of what is trained; in mixed precision all weights and gradients have 2 bytes.
FSDP2 gathers in 2 bytes then, so autocast has nothing left to cast; it sums gradients in float32 nevertheless.
A pass that stores hidden states comes before the engine and has the whole model in every process.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from train.plan.live_tensors import CASTS, FROZEN, GRADIENTS, TRAINED, Moment

OPTIMIZER, GATHERED, COMMUNICATION = "optimizer states", "gathered for use", "communication"
BUCKET_ELEMENTS, LIVE_ELEMENTS = 5 * 10**8, 10**9
MOST_PROCESSES = 1024

Bytes = dict[str, int]
"""Bytes by part."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the arithmetic reads.

    Attributes:
        frozen: bytes of weights and buffers that are not trained.
        trained: bytes of trained weights, in the dtype in which they are trained; gradients are of the same size.
        moments: bytes of AdamW's two moments.
        numel: all parameters.
        trained_numel: the trained ones.
        root: elements of the root group, which lies in no unit: embeddings, norms, unembeddings.
        unit: elements of the largest unit: a decoder layer, or a head's own module.
        root_trained: elements of the root group that are trained.
        unit_trained: elements of the largest unit that are trained.
        half: training is in mixed precision, so weights are gathered in 2 bytes.
        training: the moments of a micro-batch that could be its peak.
        evaluating: those of an evaluation batch.
        storing: those of the pass that stores hidden states; none where nothing is stored.
    """

    frozen: int
    trained: int
    moments: int
    numel: int
    trained_numel: int
    root: int
    unit: int
    root_trained: int
    unit_trained: int
    half: bool
    training: list[Moment]
    evaluating: list[Moment]
    storing: list[Moment] = field(default_factory=list)

    @property
    def storing_peak(self) -> int:
        """Bytes of one process while hidden states are stored; 0 where they are not."""
        return self.frozen + self.trained + max(map(total, self.storing)) if self.storing else 0

    @property
    def element(self) -> int:
        """Bytes of a gathered element: the mean over the weights, or 2."""
        return 2 if self.half else -(-(self.frozen + self.trained) // max(1, self.numel))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How an engine distributes a run; the names are those of launch/*.yaml.

    Attributes:
        shards: which of FROZEN, TRAINED, GRADIENTS and OPTIMIZER every process holds only a share of.
        deepspeed: it keeps master weights and trains in 2 bytes in mixed precision.
        offloads: shares lie in the host's memory.
        reshards: gathered weights are given up after forward, and gathered again for backward.
    """

    name: str
    shards: frozenset[str] = frozenset()
    deepspeed: bool = False
    offloads: bool = False
    reshards: bool = True

    @property
    def is_fsdp(self) -> bool:
        return self.name.startswith("fsdp2")

    def runs_on(self, processes: int) -> int:
        return 1 if self.name == "single" else processes


WEIGHTS = frozenset({FROZEN, TRAINED})
ALL = WEIGHTS | {GRADIENTS, OPTIMIZER}
ENGINES = (
    Engine(name="single"),
    Engine(name="ddp"),
    Engine(name="fsdp2", shards=ALL),
    Engine(name="fsdp2_multi_node", shards=ALL),
    Engine(name="zero1", shards=frozenset({OPTIMIZER}), deepspeed=True),
    Engine(name="zero2", shards=frozenset({OPTIMIZER, GRADIENTS}), deepspeed=True),
    Engine(name="zero3", shards=ALL, deepspeed=True),
    Engine(name="zero3_offload", shards=ALL, deepspeed=True, offloads=True),
)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process.

    Attributes:
        training: on the device at the peak of a training step, by part.
        evaluating: on the device at the peak of an evaluation, all parts together.
        storing: on the device at the peak of storing hidden states; 0 where that is not done.
        host: in the host's memory, for this process.
    """

    training: Bytes
    evaluating: int
    storing: int
    host: int

    @property
    def peak(self) -> int:
        return max(total(self.training), self.evaluating, self.storing)


def memory_of(engine: Engine, sizes: Sizes, processes: int) -> Memory:
    """One process's memory under an engine, with `processes` of them (a single process under "single")."""
    processes = engine.runs_on(processes)
    kept, host = persistent(engine, sizes, processes)
    overhead = extra(engine, sizes, processes)
    moments = [kept | overhead | moment_under(engine, sizes, m, processes) for m in sizes.training]
    activations = max(map(total, sizes.evaluating), default=0)
    evaluating = total(kept) + overhead.get(GATHERED, 0) + activations if activations else 0
    return Memory(training=max(moments, key=total), evaluating=evaluating, storing=sizes.storing_peak, host=host)


def persistent(engine: Engine, sizes: Sizes, processes: int) -> tuple[Bytes, int]:
    """What is there all the time: on the device by part, and bytes on the host."""
    half = engine.deepspeed and sizes.half
    master = 4 * sizes.trained_numel
    full = {
        FROZEN: min(sizes.frozen, 2 * (sizes.numel - sizes.trained_numel)) if half else sizes.frozen,
        TRAINED: 2 * sizes.trained_numel if half else sizes.trained,
        OPTIMIZER: master + 8 * sizes.trained_numel if engine.deepspeed else sizes.moments,
    }
    held = {part: share(size, processes) if part in engine.shards else size for part, size in full.items()}
    if not engine.offloads:
        return held, 0
    return dict.fromkeys(held, 0), sum(held.values()) + share(gradients(engine, sizes), processes)


def extra(engine: Engine, sizes: Sizes, processes: int) -> Bytes:
    """What is gathered for use and kept for communication."""
    if engine.name == "single" or (processes == 1 and not engine.offloads):
        return {}
    if engine.name == "ddp":
        return {COMMUNICATION: sizes.trained}
    if engine.is_fsdp:
        gathered = working_set(sizes) if engine.reshards else sizes.numel
        return {GATHERED: sizes.element * gathered, COMMUNICATION: unshared_gradients(sizes)}
    bucket = {COMMUNICATION: (2 if sizes.half else 4) * min(BUCKET_ELEMENTS, sizes.trained_numel)}
    if FROZEN not in engine.shards:
        return bucket
    live = max(working_set(sizes), min(LIVE_ELEMENTS, sizes.numel))
    return {GATHERED: sizes.element * live, **bucket}


def unshared_gradients(sizes: Sizes) -> int:
    """FSDP2's gradients before they are shared out, and what it sums: while a unit's are summed the root group's wait.

    In mixed precision a gradient has 2 bytes and what is summed 4 (`train.sharding.mixed_precision`), else both have
    the weight's.
    """
    kept = 2 if sizes.half else share(sizes.trained, max(1, sizes.trained_numel))
    summed = 4 if sizes.half else kept
    root, unit = sizes.root_trained, sizes.unit_trained
    return max(kept * (root + unit) + summed * unit, (kept + summed) * root)


def working_set(sizes: Sizes) -> int:
    """Elements gathered at once: the root group, a unit in use and one fetched ahead."""
    return min(sizes.root + 2 * sizes.unit, sizes.numel)


def moment_under(engine: Engine, sizes: Sizes, moment: Moment, processes: int) -> Bytes:
    """Activations and gradients of one moment, as the engine holds them."""
    whole = moment.get(GRADIENTS, 0) * gradients(engine, sizes) // max(1, sizes.trained)
    held = share(whole, processes) if GRADIENTS in engine.shards else whole
    casts_none = sizes.half and (engine.deepspeed or engine.is_fsdp)
    left_out = {GRADIENTS, CASTS} if casts_none else {GRADIENTS}
    parts = {part: size for part, size in moment.items() if part not in left_out}
    return parts | {GRADIENTS: 0 if engine.offloads else held}


def gradients(engine: Engine, sizes: Sizes) -> int:
    """Bytes of all gradients together."""
    return 2 * sizes.trained_numel if engine.deepspeed and sizes.half else sizes.trained


def total(parts: Bytes) -> int:
    return sum(parts.values())


def share(size: int, processes: int) -> int:
    """One process's part, rounded up.

    >>> share(10, 4)
    3
    """
    return -(-size // processes)


def launched_engines(folder: Path = Path("launch")) -> tuple[Engine, ...]:
    """The engines, with what the launch files of FSDP2 say about giving up gathered weights, where they are here."""
    return tuple(replace(e, reshards=reads_reshards(folder / f"{e.name}.yaml")) if e.is_fsdp else e for e in ENGINES)


def reads_reshards(path: Path) -> bool:
    fields = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return bool(fields.get("fsdp_config", {}).get("fsdp_reshard_after_forward", True))


def fewest_processes(engine: Engine, sizes: Sizes, room: float) -> int | None:
    """The smallest number of processes whose tensors each fit into `room` bytes; None where none does up to 1024."""
    counts = range(1, 2 if engine.name == "single" else MOST_PROCESSES + 1)
    if memory_of(engine, sizes, counts[0]).peak <= room:
        return 1
    first = 1 + bisect_left(counts[1:], True, key=lambda n: memory_of(engine, sizes, n).peak <= room)
    return counts[first] if first < len(counts) else None
