"""Savings and costs of a draft vocabulary: `python -m benchmarks.speed.draft_vocabulary`.

Two tables. (1) A vocabulary of 128k at a Llama-like width, with random weights and draft vocabularies of several sizes:
parameters of the heads' own unembeddings, milliseconds (ms) of drafting a tree of 16 nodes with four grounded heads,
and of forward and backward of the loss of one training step. Each time stands beside its limit: the time to read the
necessary bytes at this machine's bandwidth, or that of the products at the FLOP/s of a large one, whichever is longer.
Sizes are timed in turn; times are medians. (2) The shipped demo heads cut to the most frequent tokens of their training
set, without further training: tokens per pass on held-out prompts, greedy, heads alone, with the same tree for all.
"""
# R row, S scored token, D model width

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import heads
from benchmarks.shared import describe_cpu, figures_table, held_out, parser_of, run_benchmark, say, wide_console
from heads.backbone.model import Backbone
from heads.checkpoint.opening import open_heads
from heads.decoding.defaults import choose_tree
from heads.decoding.proposers.static_tree import TreeIndex, draft
from heads.decoding.trees.static import grow_tree
from heads.interface.token_heads import TokenHeads
from heads.tuning.timing import interleaved_medians
from train.config import read_config
from train.data.draft_tokens import count_tokens
from train.data.packing import build_datasets
from train.objective.losses import weighted_loss
from train.objective.targets import HeadRows

NUM_HEADS, NODES = 4, 16
PEAK_SIDE = 2048
PEAK_BYTES = 2**29


def main(arguments: Sequence[str] | None = None) -> None:
    options = build_parser().parse_args(arguments)
    console = wide_console()
    say(console, describe_cpu())
    if "speed" in options.parts:
        console.print(speed_table(options))
    if "acceptance" in options.parts:
        console.print(acceptance_table(options))


def build_parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.speed.draft_vocabulary", __doc__)
    parser.add_argument("parts", nargs="*", default=["speed", "acceptance"], help="speed, acceptance; both by default")
    parser.add_argument("--vocab", type=int, default=128_256, help="tokens of the large vocabulary")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens that are scored")
    parser.add_argument("--width", type=int, default=1024, help="model width")
    parser.add_argument("--rows", type=int, default=128, help="supervised rows of each head in the loss")
    parser.add_argument("--rounds", type=int, default=9, help="turns that each median is over")
    parser.add_argument("--heads", default="checkpoints/demo/grounded", help="heads that are cut")
    parser.add_argument("--config", default="configs/demo/grounded.yaml", help="run whose training set is counted")
    parser.add_argument("--kept", type=int, nargs="+", default=[1024, 512, 256], help="tokens that are kept")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts")
    parser.add_argument("--new-tokens", type=int, default=128, help="new tokens for each prompt")
    return parser


# --- memory and speed at a large vocabulary --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The largest bandwidth (bytes/s) and speed of matrix products (FLOP/s) measured on this machine."""

    bytes_per_second: float
    flops_per_second: float

    def limit(self, *, read: float, flops: float) -> float:
        """The least seconds for so many bytes and operations on this machine."""
        return max(read / self.bytes_per_second, flops / self.flops_per_second)


class Sized:
    """Four grounded heads with a draft vocabulary of one size, to be timed."""

    def __init__(self, backbone: Backbone, scored: int, rows: int) -> None:
        self.scored, self.rows = scored, rows
        ids = None if scored == backbone.vocab_size else torch.arange(scored)
        self.heads = heads.create("grounded", backbone, num_heads=NUM_HEADS, draft_tokens=ids)
        self.projections = [self.heads.projection(k) for k in range(1, NUM_HEADS + 1)]
        self.tree = grow_tree(NODES, NUM_HEADS)
        self.index = TreeIndex(self.tree, 1, "cpu", grounded=True)
        generator = torch.Generator().manual_seed(0)
        self.state = torch.randn(1, backbone.hidden_size, generator=generator)
        self.hidden = torch.randn(rows, backbone.hidden_size, generator=generator)
        self.labels = torch.randint(scored, (rows,), generator=generator)

    @property
    def parameters(self) -> int:
        return sum(projection.weight.numel() for projection in self.projections)

    @property
    def body_parameters(self) -> int:
        return sum(p.numel() for p in self.heads.parameters()) - self.parameters

    @torch.no_grad()
    def draft(self) -> Tensor:
        return draft(self.heads, self.projections, self.state, torch.tensor([5]), self.index)

    def loss(self) -> None:
        """The loss of a training step, with the same number of rows whether or not the labels are scored."""
        parts = [
            HeadRows(projection=projection, hidden_RD=self.hidden.clone().requires_grad_(), labels_R=self.labels)
            for projection in self.projections
        ]
        weighted_loss(parts)[0].backward()
        self.heads.zero_grad(set_to_none=True)

    def drafting_limit(self, machine: Machine) -> float:
        expanding = [len(level.parents) for level in self.tree.levels]
        products = sum(2 * m * p.weight.numel() for m, p in zip(expanding, self.projections, strict=False))
        return machine.limit(read=4.0 * (self.parameters + self.body_parameters), flops=products)

    def loss_limit(self, machine: Machine) -> float:
        """The least seconds of the loss: weights are read twice, their gradient is written once; three products."""
        return machine.limit(read=3 * 4.0 * self.parameters, flops=3 * 2.0 * self.rows * self.parameters)


