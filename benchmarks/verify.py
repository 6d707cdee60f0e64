"""The slow checks: run a benchmark and write its output, with command, machine and commit, to benchmarks/results/.

    make verify        or        python -m benchmarks.verify [CHECK …]
    python -m benchmarks.verify --quick decoding     # a shorter form of the check
    python -m benchmarks.verify --list        # all checks, with the day of their results
    python -m benchmarks.verify --stale       # results that are older than what they measure, and why

transformers_tests is skipped unless HEADWAY_TRANSFORMERS=FOLDER names a checkout of
github.com/huggingface/transformers at the installed version, and outside unless HEADWAY_HARNESSES=FOLDER holds
checkouts of github.com/hemingkx/Spec-Bench and github.com/NVIDIA/Model-Optimizer; servers needs HEADWAY_SERVERS=FOLDER
with checkouts of github.com/huggingface/text-generation-inference, predibase/lorax and NVIDIA/TensorRT-LLM.
ngram_stores leaves out DuckDB, Polars and infini-gram unless HEADWAY_STORES names a Python that has them, and
training_peers Model-Optimizer unless HEADWAY_MODELOPT names one with nvidia-modelopt. No other program writes into
benchmarks/results/. A new benchmark adds its command to `CHECKS`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.shared import describe_cpu
from benchmarks.stale import found_in, head, why_stale
from heads.evaluation.tables import versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
PLACES = re.compile(rf"{re.escape(str(ROOT))}/|{re.escape(tempfile.gettempdir())}/tmp\w+/")
"""Folders of the machine: the repository's, and temporary ones. A file is named from there on."""
PROGRESS = re.compile(r"it/s\]|s/it\]|examples/s\]|━|╸|real_accelerator\.py")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One command and what its tables show.

    Attributes:
        command: as typed; variables of the environment may stand before the program, as in a shell.
        quick: arguments of a shorter form, added to the command.
        measures: files and folders beside the benchmark's own module; a result is stale once one of them has changed.
        needs: an environment variable that names files outside the repository; without it the check is skipped.
        folder, made_by: a folder that the command reads, and the benchmark that trains it where it is missing.
    """

    command: str
    shows: str
    quick: str = ""
    measures: tuple[str, ...] = ("checkpoints/demo",)
    needs: str = ""
    folder: str = ""
    made_by: str = ""

    def typed(self, *, quick: bool) -> str:
        """The command as a user types it."""
        return f"{self.command} {self.quick}" if quick and self.quick else self.command


LOSS = tuple(f"train/objective/{name}.py" for name in ("chunks", "losses", "soft_targets", "targets", "unembedding"))
STEP = (*LOSS, "train/objective/model.py", "train/loop/trainer.py", "train/loop/optimizer_groups.py")
"""What a training step runs: the loss, the model around it and the Trainer."""
PRICED = ("checkpoints/demo", "heads/products/packed.py")
"""What the demo at a larger model's price is made of."""
HALF = ("heads/products/half.py", "heads/products/half_kernel.cpp", "heads/products/kernels.py")
"""And on a processor that does not multiply bfloat16."""
AVX2 = "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2"
MX = ("heads/quantization", "heads/products/kernels.py")
CHECKS = {
    "decoding": Check(
        command="python -m benchmarks.speed.decoding --picture docs/pictures/decoding_speed.png",
        shows="shipped heads alone, lookup without heads, and both, beside plain generate: greedy, with a repetition "
        "penalty and sampled; what lossy decoding costs; where each millisecond goes, headlines and targets; settings "
        "that an earlier call finished are kept",
        quick="--quick",
    ),
    "pass_costs": Check(
        command="python -m benchmarks.speed.pass_costs --compile",
        shows="a pass of 1 to 64 nodes after 512 to 8k tokens in plain steps, and what tokens per pass are worth",
        measures=("heads/backbone/compiling", "heads/backbone/model.py"),
    ),
    "frozen_graphs": Check(
        command="python -m benchmarks.speed.frozen_graphs --dtypes bfloat16",
        quick="--rounds 3",
        shows="a pass of 8 rows at the price of 0.16 billion bfloat16 weights: plain, packed, compiled, and compiled "
        "with weights as constants of the graph; seconds of its first call, and whether edited weights are noticed",
        measures=("heads/products/packed.py", *HALF, "heads/backbone/compiling"),
    ),
    "compiled_parts": Check(
        command="python -m benchmarks.speed.compiled_parts",
        quick="--rounds 3",
        shows="passes of 64 nodes and drafts of grounded heads, eager and compiled: milliseconds of matrix products, "
        "of attention and of the rest, and how many operators are called",
        measures=("checkpoints/demo/grounded", "heads/backbone/compiling", "heads/decoding/proposers"),
    ),
    "hybrids": Check(
        command="python -m benchmarks.speed.hybrids",
        quick="--quick",
        shows="hybrid backbones: text beside plain generation's for nine architectures and every family of heads, and "
        "a pass level by level beside replay and beside a tree's paths as rows",
        measures=("heads/backbone",),
    ),
    "real_costs": Check(
        command="python -m benchmarks.speed.real_costs --shapes 0.16B --dtypes bfloat16 --groups 20 --repeats 3 "
        "--sampled",
        quick="--quick",
        shows="the demo's text and acceptance at the price of a model of 0.16 billion weights in bfloat16, for "
        "processors that multiply it: passes of 1 to 64 nodes; heads alone, lookup without heads, both, and "
        "assistant_model beside plain generate, greedy with a penalty and sampled; the share of tokens per pass that "
        "becomes speed; rows that an earlier call finished are kept",
        measures=PRICED,
    ),
    "real_costs_avx2": Check(
        command=f"{AVX2} python -m benchmarks.speed.real_costs --shapes 0.16B --dtypes float32 bfloat16 --groups 4",
        quick="--quick",
        shows="the same in both dtypes for 0.16 billion weights, for processors that do not multiply bfloat16: PyTorch "
        "and its libraries use no instructions beyond AVX2, whatever the processor has",
        measures=(*PRICED, *HALF),
    ),
    "real_costs_batches": Check(
        command="python -m benchmarks.speed.real_costs --shapes 0.16B --dtypes bfloat16 --batches 4 16 --groups 4",
        quick="--quick",
        shows="the same for 4 and 16 texts at once",
        measures=PRICED,
    ),
    "real_costs_compiled": Check(
        command="python -m benchmarks.speed.real_costs --shapes 0.16B --dtypes bfloat16 --groups 4 --repeats 3 "
        "--compile --no-tuned",
        quick="--quick",
        shows="the same with plain generate and heads alone compiled too, on four prompts",
        measures=PRICED,
    ),
    "real_costs_large": Check(
        command="python -m benchmarks.speed.real_costs --shapes 0.83B 1.2B --dtypes bfloat16 --batches 1 4 --groups 4",
        quick="--quick",
        shows="the same at the price of models of 0.83 and 1.2 billion weights, for single texts and 4 at once",
        measures=PRICED,
    ),
    "real_costs_7b": Check(
        command="python -m benchmarks.speed.real_costs --shapes 7B --dtypes bfloat16 --groups 4 --no-tuned --rounds 3",
        quick="--new-tokens 8 --rounds 1",
        shows="the same at the price of a 7B model, where 18 GiB of memory are free; packed only where packing copies "
        "no weights (processors without bfloat16 instructions) or the copy, 13 GiB, fits beside them",
        measures=(*PRICED, *HALF),
    ),
    "trees": Check(
        command="python -m benchmarks.speed.trees --prompts 20",
        shows="trees fitted to heads and machine: speed over plain generation as `headway tune-tree` predicts "
        "and as measured on other prompts, both halves in turn, beside the aim of 10 %, and the prediction for a "
        "batch of 16",
        measures=("checkpoints/demo", "heads/tuning"),
    ),
    "compare": Check(
        command="python -m benchmarks.speed.compare",
        quick="--quick",
        shows="the shipped heads on the same questions by category: tokens per pass and speed over plain generate with "
        "paired intervals, acceptance by depth and position, FLOPs per token; each against medusa; rows of an earlier "
        "call are kept",
        measures=("checkpoints/demo", "heads/evaluation/speed/flops.py"),
    ),
    "race": Check(
        command="headway race checkpoints/demo/medusa checkpoints/demo/grounded --lookup 0 --repetition-penalty 1.1 "
        "--prompt 'class Queue:' --svg docs/pictures/race.svg",
        shows="one prompt decoded by plain generation and by heads alone, of which docs/pictures/race.svg is recorded; "
        "decoding has the average over prompts",
        measures=("checkpoints/demo", "heads/cli/race"),
    ),
    "default_tree": Check(
        command="python -m benchmarks.speed.default_tree",
        quick="--prompts 4 --repeats 1",
        shows="static trees of several sizes and dynamic ones, without tuning: what the default tree was chosen from",
    ),
    "acceptance_rules": Check(
        command="python -m benchmarks.speed.acceptance_rules",
        quick="--seeds 1",
        shows="tokens per pass under the exact rule, modified rejection sampling and lossy typical acceptance, "
        "by tree and temperature, and the texts' quality (docs/decode.md)",
        measures=("checkpoints/demo", "heads/decoding/acceptance"),
    ),
    "batches": Check(
        command="python -m benchmarks.speed.batches --picture docs/pictures/batches.png",
        quick="--batches 1 4 16 --new-tokens 48",
        shows="tokens per second at batch sizes 1 to 16, with ragged prompts: plain generate, "
        "heads alone with several node budgets, lookup without heads, and heads with lookup",
        measures=("checkpoints/demo", "heads/decoding/defaults.py"),
    ),
    "training": Check(
        command="python -m benchmarks.training speed memory step",
        shows="a step beside a plain loop and a floor, peak memory, the share of a step that is overhead",
        measures=STEP,
    ),
    "training_peers": Check(
        command="python -m benchmarks.training.training_peers",
        quick="--rounds 1 --vocab 2000",
        shows="a step beside Medusa's and Hydra's losses, restated, and Model-Optimizer's own medusa: "
        "losses, time, memory",
        measures=("train/objective",),
    ),
    "training_options": Check(
        command="python -m benchmarks.training stored scaling chunks half",
        shows="stored hidden states, two processes, chunk sizes of the loss, a step with trainer.bf16",
        measures=(*STEP, "train/data/hidden_states.py"),
    ),
    "training_masks": Check(
        command="python -m benchmarks.training attention",
        shows="a block of 2,048 tokens with 1, 8 and 32 documents: plain causal attention, a dense mask, and document "
        "by document as runs train; the states of the two that keep documents apart are equal",
        measures=("train/objective/document_attention.py",),
    ),
    "training_compile": Check(
        command="python -m benchmarks.training compile",
        shows="decoder layers as they are and compiled, at two widths",
        measures=("train/engine/compiling.py", "train/objective/model.py"),
    ),
    "loss_costs": Check(
        command="python -m benchmarks.training.loss_costs",
        shows="the loss with a teacher's distribution in its kinds, beside hard labels (docs/train.md)",
        measures=LOSS,
    ),
    "draft_vocabulary": Check(
        command="python -m benchmarks.speed.draft_vocabulary",
        shows="heads that score 8k to 32k of 128k tokens: parameters, drafting and loss beside their limits; "
        "and tokens per pass of the shipped demo heads cut to 1,024, 512 and 256 of 2,048 tokens",
        measures=("checkpoints/demo/grounded", "train/objective/chunks.py"),
    ),
    "engines": Check(
        command="python -m benchmarks.training.engines",
        shows="the same losses, weights and bytes under DDP, FSDP2 and ZeRO-1/2/3 as in one process, on two and "
        "four processes, and runs that one engine begins and another ends",
        measures=(*STEP, "train/engine", "train/checkpoint"),
    ),
    "plan": Check(
        command="python -m benchmarks.training.plan",
        shows="tensor memory as `python -m train plan` predicts it beside the measured peak of real training steps",
        measures=(*STEP, *(f"train/plan/{name}.py" for name in ("live_tensors", "memory", "shapes", "step"))),
    ),
    "dynamo_counts": Check(
        command="python -m benchmarks.paper.dynamo_counts",
        shows="parameters of all sizes and variants of the paper beside the paper's own figures",
        measures=(),
    ),
    "dynamo_ablation": Check(
        command="python -m benchmarks.paper.dynamo_ablation",
        shows="the rows of table 9 trained on the demo backbone; rows that an earlier call finished are reused",
        measures=("checkpoints/demo/base",),
    ),
    "grounded_ablation": Check(
        command="python -m benchmarks.paper.grounded_ablation --steps 100 --prompts 16 --rounds 3 --picture "
        "docs/pictures/grounded_ablation.png",
        shows="the rows of the grounded paper's figures 2 and 5 to 8 and later options, trained on the demo "
        "backbone for 100 steps, and the target; rows that an earlier call finished are reused",
        measures=("checkpoints/demo/base",),
    ),
    "grounded_figure_2": Check(
        command="python -m benchmarks.paper.grounded_ablation --rows medusa grounded gru soft medusa_soft eagle_soft "
        "--steps 600 --prompts 16 --rounds 0",
        quick="--steps 2 --eval-blocks 4 --prompts 2 --new-tokens 16 --out checkpoints/runs/grounded_quick",
        shows="figure 2 of the grounded paper after 600 steps, the families with soft labels too, each with its own "
        "tree and on one tree",
        measures=("checkpoints/demo/base",),
    ),
    "grounded_ablation_seeds": Check(
        command="python -m benchmarks.paper.grounded_ablation --rows medusa grounded gru --steps 100 --prompts 16 "
        "--rounds 0 --seeds 3",
        shows="gru beside grounded and medusa over three trainings of 100 steps: means and deviations; finished rows "
        "are reused",
        measures=("checkpoints/demo/base",),
    ),
    "dynamo_decoding": Check(
        command="python -m benchmarks.paper.dynamo_decoding",
        shows="the parts of dynamic decoding and the readings of its thresholds by likelihood at equal tokens per pass "
        "(table 8), and its speed at the paper's settings; texts that an earlier call scored are reused",
        measures=("checkpoints/demo/dynamo",),
    ),
    "dynamo_perplexity": Check(
        command="headway evaluate checkpoints/demo/dynamo --metrics perplexity,accuracy --blocks 32 "
        "--cooccurrence checkpoints/runs/demo-ngrams --thresholds 0,0.25,0.5,0.75,1 --picture "
        "docs/pictures/dynamo_perplexity.png --heatmaps docs/pictures/dynamo_joint.png "
        "--prompt '    def __init__(self, name'",
        shows="PPL_n, PPL_1:n and PPL_d against tokens per pass; dynamo_speed counts its table of n-grams",
        measures=("checkpoints/demo/dynamo",),
    ),
    "dynamo_flops": Check(
        command="python -m benchmarks.paper.dynamo_flops",
        quick="--prompts 3 --new-tokens 16",
        shows="FLOPs per generated token (DynaMo's table 3): plain, a draft model, trees, dynamic decoding by ε_b",
        measures=("checkpoints/demo/dynamo", "checkpoints/demo/draft", "heads/evaluation/speed/flops.py"),
    ),
    "dynamo_speed": Check(
        command="python -m benchmarks.speed.dynamo",
        quick="--new-tokens 32",
        shows="DynaMo on the backbone that was trained with its heads: plain, lossless trees, lossy dynamic decoding",
        measures=("checkpoints/demo/dynamo",),
    ),
    "dynamo_first_token": Check(
        command="python -m benchmarks.paper.dynamo_first_token",
        shows="PPL₁ of the demo backbone trained with heads, and as long without",
        measures=("checkpoints/demo/dynamo", "checkpoints/demo/base"),
    ),
    "joint_training": Check(
        command="python -m benchmarks.paper.joint_training",
        shows="tokens per pass and the backbone's PPL₁ before and after: heads alone, with an adapter on the "
        "backbone, warm-in, self-distillation (Medusa-2); rows that an earlier call finished are reused",
        measures=("checkpoints/demo/base",),
    ),
    "superposed": Check(
        command="python -m benchmarks.paper.superposed --pictures docs/pictures",
        quick="--quick",
        shows="superposed decoding beside nucleus sampling, beam search, greedy decoding and n-grams alone: perplexity "
        "under two judges by k, prefix and length, exact match, rankings, repetition, cosines, long texts, and which "
        "of the paper's claims hold; parts that an earlier call finished are kept",
        measures=("checkpoints/demo/base", "checkpoints/demo/draft", "heads/decoding/superposed", "heads/ngrams"),
    ),
    "sinkhorn": Check(
        command="python -m benchmarks.paper.sinkhorn",
        shows="marginals pulled back to the heads' own (ε₂ > 0 of equation 5) against a weaker mask",
        measures=("checkpoints/demo/dynamo", "heads/decoding/dynamo"),
    ),
    "dynamo_sentences": Check(
        command="python -m benchmarks.paper.dynamo_sentences --picture docs/pictures/dynamo_sentences.png",
        shows="the sentence-completion benchmark, ten seeds and ε_b from 0 to 1 by 0.02: wins, ties and "
        "losses against plain generation of the backbone before training by ε_b, by another model's log-likelihood, "
        "same-quality speed-up in seconds that are measured in turn, and the ablations of table 8",
        quick="--quick",
    ),
    "dynamo_sizes": Check(
        command="python -m benchmarks.paper.dynamo_sizes --picture docs/pictures/dynamo_sizes.png",
        quick="--steps 3 --heads-steps 3 --seeds 1 --step 0.5 --tokens 8 --out checkpoints/runs/dynamo-sizes-quick",
        shows="DynaMo on three backbones of one recipe: scores and speed-up of the same quality by size; trains "
        "for half an hour, and a repeated call goes on",
        measures=("configs/demo/base.yaml", "configs/demo/dynamo.yaml"),
    ),
    "ngrams": Check(
        command="python -m benchmarks.speed.ngrams",
        shows="milliseconds of a mask over 10 M trigrams, its share of a pass, and seconds to count 10 M tokens",
        measures=("heads/ngrams",),
    ),
    "mx": Check(
        command="python -m benchmarks.speed.mx --picture docs/pictures/mx_speed.png",
        quick="--quick",
        shows="products with microscaling weights: bytes, bandwidth and the ratio to bfloat16 and float32 at 1 to 64 "
        "rows for layers of 1k to 8k, beside the bandwidth of the machine",
        measures=MX,
    ),
    "mx_speculation": Check(
        command="python -m benchmarks.speed.real_costs.microscaling --picture docs/pictures/mx_speculation.png",
        quick="--quick",
        shows="tokens a second of plain generation, a draft model with K = 7 and heads on 16-bit, float32, MXFP6 and "
        "MXFP4 weights of the demo at the price of a backbone 4,096 wide, batch 1",
        measures=MX,
    ),
    "ngram_stores": Check(
        command="python -m benchmarks.speed.ngram_stores --picture docs/pictures/ngram_stores.png",
        shows="6-grams in our table, in dictionaries, DuckDB, Polars and infini-gram: seconds, memory and disk of "
        "building, questions a second; the curve to 200 M tokens",
        quick="--tokens 500000 --curve 1000000 2000000",
        measures=("heads/ngrams",),
    ),
    "mx_quality": Check(
        command="headway quantize checkpoints/demo/base --heads checkpoints/demo/grounded",
        quick="--blocks 16 --num-prompts 4 --max-new-tokens 32",
        shows="error of the weights, perplexity, and tokens per pass of the grounded heads alone on the demo backbone, "
        "before and after, for every format of microscaling weights",
        measures=("checkpoints/demo", *MX),
    ),
    "superposed_speed": Check(
        command="python -m benchmarks.speed.superposed --picture docs/pictures/superposed_speed.png",
        shows="seconds for k drafts by superposed decoding, beside nucleus sampling one after another and in a batch, "
        "and the share of n-gram look-ups",
        quick="--k 1 3 8 --prefixes 4",
        measures=("checkpoints/demo/base", "heads/decoding/superposed", "heads/ngrams"),
    ),
    "superposed_speed_wide": Check(
        command="python -m benchmarks.speed.superposed --shape 0.16B --k 3 8 --prefixes 4",
        shows="the same at the price of a backbone of 0.16B parameters, where a pass costs more than what is around it",
        quick="--prefixes 1 --repeats 1",
        measures=("checkpoints/demo/base", "heads/decoding/superposed", "heads/ngrams"),
    ),
    "resume": Check(
        command="python -m benchmarks.training.resume",
        shows="a run killed at random moments, in saves too, beside one that never stopped, in one process and in two, "
        "of which one is killed: weights bit for bit, and all lines of metrics.jsonl",
        measures=("train/checkpoint", "train/loop/trainer.py", "train/loop/batches.py"),
    ),
    "gpu_commands": Check(
        command="python -m benchmarks.gpu --tiny --out checkpoints/runs/gpu-tiny",
        shows="the commands of `make gpu` with tiny shapes on a CPU: they work; their figures mean nothing",
        measures=(),
    ),
    "transformers_tests": Check(
        command="python -m benchmarks.outside.transformers_tests",
        shows="the generation tests of transformers, over all its architectures, decoded by each family and by a draft "
        "model: passed, refused in a sentence, failed",
        measures=("heads/backbone", "heads/decoding", "heads/interface"),
        needs="HEADWAY_TRANSFORMERS",
    ),
    "transformers_tests_of_hybrids": Check(
        command="python -m benchmarks.outside.transformers_tests --models qwen3_next qwen3_5 qwen3_5_moe nemotron_h "
        "granitemoehybrid falcon_h1 olmo_hybrid lfm2 lfm2_moe bamba jamba",
        shows="the same for hybrid architectures alone, with the mark taken away by which transformers skips them",
        measures=("heads/backbone", "heads/decoding", "heads/interface"),
        needs="HEADWAY_TRANSFORMERS",
    ),
    "downstream": Check(
        command="headway evaluate checkpoints/demo/dynamo --suite lm-eval --tasks python_next_line,python_write_line "
        "--task-folder benchmarks/tasks --without-heads checkpoints/runs/demo-base-longer/last --limit 200",
        quick="--limit 20",
        shows="tables 1 and 10 on the demo through lm-evaluation-harness: the backbone, trained further without heads "
        "(a run of dynamo_first_token), and trained with heads, whose texts equal plain greedy",
        folder="checkpoints/runs/demo-base-longer/last",
        made_by="python -m benchmarks.paper.dynamo_first_token",
        measures=("checkpoints/demo/dynamo", "benchmarks/tasks", "heads/evaluation/tasks"),
    ),
    "outside": Check(
        command="python -m benchmarks.outside.harnesses",
        quick="--prompts 4 --new-tokens 48",
        shows="Spec-Bench's and Model-Optimizer's own loops and metrics on the demo, with our adapters: tokens, passes "
        "and tokens per pass equal to ours, and what each harness counts in its own way",
        measures=("heads/decoding", "checkpoints/demo/grounded"),
        needs="HEADWAY_HARNESSES",
    ),
    "servers": Check(
        command="python -m benchmarks.outside.servers",
        shows="medusa and mlp_speculator folders in the code by which TGI, LoRAX and TensorRT-LLM load heads, executed "
        "on a CPU: the class that each chooses, and its logits beside ours",
        measures=(
            "heads/export/formats/medusa.py",
            "heads/export/formats/medusa_servers.py",
            "heads/export/formats/tensorrt_llm.py",
            "heads/export/formats/mlp_speculator.py",
            "heads/families/medusa.py",
            "heads/families/mlp_speculator.py",
        ),
        needs="HEADWAY_SERVERS",
    ),
    "vllm": Check(
        command="python -m benchmarks.outside.vllm",
        quick="--prompts 4 --new-tokens 32",
        shows="exported heads in vLLM on a CPU: the same text with and without them, and the ids drafted at every pass "
        "and the accepted counts equal to our own chain decoder's (make verify-vllm; installs vLLM under build/)",
        measures=("checkpoints/demo", "heads/export", "serving"),
    ),
    "llamacpp": Check(
        command="python -m benchmarks.outside.llamacpp",
        quick="--prompts 2 --new-tokens 32",
        shows="backbones (Llama, Qwen3) and eagle heads as GGUF in llama.cpp on a CPU, files in float32, float16 and "
        "bfloat16: the same text with and without the draft and as ours, the same drafted and accepted counts, texts "
        "split into the same tokens (make verify-llamacpp; installs xllamacpp under build/)",
        measures=(
            "checkpoints/demo/base",
            "checkpoints/demo/eagle",
            "heads/export/gguf",
            "heads/export/formats/gguf.py",
            "heads/export/eagle_draft.py",
            "heads/families/eagle.py",
        ),
    ),
    "base_recipe": Check(
        command="accelerate launch train.py --config configs/demo/base.yaml --overwrite true",
        shows="the demo backbone's recipe learns from random weights: eval_backbone_loss falls",
        measures=("configs/demo/base.yaml",),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"what to run, by default all: {', '.join(CHECKS)}")
    parser.add_argument("--list", action="store_true", help="print each check with the day of its results")
    parser.add_argument("--quick", action="store_true", help="run the shorter form of checks that have one")
    parser.add_argument("--stale", action="store_true", help="print results that are older than what they measure")
    options = parser.parse_args()
    if unknown := set(options.checks) - set(CHECKS):
        parser.error(f"unknown check {', '.join(sorted(unknown))}; allowed are {', '.join(CHECKS)}")
    if options.list:
        for name, check in CHECKS.items():
            print(f"{name:25} {last_measured(name):12} {check.command}\n{'':38} {check.shows}")
        return
    if options.stale:
        for name in options.checks or CHECKS:
            if reason := stale(name):
                print(f"{name:25} {last_measured(name):12} {reason}")
        return
    for name in options.checks or CHECKS:
        if (needed := CHECKS[name].needs) and not os.environ.get(needed):
            print(f"{name} is skipped: it needs {needed} (see --help)")
            continue
        write(name, run(name, quick=options.quick))  # immediately: a later check may fail


def run(name: str, *, quick: bool = False) -> str:
    """Run a check and return the text of its file; its output is printed too.

    Raises:
        SystemExit: the command failed.
    """
    check = CHECKS[name]
    typed = check.typed(quick=quick)
    if check.folder and not (ROOT / check.folder).is_dir():
        print(f"{name} reads {check.folder}, which is missing; `{check.made_by}` trains it first", flush=True)
        output_of(name, check.made_by)
    print(f"== {name}: {typed}", flush=True)
    commit = head()  # a commit that is made meanwhile was not measured
    started = time.perf_counter()
    output = output_of(name, typed)
    print(output)
    minutes = (time.perf_counter() - started) / 60
    day = datetime.now(tz=UTC).date().isoformat()
    return as_markdown(name, typed, f"{day}, {minutes:.1f} minutes, {machine_of(name, typed)}, commit {commit}", output)


def machine_of(name: str, typed: str) -> str:
    """`machine` as a command sees it, whose variables may hold libraries to older instructions."""
    variables = variables_of(typed)
    asked = "python -c 'from benchmarks.verify import machine; print(machine())'"
    return output_of(name, " ".join([*variables, asked])).strip() if variables else machine()


def variables_of(typed: str) -> list[str]:
    """The variables that stand before a command's program.

    >>> variables_of("A=1 B_2=x python -m y C=3")
    ['A=1', 'B_2=x']
    """
    return list(itertools.takewhile(lambda word: re.match(r"[A-Z_0-9]+=", word), shlex.split(typed)))


def output_of(name: str, typed: str) -> str:
    """What a command prints, run with the programs of this environment, whatever the shell would find.

    Raises:
        SystemExit: it failed.
    """
    variables = variables_of(typed)
    program, *arguments = shlex.split(typed)[len(variables) :]
    command = [str(Path(sys.executable).parent / program), *arguments]
    environment = os.environ | dict(variable.split("=", 1) for variable in variables)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout)
        sys.exit(f"{name}: `{typed}` failed with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def as_markdown(name: str, command: str, measured: str, output: str) -> str:
    """The file of one check.

    Args:
        command: the command that was measured, as typed.
        measured: day, minutes, machine, versions and commit, in this order.
        output: the command's output, from which colours, progress bars and the machine's folders are removed.
    """
    shown = PLACES.sub("", ANSI.sub("", output))
    lines = [line.rstrip() for line in shown.splitlines() if not PROGRESS.search(line)]
    tables = "\n".join(lines).strip()
    return (
        f"# {name}\nWritten by `python -m benchmarks.verify {name}`, never by hand. It shows {CHECKS[name].shows}.\n\n"
        f"- command: `{command}`\n- measured: {measured}\n\n```\n{tables}\n```\n"
    )


def machine() -> str:
    """Processor, threads of this process (a command that sets its own prints them), and versions."""
    packages = versions()
    named = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers"))
    return f"{describe_cpu()}, Python {packages['python']}, {named}"


def write(name: str, text: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"written to {(RESULTS / f'{name}.md').relative_to(ROOT)}")


def stale(name: str) -> str:
    """Why a check's results are older than what it measures; empty if they are not."""
    path, check = RESULTS / f"{name}.md", CHECKS[name]
    if not path.is_file():
        return "not yet measured"
    commands = [check.typed(quick=quick) for quick in (False, True)]
    module = re.search(r"-m ([\w.]+)", check.command)
    own = [f"{module[1].replace('.', '/')}*"] if module else []
    return why_stale(path.read_text(encoding="utf-8"), commands, own, check.measures)


def last_measured(name: str) -> str:
    """The day of a check's results."""
    path = RESULTS / f"{name}.md"
    day = found_in(path.read_text(encoding="utf-8"), r"^- measured: (\S+?),") if path.is_file() else None
    return day or "not yet"


if __name__ == "__main__":
    main()
