"""The slow checks: run each, print it, and write its tables with machine and command to benchmarks/results.md.

    make verify        or        python -m benchmarks.verify [NAME …]

A later capability adds its command to `CHECKS`; a name on the command line runs that check alone and keeps the other
sections of the file.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results.md"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
PROGRESS = re.compile(r"it/s\]|s/it\]|examples/s\]|━|╸")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One command; `shows` says what to look for in its tables."""

    command: tuple[str, ...]
    shows: str


CHECKS = {
    "decoding": Check(
        command=("python", "-m", "benchmarks.speed.decoding", "--prompts", "6", "--picture", "docs/decoding_speed.png"),
        shows="shipped heads beside plain generate and prompt lookup, eager and compiled, with and without repetition "
        "penalty, where each millisecond goes, and the targets",
    ),
    "pass costs": Check(
        command=("python", "-m", "benchmarks.speed.pass_costs", "--compile"),
        shows="a pass of 1 to 64 nodes behind 512 to 8k tokens in plain steps, and what tokens per pass are worth",
    ),
    "trees": Check(
        command=("python", "-m", "benchmarks.speed.trees", "--prompts", "20"),
        shows="trees fitted to heads and machine: speed over plain generation as `headway tune-tree` predicts and as "
        "measured on other prompts, both halves in turn, within 10 %, and what is said of a batch of 16",
    ),
    "acceptance rules": Check(
        command=("python", "-m", "benchmarks.speed.acceptance_rules"),
        shows="tokens per pass under the exact rule, modified rejection sampling and lossy typical acceptance, by tree "
        "and temperature (docs/acceptance.md)",
    ),
    "batches": Check(
        command=("python", "-m", "benchmarks.speed.batches", "--picture", "docs/batches.png"),
        shows="tokens per second at batch sizes 1 to 16, with ragged prompts: plain generate, tree decoding, heads "
        "alone with several node budgets",
    ),
    "training": Check(
        command=("python", "-m", "benchmarks.training", "speed", "memory", "step"),
        shows="a step beside a plain loop and a floor, peak memory, the share of a step that is overhead",
    ),
    "training options": Check(
        command=("python", "-m", "benchmarks.training", "compile", "stored", "scaling", "chunks"),
        shows="compiled layers, stored hidden states, two processes, chunk sizes of the loss",
    ),
    "loss costs": Check(
        command=("python", "-m", "benchmarks.training.loss_costs"),
        shows="the loss with a teacher's distribution in its kinds, beside hard labels (docs/losses.md)",
    ),
    "draft vocabulary": Check(
        command=("python", "-m", "benchmarks.speed.draft_vocabulary"),
        shows="heads that score 8k to 32k of 128k tokens: parameters, drafting and loss beside their limits; and "
        "tokens per pass of the shipped demo heads cut to 1,024, 512 and 256 of 2,048 tokens",
    ),
    "engines": Check(
        command=("python", "-m", "benchmarks.training.engines"),
        shows="the same losses, weights and bytes under DDP, FSDP2 and ZeRO-1/2/3 as in one process, on two and four "
        "processes, and runs that one engine begins and another ends",
    ),
    "plan": Check(
        command=("python", "-m", "benchmarks.training.plan"),
        shows="tensor memory as `python -m train plan` predicts it beside the measured peak of real training steps",
    ),
    "dynamo counts": Check(
        command=("python", "-m", "benchmarks.paper.dynamo_counts"),
        shows="parameters of all sizes and variants of the paper beside the paper's own figures",
    ),
    "dynamo ablation": Check(
        command=("python", "-m", "benchmarks.paper.dynamo_ablation", "--json", "checkpoints/runs/dynamo_ablation.json"),
        shows="the rows of table 9 trained on the demo backbone; rows that an earlier call finished are kept",
    ),
    "grounded ablation": Check(
        command=(
            *("python", "-m", "benchmarks.paper.grounded_ablation", "--steps", "100"),
            *("--prompts", "16", "--rounds", "3"),
            *("--picture", "docs/grounded_ablation.png"),
        ),
        shows="the rows of the grounded paper's figures 2 and 5 to 8 and later options, trained on the demo backbone, "
        "and the target; rows that an earlier call finished are kept",
    ),
    "grounded ablation, seeds": Check(
        command=(
            *("python", "-m", "benchmarks.paper.grounded_ablation", "--rows", "medusa", "grounded", "gru"),
            *("--steps", "100"),
            *("--prompts", "16", "--rounds", "0", "--seeds", "3"),
        ),
        shows="gru beside grounded and medusa over three trainings: means and deviations; finished rows are kept",
    ),
    "dynamo decoding": Check(
        command=("python", "-m", "benchmarks.paper.dynamo_decoding"),
        shows="the parts of dynamic decoding by likelihood at equal tokens per pass (table 8)",
    ),
    "dynamo perplexity": Check(
        command=(
            *("headway", "evaluate", "checkpoints/demo/dynamo", "--metrics", "perplexity,accuracy", "--blocks", "32"),
            *("--cooccurrence", "checkpoints/runs/demo-ngrams", "--thresholds", "0,0.25,0.5,0.75,1"),
            *("--picture", "docs/dynamo_perplexity.png"),
        ),
        shows="PPL_n, PPL_1:n and PPL_d against tokens per pass; benchmarks.demo counts the table of n-grams it needs",
    ),
    "dynamo first token": Check(
        command=("python", "-m", "benchmarks.paper.dynamo_first_token"),
        shows="PPL₁ of the demo backbone trained with heads, and as long without",
    ),
    "joint training": Check(
        command=("python", "-m", "benchmarks.paper.joint_training", "--json", "checkpoints/runs/joint_training.json"),
        shows="tokens per pass and the backbone's PPL₁ before and after: heads alone, with an adapter on the backbone, "
        "warm-in, self-distillation (Medusa-2); rows that an earlier call finished are kept",
    ),
    "sinkhorn": Check(
        command=("python", "-m", "benchmarks.paper.sinkhorn"),
        shows="marginals pulled back to the heads' own (ε₂ > 0 of equation 5) against a weaker mask",
    ),
    "ngrams": Check(
        command=("python", "-m", "benchmarks.speed.ngrams"),
        shows="milliseconds of a mask over 10 M trigrams, its share of a pass, and seconds to count 10 M tokens",
    ),
    "resume": Check(
        command=("python", "-m", "benchmarks.training.resume"),
        shows="a run killed at random moments, in saves too, against one that never stopped: bit-equal",
    ),
    "base recipe": Check(
        command=("accelerate", "launch", "train.py", "--config", "configs/demo/base.yaml"),
        shows="the demo backbone's recipe learns from random weights: eval_backbone_loss falls",
    ),
}


