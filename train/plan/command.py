"""`python -m train plan`: its flags, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator

from rich.console import Console

from train.config import TrainConfig, read_config
from train.plan.costs import ASSUMED_MFU, Throughput, field
from train.plan.fit import parse_bytes, warnings
from train.plan.memory import launched_engines
from train.plan.plan import make_plan
from train.plan.report import show

NARROWEST = 100
"""Columns of the tables where the output is no terminal."""


def plan(arguments: list[str], console: Console | None = None) -> None:
    """What a run needs: parameters, memory, steps, FLOPs, hours, disk; warns of what will not fit."""
    options, rest = build_parser().parse_known_args(arguments)
    memory = None if options.memory is None else parse_bytes(options.memory)
    check(options)
    config = read_config(rest, prog="python -m train plan")
    console = console or wide_console()
    with only_errors(logging.getLogger("train")):  # what a run warns of is a run's
        found = make_plan(config, gpus=options.gpus, device_type=device_type(options, config), tokens=options.tokens)
    engines = launched_engines()
    stated = Throughput(tflops=options.tflops, mfu=options.mfu, tokens_per_second=options.tokens_per_second)
    show(found, engines, stated, memory, console)
    for sentence in warnings(found, config, engines, memory):
        console.print(f"warning: {sentence}", style="yellow", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def only_errors(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m train plan",
        description=plan.__doc__,
        epilog="--config FILE and every flag of train.py may be given too: --config configs/demo/grounded.yaml "
        "--trainer.per_device_train_batch_size 4. `python train.py --help` explains those.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, metavar="N", help="processes that the run is shared over, one a GPU; 1")
    add("--memory", metavar="SIZE", help="memory of one GPU, such as 80GB or 24GiB; with it, what will not fit is said")
    add("--device", choices=("cuda", "cpu"), help="where it is to run; cuda, or cpu with trainer.use_cpu: true")
    add("--tokens", type=int, metavar="N", help="tokens of training data; else data on this machine is counted")
    add("--tflops", type=float, metavar="X", help="peak of one GPU in 10^12 FLOP/s, such as 989; for the hours")
    add("--mfu", type=float, default=ASSUMED_MFU, metavar="X", help=f"share of the peak reached; {ASSUMED_MFU} assumed")
    add("--tokens-per-second", type=float, metavar="X", help="throughput of one GPU where it is known; for the hours")
    return parser


def check(options: argparse.Namespace) -> None:
    """Raise ValueError on a number that no machine has."""
    for name, least in (("gpus", 1), ("tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value} was given; give a whole number of {least} and more.")
    for name in ("tflops", "tokens_per_second"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value} was given; give a number above 0.")
    if not 0 < options.mfu <= 1:
        raise ValueError(
            f"--mfu {options.mfu} was given; it is a share of the peak: give a number above 0 and up to 1."
        )


def device_type(options: argparse.Namespace, config: TrainConfig) -> str:
    return options.device or ("cpu" if field(config, "use_cpu") else "cuda")


def wide_console() -> Console:
    console = Console()
    return console if console.width >= NARROWEST else Console(width=NARROWEST)
