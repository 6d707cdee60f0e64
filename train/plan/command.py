"""`python -m train plan`: what a run needs, printed, and warnings of what will not fit."""

from __future__ import annotations

import logging

from rich.console import Console

from train.config import TrainConfig
from train.plan.costs import Machine, trainer_field
from train.plan.fit import warnings
from train.plan.hub import without_waiting
from train.plan.memory import read_launches
from train.plan.plan import make_plan
from train.plan.report import disk_table, memory_table, parameter_table, run_table

LEAST_WIDTH = 100
"""Columns of the tables where the output is no terminal."""


def plan(config: TrainConfig, machine: Machine, console: Console | None = None) -> None:
    """Print what a run needs: parameters, memory, steps, FLOPs, hours, disk; warn of what will not fit.

    Raises:
        ValueError: a number that no machine has, or a config that cannot be built.
    """
    machine.check()
    memory, device_type = machine.room, machine.device or ("cpu" if trainer_field(config, "use_cpu") else "cuda")
    console = console or Console(width=max(LEAST_WIDTH, Console().width))
    launches = read_launches()
    logging.disable(logging.WARNING)  # what a run warns of is a run's
    try:
        with without_waiting(config.backbone.name_or_path):
            found = make_plan(config, gpus=machine.gpus, device_type=device_type, tokens=machine.tokens)
    finally:
        logging.disable(logging.NOTSET)
    console.print(parameter_table(found), memory_table(found, launches, memory))
    console.print(run_table(found, machine), disk_table(found))
    for sentence in warnings(found, config, launches, memory):
        console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)
