"""Bytes per process under each engine, by purpose: arithmetic on sizes, without a model.

Each process holds weights, gradients and optimizer states whole, or one shard of them. What an engine gathers for use
and what it keeps for communication is counted at its upper bound:

    ddp        a flat copy of all gradients (its buckets)
    fsdp2      the root group and two units, gathered (one in use, one prefetched), or all units where the launch file
               keeps them gathered until backward; gradients of the root group and a unit, and their sums
    zero1, 2   one bucket of gradients: DeepSpeed's 5·10⁸ elements, or all if there are fewer
    zero3      as zero2, and gathered weights: DeepSpeed's 10⁹ elements, or as many as fsdp2 if those are more

DeepSpeed keeps a float32 master copy of trained weights; in mixed precision its weights and gradients take 2 bytes.
In mixed precision FSDP2 gathers in 2 bytes, so that autocast casts no weight, but sums gradients in float32.
Hidden states are stored before the engine starts, with the whole model in every process.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from train.engine.sharding import find_units
from train.objective.model import TrainedModel
from train.plan.live_tensors import CASTS, FROZEN, GRADIENTS, TRAINED, Moment
from train.plan.shapes import ParameterCount
from train.plan.step import TracedStep

OPTIMIZER, GATHERED, COMMUNICATION = "optimizer states", "gathered for use", "communication"
BUCKET_ELEMENTS, LIVE_ELEMENTS = 5 * 10**8, 10**9
MOST_PROCESSES = 1024

Bytes = dict[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that memory is computed from.

    Attributes:
        all: all parameters of a run.
        unit: an upper bound for a unit that is sharded (a decoder layer, or a head): the parameters of the largest
            unit, and the most trained parameters that any unit has.
        root: parameters outside all units: embeddings, norms, unembeddings.
        step: the traced step.
        half: training is in mixed precision, so weights are gathered in 2 bytes.
    """

    all: ParameterCount
    unit: ParameterCount
    root: ParameterCount
    step: TracedStep
    half: bool = False

    @property
    def storing_peak(self) -> int:
        """Bytes of one process while hidden states are stored; 0 if they are not."""
        return self.all.nbytes + max(map(total, self.step.storing)) if self.step.storing else 0

    @property
    def element(self) -> int:
        """Bytes of a gathered element: the mean over the weights, or 2."""
        return 2 if self.half else share(self.all.nbytes, max(1, self.all.numel))

    @property
    def in_use(self) -> int:
        """Elements gathered at a time: the root group, a unit in use and a prefetched one."""
        return min(self.root.numel + 2 * self.unit.numel, self.all.numel)


