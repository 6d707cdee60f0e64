"""torch.compile for decoder layers in training, where it is faster; one line reports the choice.

The backbone's layers are compiled one by one (layers of one class share their code), by their `forward`, so that hooks
that record taps stay outside the graph and names in checkpoints do not change. Evaluation and decoding run uncompiled,
since their shapes change with every pass.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import socket
import time
from itertools import islice
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from heads.backbone.compiling.graph import has_cpp_compiler
from train.engine.engine import Engine
from train.engine.half_precision import autocast_dtype
from train.objective.document_attention import document_attention, is_by_documents
from train.objective.model import TrainedModel

logger = logging.getLogger(__name__)

REPAYS_AFTER = 240.0
"""Seconds in uncompiled decoder layers from which compiling repays. On two CPU cores, compiling took 3 to 12 s and made
a frozen backbone's forward 1.01 (wide layers) to 1.14 times as fast (narrow ones): `benchmarks.training compile`."""
BY_DOCUMENT_FROM = 512
"""Tokens of a block from which layers that attend by document gain more than compiled ones, which need dense masks. On
two CPU cores a pass over 2,048 tokens takes 1.26 to 1.65 times as long with a dense mask (`benchmarks.training
attention`); the excess grows with the block, so at 512 tokens it is about a quarter of that."""
ENGINES = (Engine.ONE, Engine.DDP)


def compile_where_it_wins(trainer: Any, wanted: bool | str, *, resumed: bool = False) -> bool:
    """Follow the config's `compile` field and log what was done and why; every process takes part and does the same.

    Args:
        wanted: the field; for a resumed run with auto, what its checkpoint did.
        resumed: the run resumes from a checkpoint.

    Returns:
        Whether layers are compiled.

    Raises:
        ValueError: compiling was requested and is not possible.
    """
    obstacle = what_stops_any_process(what_stops_compiling(trainer.model, trainer.args.device, trainer.engine))
    as_before = resumed and trainer.config.compile == "auto"
    if wanted is True and obstacle:
        warn_or_refuse(obstacle, as_before)
        return False
    on, reason = choose(trainer, wanted, obstacle, as_before)
    if on:
        compile_layers(trainer.model)
    logger.info("torch.compile: %s, as %s", "decoder layers are compiled" if on else "off", reason)
    return on


def warn_or_refuse(obstacle: str, as_before: bool) -> None:
    """Warn in the main process that a resumed run, whose layers were compiled before, continues uncompiled.

    Raises:
        ValueError: the config requires compiling.
    """
    if not as_before:
        raise ValueError(f"compile: true was given, but {obstacle}; change that, or set compile to auto.")
    if PartialState().is_main_process:
        logger.warning(
            "torch.compile: off, though decoder layers were compiled before, as %s; from now on the run rounds "
            "differently.",
            obstacle,
        )


def choose(trainer: Any, wanted: bool | str, obstacle: str, as_before: bool) -> tuple[bool, str]:
    """Whether layers are compiled, and why."""
    if obstacle:
        return False, obstacle
    if isinstance(wanted, str):
        return is_worth_it(trainer)
    if as_before:
        return wanted, f"the run was {'' if wanted else 'not '}compiled before"
    return wanted, f"compile is {str(wanted).lower()}"


def what_stops_any_process(obstacle: str) -> str:
    """The first obstacle that any process has, so that all decide alike; it names the machine if others have none."""
    gathered = gather_object([(obstacle, socket.gethostname())])
    found = [(text, host) for text, host in gathered if text]
    if not found:
        return ""
    text, host = found[0]
    return text if len(found) == len(gathered) else f"{text} on {host}"


def what_stops_compiling(model: TrainedModel, device: torch.device, engine: Engine) -> str:
    """Why this run cannot be compiled; empty where it can."""
    if engine not in ENGINES:
        return f"compiled layers are supported in one process and under DDP, and the engine is {engine.value}"
    if getattr(model.model, "is_quantized", False):
        return "the backbone is quantised"
    if device.type == "cpu":
        return "" if has_cpp_compiler() else "no C++ compiler was found"
    return "" if importlib.util.find_spec("triton") else "triton is not installed"


def is_worth_it(trainer: Any) -> tuple[bool, str]:
    """Whether compiling gains more than attention by document, and repays its time; process 0 decides for all.

    The time in the backbone is estimated from one pass over the first micro-batch.
    """
    block_size, batch = trainer.config.data.block_size, first_batch(trainer)
    by_document = block_size >= BY_DOCUMENT_FROM and attends_by_document(trainer, batch)
    seconds = 0.0 if by_document else seconds_per_pass(trainer, batch) * num_passes(trainer)
    by_document, seconds = broadcast_object_list([by_document, seconds])
    if by_document:
        return False, (
            f"compiled layers need dense masks, and in blocks of {block_size:,} tokens attention by document gains more"
        )
    return seconds > REPAYS_AFTER, (
        f"the run will spend about {seconds:,.0f} s in uncompiled layers; compiling repays from {REPAYS_AFTER:.0f} s on"
    )


def first_batch(trainer: Any) -> dict[str, Tensor]:
    """A micro-batch of the first blocks, on the run's device, to which the model is moved too."""
    trainer.model.to(trainer.args.device)
    rows = list(islice(iter(trainer.train_dataset), trainer.args.per_device_train_batch_size))
    return {name: tensor.to(trainer.args.device) for name, tensor in trainer.data_collator(rows).items()}


def attends_by_document(trainer: Any, batch: dict[str, Tensor]) -> bool:
    """Whether uncompiled layers would need no dense mask for this micro-batch."""
    with document_attention(trainer.model, compiled=False, autocast=autocast_dtype(trainer.args)):
        _, _, mask = trainer.model.attention(batch["document_ids"])
    return is_by_documents(mask)


def seconds_per_pass(trainer: Any, batch: dict[str, Tensor]) -> float:
    """The backbone's seconds for one micro-batch; backward through a trained one counts as two more forwards."""
    model = trainer.model
    with torch.no_grad(), torch.random.fork_rng(), trainer.compute_loss_context_manager():
        for _ in range(2):  # the first one pays for allocations
            start = read_clock(trainer.args.device)
            model.hidden_states(batch["input_ids"], batch["document_ids"])
            seconds = read_clock(trainer.args.device) - start
    return seconds * (3 if model.trains_backbone else 1)


def read_clock(device: torch.device) -> float:
    """Seconds, after waiting for the device to finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def num_passes(trainer: Any) -> int:
    """The number of micro-batches that the backbone will process in one process of the run."""
    args = trainer.args
    epoch = math.inf
    if hasattr(trainer.train_dataset, "__len__"):
        epoch = math.ceil(len(trainer.train_dataset) / (args.per_device_train_batch_size * args.world_size))
    if trainer.config.cache_hidden_states:
        return int(epoch)
    if args.max_steps > 0:
        return args.max_steps * args.gradient_accumulation_steps
    return math.ceil(args.num_train_epochs * epoch)


def compile_layers(model: TrainedModel) -> None:
    """Compile the backbone's decoder layers, and the heads' layers of the same class, in place.

    Of the backbone's layers only `forward` is compiled: `compile()` would trace their hooks into the graph, which would
    not notice when they change. The heads' layers use `compile()`, which copies of heads for decoding do not inherit.
    """
    kinds = {type(layer) for layer in model.backbone.layers}
    for layer in model.backbone.layers:
        layer.forward = torch.compile(layer.forward)  # type: ignore[method-assign]
    for module in nn.ModuleList([model.token_heads] if model.token_heads else []).modules():
        if type(module) in kinds:
            module.compile()
