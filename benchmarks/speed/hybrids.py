"""Hybrid backbones: is their text plain generation's, and what does a pass over drafted tokens cost?

    python -m benchmarks.speed.hybrids [--quick]

Equality: tiny random models of nine architectures with every family of heads, static and dynamic trees, greedy and
sampled, single prompts and a padded batch. Cost: passes of a hybrid shape and of one with attention alone, in plain
steps of the same backbone, for three ways to run recurrent layers over drafted tokens: level by level (what Headway
does); as a whole chain from a saved state, after which the next pass reads the accepted tokens again (replay); and a
tree's paths as rows of a batch. Replay reads up to R tokens more in each pass; its column for a chain of N leaves these
out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig, LlamaConfig, Qwen3_5TextConfig

import heads
from benchmarks.speed.pass_costs import filled_state, make_pass
from heads.backbone.model import Backbone
from heads.decoding.trees.static import Tree
from heads.evaluation.tables import describe_machine, versions
from heads.evaluation.throughput import rotated

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("medusa", "grounded", "gru", "eagle", "dynamo")
ARCHITECTURES = (
    "qwen3_next",
    "qwen3_5",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "olmo_hybrid",
    "lfm2",
    "jamba",
    "bamba",
)
WIDTH: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
SHAPES: dict[str, Callable[[], Any]] = {
    "attention (Llama)": lambda: LlamaConfig(**WIDTH),
    "gated delta rule, 3 of 4 layers (Qwen3.5)": lambda: Qwen3_5TextConfig(
        **WIDTH,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "Mamba-2, 3 of 4 layers (Granite)": lambda: GraniteMoeHybridConfig(
        **WIDTH,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_expand=2,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=1536,
    ),
}
CHAINS = (2, 4, 8, 16)
TREE = Tree([[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0], [2]])
PATHS = 4
"""Leaves of the tree, each a path of at most four nodes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two architectures and few repeats")
    options = parser.parse_args()
    print(describe_machine(torch.device("cpu")), versions(), sep="\n")
    compare_texts(ARCHITECTURES[:2] if options.quick else ARCHITECTURES)
    compare_costs(repeats=3 if options.quick else 9)


# --- text ------------------------------------------------------------------------------------------------------------


def compare_texts(names: Sequence[str]) -> None:
    """One line for each architecture; ends with an error where a text differs."""
    sys.path.insert(0, str(ROOT / "tests"))
    from tiny import left_padded, random_tokens, tiny_model  # the tests' tiny models

    one = random_tokens(1, 7, seed=3)
    requests = {
        "one prompt": (one, torch.ones_like(one)),
        "padded batch": left_padded([random_tokens(n, seed=n).tolist() for n in (7, 3, 12)]),
    }
    print("\n| architecture | dtype | texts compared | equal | tokens per pass |\n|---|---|---|---|---|")
    differing = 0
    for name in names:
        dtype = torch.float64 if name == "lfm2" else torch.float32
        model = tiny_model(name, attn="sdpa", dtype=dtype)
        found = [both for family in FAMILIES for both in texts_of(model, family, requests)]
        equal = sum(same for same, _ in found)
        differing += len(found) - equal
        per_pass = statistics.mean(tokens for _, tokens in found)
        print(f"| {name} | {str(dtype)[6:]} | {len(found)} | {equal} | {per_pass:.2f} |", flush=True)
    if differing:
        sys.exit(f"{differing} texts differ from plain generation's.")


def texts_of(model: Any, family: str, requests: dict[str, tuple[Tensor, Tensor]]) -> list[tuple[bool, float]]:
    """For each kind of tree and request, whether the text is plain generation's, and the tokens per pass."""
    torch.manual_seed(1)
    token_heads = heads.create(family, model, num_heads=3)
    found = []
    for kind, (tokens_BT, mask_BT) in requests.items():
        # Rows of a sampled batch take their random numbers in another order than plain generation's.
        samplings = ({"do_sample": False}, {"do_sample": True, "temperature": 0.8})[: 2 if len(tokens_BT) == 1 else 1]
        for asked in samplings:
            given = {**asked, "attention_mask": mask_BT, "max_new_tokens": 24}
            torch.manual_seed(5)
            plain = model.generate(tokens_BT, **given)
            for tree in (TREE, heads.DynamicTree(nodes=8))[: 2 if kind == "padded batch" else 1]:
                torch.manual_seed(5)
                decoding = heads.TreeDecoding(token_heads, tree)
                ours = model.generate(tokens_BT, **given, custom_generate=decoding, return_dict_in_generate=True)
                found.append((torch.equal(plain, ours.sequences), ours.stats.tokens_per_pass))
    return found