def run_check(name: str, check: Check) -> str:
    """The check's section of the results; its output goes to the screen as well.

    Raises:
        SystemExit: the command failed.
    """
    print(f"== {name}: {' '.join(check.command)}", flush=True)
    beside_python = Path(sys.executable).parent
    started = time.perf_counter()
    done = subprocess.run(
        [str(beside_python / check.command[0]), *check.command[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    minutes = (time.perf_counter() - started) / 60
    kept = [line.rstrip() for line in ANSI.sub("", done.stdout).splitlines() if not PROGRESS.search(line)]
    output = "\n".join(kept).strip()
    how = f"`{' '.join(check.command)}` ({minutes:.1f} minutes; {machine()})"
    return f"## {name}\nShows {check.shows}.\n\n{how}\n```\n{output}\n```\n"


def machine() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return (
        f"{processor()}, {torch.get_num_threads()} threads, Python {platform.python_version()}, {versions}, {today()}"
    )


def processor() -> str:
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else []
    return models[0].strip() if models else platform.processor() or platform.machine()


def today() -> str:
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()


def sections(text: str) -> dict[str, str]:
    """The `## name` sections of a results file.

    >>> sections("# Results\\n## a\\n1\\n## b\\n2\\n")
    {'a': '## a\\n1\\n', 'b': '## b\\n2\\n'}
    """
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part for part in parts}


def write_results(new: dict[str, str]) -> None:
    old = sections(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    head = "# Results\nWritten by `make verify` (`python -m benchmarks.verify`), never by hand.\n\n"
    RESULTS.write_text(head + "\n".join(part.strip() + "\n" for part in (old | new).values()), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"checks to run; all where none is named: {', '.join(CHECKS)}")
    names = parser.parse_args().names or list(CHECKS)
    if unknown := set(names) - set(CHECKS):
        parser.error(f"unknown check {', '.join(sorted(unknown))}; allowed are {', '.join(CHECKS)}")
    for name in names:
        write_results({name: run_check(name, CHECKS[name])})  # each at once: a later failure keeps it
    print(f"written to {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