def speed_table(options: argparse.Namespace) -> Table:
    """The table of times; sizes take turns, and drafting and loss are timed separately."""
    machine = measure_machine()
    backbone = Backbone(random_llama(options.vocab, options.width), check_projection=False)
    sizes = [Sized(backbone, scored, options.rows) for scored in [options.vocab, *options.sizes]]
    drafting = interleaved_medians({one.scored: timed(one.draft) for one in sizes}, options.rounds)
    losses = interleaved_medians({one.scored: timed(one.loss) for one in sizes}, max(3, options.rounds // 3))
    title = (
        f"\n{NUM_HEADS} grounded heads, vocabulary {options.vocab:,}, width {options.width}, float32; tree of {NODES} "
        f"nodes; loss over {options.rows} rows a head.\nLimits: {machine.bytes_per_second / 1e9:.1f} GB/s read, "
        f"{machine.flops_per_second / 1e9:.0f} GFLOP/s"
    )
    columns = ("scored", "unembeddings", "MiB", "drafting ms", "limit", "ratio", "loss ms", "limit", "ratio")
    table = figures_table(title, *columns, left=0, look=box.MARKDOWN)
    for one in sizes:
        table.add_row(
            f"{one.scored:,}",
            f"{one.parameters / 1e6:.1f} M",
            f"{4 * one.parameters / 2**20:,.0f}",
            f"{1000 * drafting[one.scored]:.1f}",
            f"{1000 * one.drafting_limit(machine):.1f}",
            f"{drafting[options.vocab] / drafting[one.scored]:.2f}",
            f"{1000 * losses[one.scored]:.0f}",
            f"{1000 * one.loss_limit(machine):.0f}",
            f"{losses[options.vocab] / losses[one.scored]:.2f}",
        )
    return table


def random_llama(vocab: int, width: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


def timed(function: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return run


def measure_machine() -> Machine:
    """The best of several reads of a large tensor, and of several products of large matrices."""
    large = torch.ones(PEAK_BYTES // 4)
    left, right = torch.ones(PEAK_SIDE, PEAK_SIDE), torch.ones(PEAK_SIDE, PEAK_SIDE)
    reading = min(timed(large.sum)() for _ in range(5))
    product = min(timed(lambda: left @ right)() for _ in range(5))
    return Machine(bytes_per_second=PEAK_BYTES / reading, flops_per_second=2 * PEAK_SIDE**3 / product)


# --- what is lost in acceptance --------------------------------------------------------------------------------------


def acceptance_table(options: argparse.Namespace) -> Table:
    """The table of the shipped heads, cut after training."""
    opened = open_heads([Path(options.heads)])
    ((name, full),) = opened.token_heads.items()
    config = read_config(["--config", options.config])
    vocab = full.backbone.vocab_size
    packed = build_datasets(config.data, opened.tokenizer, num_heads=full.num_heads, vocab_size=vocab)
    counts_V = count_tokens(packed.train, vocab)
    prompts = held_out(opened, options.prompts)
    plain = [write(opened.model, None, prompt, options.new_tokens) for prompt in prompts]
    tree = choose_tree(full, NODES)
    title = (
        f"\n{name}, cut after training; {len(prompts)} held-out prompts, {options.new_tokens} new tokens, greedy, "
        f"heads alone, {NODES} nodes; tokens counted: {int(counts_V.sum()):,}"
    )
    columns = ("scored", "of training tokens", "of the text", "tokens per pass", "of the full", "same text")
    table = figures_table(title, *columns, left=0, look=box.MARKDOWN)
    whole = None
    for count in dict.fromkeys([vocab, *options.kept]):  # the full heads first: the others are compared with them
        ids = heads.most_frequent_tokens(counts_V, count)
        few = full if count == vocab else heads.prune_vocabulary(full, ids)
        tokens, passes, same = decode_all(opened.model, few, tree, prompts, plain, options.new_tokens)
        whole = whole or tokens / passes
        text = torch.cat([one[0, prompt.shape[1] :] for one, prompt in zip(plain, prompts, strict=True)])
        table.add_row(
            f"{count:,}",
            f"{float(counts_V[ids].sum() / counts_V.sum()):.1%}",
            f"{float(torch.isin(text, ids).float().mean()):.1%}",
            f"{tokens / passes:.3f}",
            f"{tokens / passes / whole:.1%}",
            "yes" if same else "NO",
        )
    return table


def decode_all(
    model: Any, token_heads: TokenHeads, tree: Any, prompts: Sequence[Tensor], plain: Sequence[Tensor], new_tokens: int
) -> tuple[int, int, bool]:
    """Tokens and passes without the prompts' passes, and whether every text equals plain `generate`'s."""
    decoding = heads.TreeDecoding(token_heads, tree, lookup=0)
    tokens = passes = 0
    same = True
    for prompt_1T, wanted in zip(prompts, plain, strict=True):
        out = write(model, decoding, prompt_1T, new_tokens)
        tokens += out.stats.tokens - 1
        passes += out.stats.row_passes - 1
        same = same and torch.equal(out.sequences, wanted)
    return tokens, passes, same


def write(model: Any, decoding: Any, prompt_1T: Tensor, new_tokens: int) -> Any:
    """Plain `generate`'s sequences, or a decoding's whole output; an end token does not end a text."""
    return model.generate(
        prompt_1T,
        attention_mask=torch.ones_like(prompt_1T),
        custom_generate=decoding,
        do_sample=False,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        return_dict_in_generate=decoding is not None,
    )


if __name__ == "__main__":
    run_benchmark(main)
