"""The slow checks: run each, print what it prints, and write it with machine and command to a file of its own.

    make verify        or        python -m benchmarks.verify [CHECK …]
    python -m benchmarks.verify --list        # what there is, and when each was last measured

Every file in benchmarks/results/ is written here and nowhere else. A later capability adds its command to `CHECKS`.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from heads.evaluation.tables import describe_machine, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
PROGRESS = re.compile(r"it/s\]|s/it\]|examples/s\]|━|╸")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One command; `shows` says what to look for in its tables."""

    command: str
    shows: str


CHECKS = {
    "decoding": Check(
        command="python -m benchmarks.speed.decoding --prompts 6 --picture docs/pictures/decoding_speed.png",
        shows="shipped heads beside plain generate and prompt lookup, eager and compiled, with and without "
        "repetition penalty, where each millisecond goes, and the targets",
    ),
    "pass_costs": Check(
        command="python -m benchmarks.speed.pass_costs --compile",
        shows="a pass of 1 to 64 nodes behind 512 to 8k tokens in plain steps, and what tokens per pass are worth",
    ),
    "trees": Check(
        command="python -m benchmarks.speed.trees --prompts 20",
        shows="trees fitted to heads and machine: speed over plain generation as `headway tune-tree` predicts "
        "and as measured on other prompts, both halves in turn, within 10 %, and what is said of a batch "
        "of 16",
    ),
    "acceptance_rules": Check(
        command="python -m benchmarks.speed.acceptance_rules",
        shows="tokens per pass under the exact rule, modified rejection sampling and lossy typical acceptance, "
        "by tree and temperature (docs/sampling.md)",
    ),
    "batches": Check(
        command="python -m benchmarks.speed.batches --picture docs/pictures/batches.png",
        shows="tokens per second at batch sizes 1 to 16, with ragged prompts: plain generate, tree decoding, "
        "heads alone with several node budgets",
    ),
    "training": Check(
        command="python -m benchmarks.training speed memory step",
        shows="a step beside a plain loop and a floor, peak memory, the share of a step that is overhead",
    ),
    "training_options": Check(
        command="python -m benchmarks.training stored scaling chunks",
        shows="stored hidden states, two processes, chunk sizes of the loss",
    ),
    "training_compile": Check(
        command="python -m benchmarks.training compile",
        shows="decoder layers as they are and compiled, at two widths",
    ),
    "loss_costs": Check(
        command="python -m benchmarks.training.loss_costs",
        shows="the loss with a teacher's distribution in its kinds, beside hard labels (docs/train.md)",
    ),
    "draft_vocabulary": Check(
        command="python -m benchmarks.speed.draft_vocabulary",
        shows="heads that score 8k to 32k of 128k tokens: parameters, drafting and loss beside their limits; "
        "and tokens per pass of the shipped demo heads cut to 1,024, 512 and 256 of 2,048 tokens",
    ),
    "engines": Check(
        command="python -m benchmarks.training.engines",
        shows="the same losses, weights and bytes under DDP, FSDP2 and ZeRO-1/2/3 as in one process, on two and "
        "four processes, and runs that one engine begins and another ends",
    ),
    "plan": Check(
        command="python -m benchmarks.training.plan",
        shows="tensor memory as `python -m train plan` predicts it beside the measured peak of real training steps",
    ),
    "dynamo_counts": Check(
        command="python -m benchmarks.paper.dynamo_counts",
        shows="parameters of all sizes and variants of the paper beside the paper's own figures",
    ),
    "dynamo_ablation": Check(
        command="python -m benchmarks.paper.dynamo_ablation",
        shows="the rows of table 9 trained on the demo backbone; rows that an earlier call finished are kept",
    ),
    "grounded_ablation": Check(
        command="python -m benchmarks.paper.grounded_ablation --steps 100 --prompts 16 --rounds 3 --picture "
        "docs/pictures/grounded_ablation.png",
        shows="the rows of the grounded paper's figures 2 and 5 to 8 and later options, trained on the demo "
        "backbone, and the target; rows that an earlier call finished are kept",
    ),
    "grounded_ablation_seeds": Check(
        command="python -m benchmarks.paper.grounded_ablation --rows medusa grounded gru --steps 100 --prompts 16 "
        "--rounds 0 --seeds 3",
        shows="gru beside grounded and medusa over three trainings: means and deviations; finished rows are kept",
    ),
    "dynamo_decoding": Check(
        command="python -m benchmarks.paper.dynamo_decoding",
        shows="the parts of dynamic decoding by likelihood at equal tokens per pass (table 8)",
    ),
    "dynamo_perplexity": Check(
        command="headway evaluate checkpoints/demo/dynamo --metrics perplexity,accuracy --blocks 32 "
        "--cooccurrence checkpoints/runs/demo-ngrams --thresholds 0,0.25,0.5,0.75,1 --picture "
        "docs/pictures/dynamo_perplexity.png",
        shows="PPL_n, PPL_1:n and PPL_d against tokens per pass; dynamo_speed counts its table of n-grams",
    ),
    "dynamo_speed": Check(
        command="python -m benchmarks.speed.dynamo",
        shows="DynaMo on the backbone that was trained with its heads: plain, lossless trees, lossy dynamic decoding",
    ),
    "dynamo_first_token": Check(
        command="python -m benchmarks.paper.dynamo_first_token",
        shows="PPL₁ of the demo backbone trained with heads, and as long without",
    ),
    "joint_training": Check(
        command="python -m benchmarks.paper.joint_training",
        shows="tokens per pass and the backbone's PPL₁ before and after: heads alone, with an adapter on the "
        "backbone, warm-in, self-distillation (Medusa-2); rows that an earlier call finished are kept",
    ),
    "sinkhorn": Check(
        command="python -m benchmarks.paper.sinkhorn",
        shows="marginals pulled back to the heads' own (ε₂ > 0 of equation 5) against a weaker mask",
    ),
    "ngrams": Check(
        command="python -m benchmarks.speed.ngrams",
        shows="milliseconds of a mask over 10 M trigrams, its share of a pass, and seconds to count 10 M tokens",
    ),
    "resume": Check(
        command="python -m benchmarks.training.resume",
        shows="a run killed at random moments, in saves too, against one that never stopped: bit-equal",
    ),
    "base_recipe": Check(
        command="accelerate launch train.py --config configs/demo/base.yaml",
        shows="the demo backbone's recipe learns from random weights: eval_backbone_loss falls",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"what to run, by default all: {', '.join(CHECKS)}")
    parser.add_argument("--list", action="store_true", help="print each check with the day it was last measured")
    options = parser.parse_args()
    if unknown := set(options.checks) - set(CHECKS):
        parser.error(f"unknown check {', '.join(sorted(unknown))}; allowed are {', '.join(CHECKS)}")
    if options.list:
        print("\n".join(f"{name:25} {last_measured(name):12} {check.shows}" for name, check in CHECKS.items()))
        return
    for name in options.checks or CHECKS:
        write(name, run(name))  # immediately: a later check may fail


def run(name: str) -> str:
    """The text of one check's file; its output goes to the screen as well.

    Raises:
        SystemExit: the command failed.
    """
    check = CHECKS[name]
    print(f"== {name}: {check.command}", flush=True)
    program, *arguments = shlex.split(check.command)
    started = time.perf_counter()
    # Programs of this very environment, whatever the shell would find.
    command = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout)
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    minutes = (time.perf_counter() - started) / 60
    day = datetime.now(tz=UTC).date().isoformat()
    return as_markdown(name, check.command, f"{day}, {minutes:.1f} minutes, {machine()}", done.stdout)