def measure_sizes(model: TrainedModel, whole: ParameterCount, step: TracedStep, *, half: bool) -> Sizes:
    units = [ParameterCount.of(unit) for unit in find_units(model)]
    trained = max(unit.trained for unit in units)
    return Sizes(
        all=whole,
        unit=ParameterCount(trained=trained, frozen=max(unit.numel for unit in units) - trained),
        root=ParameterCount(
            trained=whole.trained - sum(unit.trained for unit in units),
            frozen=whole.frozen - sum(unit.frozen for unit in units),
        ),
        step=step,
        half=half,
    )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the engine of a launch file distributes a run; the names are those of launch/*.yaml.

    Attributes:
        shards: which of FROZEN, TRAINED, GRADIENTS and OPTIMIZER are sharded over processes.
        deepspeed: whether it keeps master weights and, in mixed precision, trains in 2 bytes.
        offloads: whether shards are stored in the host's memory.
        reshards: whether gathered weights are freed after forward, and gathered again for backward.
    """

    name: str
    shards: frozenset[str] = frozenset()
    deepspeed: bool = False
    offloads: bool = False
    reshards: bool = True

    @property
    def is_fsdp(self) -> bool:
        return self.name.startswith("fsdp2")


ALL = frozenset({FROZEN, TRAINED, GRADIENTS, OPTIMIZER})
LAUNCHES = (
    Launch(name="single"),
    Launch(name="ddp"),
    Launch(name="fsdp2", shards=ALL),
    Launch(name="fsdp2_multi_node", shards=ALL),
    Launch(name="zero1", shards=frozenset({OPTIMIZER}), deepspeed=True),
    Launch(name="zero2", shards=frozenset({OPTIMIZER, GRADIENTS}), deepspeed=True),
    Launch(name="zero3", shards=ALL, deepspeed=True),
    Launch(name="zero3_offload", shards=ALL, deepspeed=True, offloads=True),
)


def read_launches(folder: Path = Path("launch")) -> tuple[Launch, ...]:
    """All launches, with `reshards` as FSDP2's launch files have it where the folder exists."""
    return tuple(replace(e, reshards=reads_reshards(folder / f"{e.name}.yaml")) if e.is_fsdp else e for e in LAUNCHES)


def reads_reshards(path: Path) -> bool:
    fields = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return bool(fields.get("fsdp_config", {}).get("fsdp_reshard_after_forward", True))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one process.

    Attributes:
        training: on the device at the peak of a training step, by purpose.
        evaluating: on the device at the peak of an evaluation.
        storing: on the device at the peak of storing hidden states; 0 if they are not stored.
        host: in the host's memory.
    """

    training: Bytes
    evaluating: int
    storing: int
    host: int

    @property
    def peak(self) -> int:
        return max(total(self.training), self.evaluating, self.storing)


def memory_of(launch: Launch, sizes: Sizes, processes: int) -> Memory:
    """Memory of one of `processes` processes; the launch "single" always has one."""
    processes = 1 if launch.name == "single" else processes
    held, host = persistent(launch, sizes, processes)
    overhead = {} if processes == 1 and not launch.offloads else engine_overhead(launch, sizes)
    moments = [held | overhead | moment_under(launch, sizes, moment, processes) for moment in sizes.step.training]
    activations = max(map(total, sizes.step.evaluating), default=0)
    evaluating = total(held) + overhead.get(GATHERED, 0) + activations if activations else 0
    return Memory(training=max(moments, key=total), evaluating=evaluating, storing=sizes.storing_peak, host=host)


def persistent(launch: Launch, sizes: Sizes, processes: int) -> tuple[Bytes, int]:
    """What is allocated throughout: bytes on the device by purpose, and bytes on the host."""
    half, count = launch.deepspeed and sizes.half, sizes.all
    whole = {
        FROZEN: min(count.frozen_bytes, 2 * count.frozen) if half else count.frozen_bytes,
        TRAINED: 2 * count.trained if half else count.trained_bytes,
        OPTIMIZER: (4 + 8) * count.trained if launch.deepspeed else count.moments_bytes,
    }
    held = {name: share(size, processes) if name in launch.shards else size for name, size in whole.items()}
    if not launch.offloads:
        return held, 0
    return dict.fromkeys(held, 0), total(held) + share(gradients(launch, sizes), processes)


def engine_overhead(launch: Launch, sizes: Sizes) -> Bytes:
    """What several processes gather for use and keep for communication."""
    if launch.name == "ddp":
        return {COMMUNICATION: sizes.all.trained_bytes}
    if launch.is_fsdp:
        gathered = sizes.in_use if launch.reshards else sizes.all.numel
        return {GATHERED: sizes.element * gathered, COMMUNICATION: unshared_gradients(sizes)}
    bucket = {COMMUNICATION: (2 if sizes.half else 4) * min(BUCKET_ELEMENTS, sizes.all.trained)}
    if FROZEN not in launch.shards:
        return bucket
    return {GATHERED: sizes.element * max(sizes.in_use, min(LIVE_ELEMENTS, sizes.all.numel)), **bucket}


def unshared_gradients(sizes: Sizes) -> int:
    """Bytes of FSDP2's gradients before they are sharded, and of their sums; the root group waits for each unit's sum.

    In mixed precision a gradient takes 2 bytes and its sum 4 (train/engine/sharding.py); else both take the weight's.
    """
    waiting = 2 if sizes.half else share(sizes.all.trained_bytes, max(1, sizes.all.trained))
    summed = 4 if sizes.half else waiting
    root, unit = sizes.root.trained, sizes.unit.trained
    return max(waiting * (root + unit) + summed * unit, (waiting + summed) * root)


def moment_under(launch: Launch, sizes: Sizes, moment: Moment, processes: int) -> Bytes:
    """Activations and gradients of one moment under the engine."""
    whole = moment.get(GRADIENTS, 0) * gradients(launch, sizes) // max(1, sizes.all.trained_bytes)
    held = 0 if launch.offloads else share(whole, processes) if GRADIENTS in launch.shards else whole
    casts_none = sizes.half and (launch.deepspeed or launch.is_fsdp)
    return {name: size for name, size in moment.items() if not (casts_none and name == CASTS)} | {GRADIENTS: held}


def gradients(launch: Launch, sizes: Sizes) -> int:
    """Bytes of all gradients together."""
    return 2 * sizes.all.trained if launch.deepspeed and sizes.half else sizes.all.trained_bytes


def total(parts: Bytes) -> int:
    return sum(parts.values())


def share(size: int, processes: int) -> int:
    """One process's shard, rounded up.

    >>> share(10, 4)
    3
    """
    return -(-size // processes)


def fewest_processes(launch: Launch, sizes: Sizes, room: float) -> int | None:
    """The smallest number of processes whose tensors fit into `room` bytes each; None if 1024 are too few."""
    counts = range(1, 2 if launch.name == "single" else MOST_PROCESSES + 1)
    first = bisect_left(counts, True, key=lambda count: memory_of(launch, sizes, count).peak <= room)
    return counts[first] if first < len(counts) else None
