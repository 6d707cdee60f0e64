"""`python -m train plan`: print what a run needs, and warn of what will not fit.

The hub is asked for one small file. Its client retries for half a minute where the hub cannot be reached, so a
connection is tried first.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from rich.console import Console

from train.config import TrainConfig
from train.engine.half_precision import advice_on_bfloat16, settled_bf16
from train.plan.costs import Machine, trainer_field
from train.plan.fit import warnings
from train.plan.memory import read_launches
from train.plan.plan import make_plan
from train.plan.report import disk_table, memory_tables, parameter_table, run_table

LEAST_WIDTH = 100
"""The fewest columns of the tables where the output is no terminal."""
SECONDS_TO_CONNECT = 2.0


def plan(config: TrainConfig, machine: Machine, console: Console | None = None) -> None:
    """Print what a run needs: parameters, memory, steps, FLOPs, time, disk; warn of what will not fit.

    Raises:
        ValueError: a config that cannot be built.
    """
    memory, device_type = machine.memory_bytes, machine.device
    device_type = device_type or ("cpu" if trainer_field(config, "use_cpu") else "cuda")
    config = replace(config, trainer=settled_bf16(config.trainer, device_type, trains_in_float32=False))
    console = console or console_of_plan()
    launches = read_launches()
    logging.disable(logging.WARNING)  # the run itself will warn
    try:
        with offline_if_unreachable(config.backbone.name_or_path, config.backbone.tokenizer):
            found = make_plan(config, gpus=machine.gpus, device_type=device_type, tokens=machine.tokens)
    finally:
        logging.disable(logging.NOTSET)
    console.print(parameter_table(found), *memory_tables(found, launches, memory, console))
    console.print(run_table(found, machine), disk_table(found))
    if advice := advice_on_bfloat16(device_type, bf16=bool(trainer_field(config, "bf16"))):
        console.print(f"bfloat16: {advice}", markup=False, highlight=False, soft_wrap=True)
    for sentence in warnings(found, config, launches, memory):
        console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def console_of_plan() -> Console:
    """As wide as the terminal, which may be narrow; a pipe or a file takes wide tables."""
    console = Console()
    return console if console.is_terminal else Console(width=max(LEAST_WIDTH, console.width))


@contextlib.contextmanager
def offline_if_unreachable(*names: str | None) -> Iterator[None]:
    """Within the context, the hub's client reads only its cache if one of these is on a hub that does not answer.

    Args:
        names: the backbone, and its tokenizer if it has another name.
    """
    before = constants.HF_HUB_OFFLINE
    on_hub = any(name is not None and not Path(name).exists() for name in names)
    constants.HF_HUB_OFFLINE = before or (on_hub and not can_connect(constants.ENDPOINT))
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def can_connect(endpoint: str) -> bool:
    """Whether a URL's host accepts a connection. Behind a proxy only the proxy could tell, so True is assumed."""
    if getproxies():
        return True
    url = urlsplit(endpoint)
    address = (url.hostname, url.port or (80 if url.scheme == "http" else 443))
    try:
        with socket.create_connection(address, SECONDS_TO_CONNECT):
            return True
    except OSError:
        return False