def as_markdown(name: str, command: str, measured: str, output: str) -> str:
    """The file of one check.

    Args:
        command: as it was typed when this was measured.
        measured: the day first, then minutes, machine and versions.
        output: what the command printed; colours and progress bars are left out.
    """
    kept = [line.rstrip() for line in ANSI.sub("", output).splitlines() if not PROGRESS.search(line)]
    tables = "\n".join(kept).strip()
    return (
        f"# {name}\nWritten by `python -m benchmarks.verify {name}`, never by hand. It shows {CHECKS[name].shows}.\n\n"
        f"- command: `{command}`\n- measured: {measured}\n\n```\n{tables}\n```\n"
    )


def machine() -> str:
    """Processor and versions.

    The threads are those of this process; a command that sets its own prints them.
    """
    found, packages = describe_machine(torch.device("cpu")), versions()
    named = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers"))
    return f"{found['cpu']}, {found['threads']} threads, Python {packages['python']}, {named}"


def write(name: str, text: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"written to {(RESULTS / f'{name}.md').relative_to(ROOT)}")


def last_measured(name: str) -> str:
    """The day in a check's file."""
    path = RESULTS / f"{name}.md"
    found = (
        re.search(r"^- measured: (\S+?),", path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else None
    )
    return found[1] if found else "not yet"


if __name__ == "__main__":
    main()
