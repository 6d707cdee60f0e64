"""Tests and measurements on a machine with a GPU, in commands of under ten minutes: `python3 -m benchmarks.gpu`.

    python3 -m benchmarks.gpu tests     # what needs CUDA or several processes on GPUs
    python3 -m benchmarks.gpu costs     # passes and training steps at the shapes of 1B and 7B models
    python3 -m benchmarks.gpu decoding  # heads beside plain generate, eager and compiled, and assistant_model there
    python3 -m benchmarks.gpu mx        # products with microscaling weights beside bfloat16 and humming-kernels
    python3 -m benchmarks.gpu learn     # a 100M model and heads on it, trained here, then tokens per pass and second

`make gpu` runs all five. The machine needs no network: packages that its Python lacks are unpacked from a folder of
wheels (`--wheels`), which `make gpu-wheels` fills on another machine. Each program prints into a file of its own in
`--out`, the folder to copy from the machine afterwards, whose machine.txt names commit, GPUs and versions. A program is
stopped when its share of the 25 minutes (--help lists the shares) is over; what it has printed by then stays. Programs
that measure begin only what should end in time, and name what they leave out. `--tiny` runs them on a CPU with tiny
shapes, to show that they work; its figures mean nothing, and each program may take ten times its share, since the CPU
may be busy.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.gpu.machine import describe, describe_commit, describe_gpus
from benchmarks.gpu.marked import marked_files
from benchmarks.gpu.wheels import install

ROOT = Path(__file__).resolve().parent.parent.parent
LARGEST = 16 * 2**20  # bytes of a file in --out at most
STOPPED = 124  # exit code of a program that was stopped, as of `timeout`
TINY_SLOWER = 10  # a tiny program may take so many times its share, on a CPU that may be busy


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a command.

    Attributes:
        name: the name of its file in `--out`.
        asked: its arguments after `python3`.
        tiny: these arguments with --tiny, on a CPU.
        minutes: the time after which it is stopped on a GPU.
    """

    name: str
    asked: str
    tiny: str
    minutes: float