# --- cost ------------------------------------------------------------------------------------------------------------


def compare_costs(repeats: int) -> None:
    """Passes after 512 tokens, in float32 on one thread, in milliseconds and plain steps."""
    torch.set_num_threads(1)
    columns = ["plain step, ms", *(f"chain of {n}" for n in CHAINS), f"tree of {TREE.num_nodes}"]
    print(f"\nPasses in plain steps, level by level\n\n| shape | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    others = []
    for name, config in SHAPES.items():
        torch.manual_seed(0)
        backbone = Backbone(AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa").eval())
        seconds = timed(passes_of(backbone), repeats)
        step = seconds.pop("step")
        own = [f"{seconds[column] / step:.2f}" for column in columns[1:]]
        print(f"| {name} | {1000 * step:.1f} | {' | '.join(own)} |", flush=True)
        if backbone.recurrence is not None:
            kinds = [f"whole {n}" for n in CHAINS] + ["rows"]
            others.append(f"| {name} | " + " | ".join(f"{seconds[kind] / step:.2f}" for kind in kinds) + " |")
    columns = [*(f"replay, chain of {n}" for n in CHAINS), f"tree of {TREE.num_nodes} as {PATHS} rows"]
    print(f"\nThe other two ways\n\n| shape | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    print(*others, sep="\n")


def passes_of(backbone: Backbone) -> dict[str, Callable[[], Any]]:
    state = filled_state(backbone, 512)
    found: dict[str, Callable[[], Any]] = {"step": make_pass(backbone, state, 1)}
    for nodes in CHAINS:
        found[f"chain of {nodes}"] = over(backbone, state, Tree([[0] * n for n in range(1, nodes)]))
    found[f"tree of {TREE.num_nodes}"] = over(backbone, state, TREE)
    if backbone.recurrence is not None:
        for nodes in CHAINS:
            found[f"whole {nodes}"] = whole(backbone, state, 1, nodes)
        found["rows"] = whole(backbone, filled_state(backbone, 512, PATHS), PATHS, 1 + (TREE.depth or 0))
    return found


def over(backbone: Backbone, state: Any, tree: Tree) -> Callable[[], Any]:
    """A pass over a tree, which commits nothing."""
    tokens_1N = torch.randint(backbone.vocab_size, (1, tree.num_nodes))
    depth_N, sees_NN = tree.depth_tensor("cpu"), tree.sees_NN()

    @torch.no_grad()
    def run() -> Any:
        return backbone.logits(backbone.verify(state, tokens_1N, depth_N, sees_NN).final_BND)

    return run


def whole(backbone: Backbone, state: Any, rows: int, length: int) -> Callable[[], Any]:
    """A pass that reads whole rows from the committed state, whose copies it changes; it commits nothing."""
    tokens_BN = torch.randint(backbone.vocab_size, (rows, length))
    positions_BN = state.next_position_B[:, None] + torch.arange(length)
    sees_NN = torch.ones(length, length, dtype=torch.bool).tril()

    @torch.no_grad()
    def run() -> Any:
        mask = backbone._mask(state, positions_BN, sees_NN)
        with backbone._recurring(state.cache, (), None, torch.ones_like(tokens_BN, dtype=torch.bool)):
            return backbone.logits(backbone._pass(state, tokens_BN, positions_BN, mask, ()).final_BND)

    return run


def timed(passes: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each pass, timed in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for run in passes.values():
        run()
    for repeat in range(repeats):
        for name in rotated(list(passes), repeat):
            start = time.perf_counter()
            passes[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in seconds.items()}


if __name__ == "__main__":
    main()