COMMANDS: dict[str, tuple[Program, ...]] = {
    "tests": (
        Program(
            name="tests",
            asked="-m pytest -m cuda -ra {marked}",
            tiny="-m pytest -m cuda -ra {marked}",  # all are skipped, with the reason
            minutes=3,
        ),
        Program(
            name="engines",
            asked="-m benchmarks.training.engines --gpu --engines ddp fsdp2 --only-losses --cases 'grounded, frozen' "
            "'dynamo, three rates' 'dynamo, bf16' 'grounded, frozen in bfloat16' --minutes 1.3",
            tiny="-m benchmarks.training.engines --cases 'grounded, frozen' --engines ddp fsdp2 --processes 2 1 "
            "--only-losses --minutes 5",
            minutes=1.5,
        ),
    ),
    "costs": (
        Program(
            name="pass_costs",
            asked="-m benchmarks.speed.pass_costs --shapes 1b 7b --nodes 2 4 8 16 32 64 128 --batches 1 4 16 "
            "--minutes 1.1",
            tiny="-m benchmarks.speed.pass_costs --shapes demo --contexts 64 --nodes 4 --batches 1 2 --repeats 2 "
            "--minutes 5",
            minutes=1.25,
        ),
        Program(
            name="compiled_pass_costs",  # two graphs for each context, whose compiling takes most of the time
            asked="-m benchmarks.speed.pass_costs --shapes 1b 7b --nodes 16 --batches 1 4 16 --compile --minutes 1.6",
            tiny="-m benchmarks.speed.pass_costs --shapes demo --contexts 64 --nodes 4 --repeats 2 --compile "
            "--minutes 5",
            minutes=1.75,
        ),
        Program(
            name="training_steps",
            asked="-m benchmarks.gpu.training_steps --minutes 1.6",
            tiny="-m benchmarks.gpu.training_steps --tiny --minutes 5",
            minutes=1.75,
        ),
    ),
    "decoding": (
        Program(
            name="decoding",
            asked="-m benchmarks.speed.real_costs --shapes 1.2B 7B --dtypes bfloat16 --batches 1 4 16 --minutes 5 "
            "--out {out}/rows",
            tiny="-m benchmarks.speed.real_costs --quick --batches 1 2 --groups 1 --new-tokens 4 --compile "
            "--minutes 40 --out {out}/rows",
            minutes=5.5,
        ),
    ),
    "mx": (
        Program(
            name="microscaling",
            asked="-m benchmarks.gpu.microscaling --minutes 1.3",
            tiny="-m benchmarks.gpu.microscaling --tiny --minutes 5",
            minutes=1.5,
        ),
    ),
    "learn": (
        Program(
            name="learn",
            asked="-m benchmarks.gpu.learn --minutes 8.25",
            tiny="-m benchmarks.gpu.learn --tiny --minutes 0.1",
            minutes=8.75,
        ),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.commands) - set(COMMANDS):
        parser.error(f"{', '.join(sorted(unknown))} is no command; allowed are {', '.join(COMMANDS)}")
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    try:
        unpacked = install(Path(options.wheels)) if options.wheels else None
        if unpacked is not None:
            environment["PYTHONPATH"] = os.pathsep.join([str(unpacked), str(ROOT)])
        packages = describe(unpacked)
        gpus = "no GPU is asked: --tiny" if options.tiny else describe_gpus(environment)
    except ValueError as error:
        sys.exit(f"error: {error}")
    first_lines = f"{describe_commit()}\n{gpus}\n{packages}\n"
    (out / "machine.txt").write_text(first_lines, encoding="utf-8")
    print(first_lines, end="", flush=True)
    failed = []
    for command in options.commands or COMMANDS:
        for program in COMMANDS[command]:
            chosen = replace(program, minutes=TINY_SLOWER * program.minutes) if options.tiny else program
            asked = (program.tiny if options.tiny else program.asked).format(out=out, marked=" ".join(marked_files()))
            if code := run(chosen, asked, out / f"{program.name}.txt", environment):
                failed.append(f"{program.name} {describe_end(chosen, code)}")
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.stat().st_size > LARGEST:
            print(f"{path} has {path.stat().st_size / 2**20:.0f} MiB; what is brought home has at most 16.")
    if failed:
        sys.exit("; ".join(failed))


def build_parser() -> argparse.ArgumentParser:
    text, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu",
        description=text,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help=what_each_takes())
    parser.add_argument("--out", default="benchmarks/results/gpu", help="folder for the figures (default: %(default)s)")
    parser.add_argument(
        "--wheels", help="folder of wheels for what this Python lacks; they are unpacked, not installed"
    )
    parser.add_argument("--tiny", action="store_true", help="try the programs on a CPU; figures mean nothing")
    return parser


def what_each_takes() -> str:
    """
    >>> what_each_takes()
    'of tests (3 + 1.5), costs (1.25 + 1.75 + 1.75), decoding (5.5), mx (1.5), learn (8.75); minutes at most, 25 in all'
    """
    minutes = {name: [program.minutes for program in programs] for name, programs in COMMANDS.items()}
    named = ", ".join(f"{name} ({' + '.join(f'{one:g}' for one in found)})" for name, found in minutes.items())
    return f"of {named}; minutes at most, {sum(map(sum, minutes.values())):g} in all"


def describe_end(program: Program, code: int) -> str:
    if code == STOPPED:
        return f"was stopped at its {program.minutes:g} minutes; what it had not printed by then is left out"
    return f"ended with {code}"


def run(program: Program, asked: str, file: Path, environment: dict[str, str]) -> int:
    """Run a program, print what it prints and write that to a file; returns its exit code, 124 at its time limit."""
    command = [sys.executable, *shlex.split(asked)]
    started = time.monotonic()
    print(f"\n# python3 {asked}    (at most {program.minutes:g} minutes)", flush=True)
    with file.open("w", encoding="utf-8") as written:
        written.write(f"python3 {asked}\n\n")
        written.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        stopped = threading.Event()
        limit = threading.Timer(60 * program.minutes, stop, (process, stopped))
        limit.start()
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                written.write(line)
                written.flush()
            code = process.wait()
        except BaseException:  # Ctrl-C does not reach a session of its own
            stop(process, stopped)
            raise
        finally:
            limit.cancel()
        code = STOPPED if stopped.is_set() else code
        end = f"\n{describe_end(program, code)}, after {time.monotonic() - started:.0f} s\n"
        written.write(end)
        print(end, end="", flush=True)
    return code


def stop(process: subprocess.Popen[str], stopped: threading.Event) -> None:
    """End a program and all that it has started."""
    stopped.set()
    os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
