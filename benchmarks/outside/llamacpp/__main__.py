"""Our GGUF files in llama.cpp beside our own chain decoder.

    make verify-llamacpp        or        python -m benchmarks.outside.llamacpp

Exports the demo backbone and eagle heads in float32, float16 and bfloat16 and a tiny Qwen3 with a draft vocabulary,
lets llama.cpp decode with and without the draft, and compares texts, drafted and accepted tokens, and the token ids
into which both split given texts. Any difference ends in an error.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import heads
from benchmarks.outside.chain import run_chain
from benchmarks.outside.environment import Environment
from benchmarks.outside.llamacpp.comparing import check_counts, check_texts, check_words, counts_of
from benchmarks.outside.llamacpp.pair import qwen3_of, taught_heads
from benchmarks.shared import ROOT, figures_table, held_out, parser_of, run_benchmark, say, wide_console
from heads.checkpoint.opening import open_backbone
from heads.export.exporting import export_heads
from heads.export.gguf.files import DTYPES
from heads.interface.token_heads import TokenHeads

BASE = "checkpoints/demo/base"
TRAINED = "checkpoints/demo/eagle"
ENGINE = Path(__file__).with_name("engine.py")
LLAMACPP = Environment(
    engine="llama.cpp",
    folder=ROOT / "build/llamacpp-env",
    packages=("xllamacpp==2026.10.11549",),  # llama.cpp with its server as a Python package
)
TEXTS = (
    "It's 2026-11-23: we'll see, they'd said; naïve café — 12,345.67 €!\n\n\n  Two  spaces,\ttabs\t\tand   ends  ",
    "def f(x: int) -> str:\r\n\treturn f'{x!r}'  # ünïcode 数学 और हिन्दी 🙂👍🏽\n\n    x = [1_000, 0xFF, .5e-3]\n"
    + " " * 40,
)
"""Texts on which tokenizers' splitting rules differ: contractions, runs of spaces, numbers, scripts."""


def main() -> None:
    parser = parser_of("benchmarks.outside.llamacpp", __doc__)
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="new tokens for each prompt")
    options = parser.parse_args()
    opened = open_backbone(str(ROOT / BASE), dtype="float32")
    opened.model.to("cpu")
    prompts = held_out(opened, options.prompts, options.prompt_tokens)
    texts = [*TEXTS, *(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("heads/decoding/*.py")))]
    LLAMACPP.install()
    console = wide_console()
    columns = ("texts the same", "parted at a tie", "passes", "drafted", "accepted", "both count")
    table = figures_table(None, "backbone and heads", "files", *columns, left=2)
    ids = [opened.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    for name, token_heads, dtypes in pairs(opened.model, prompts, options.new_tokens):
        for dtype in dtypes:
            with tempfile.TemporaryDirectory() as place:
                pair = Pair(token_heads=token_heads, prompts=prompts, new_tokens=options.new_tokens, dtype=dtype)
                plain, drafted, said = pair.run(Path(place), texts)
                compared = check_words(texts, plain["texts"], ids)
                table.add_row(name, dtype, *pair.compare(f"{name}, {dtype}", plain, drafted))
            say(console, f"{name}, {dtype}: {said}.\n")
    say(
        console,
        f"llama.cpp in xllamacpp {plain['version']}, CPU, caches in float32, greedy; {len(prompts)} held-out prompts "
        f"of {options.prompt_tokens} tokens, {options.new_tokens} new tokens each. Both split {len(texts)} texts into "
        f"the same {compared} tokens.\n",
    )
    console.print(table)
    say(
        console,
        "Each text is llama.cpp's own without a draft, and our plain generation's in float32; drafted and accepted "
        "tokens are those of our chain on the same prompt, with drafts cut before the last token asked for, as "
        "llama.cpp cuts them. Counts are compared where no text parts at a tie: a place where both tokens' scores lie "
        "within rounding of the best, in the dtype of the files, to which llama.cpp rounds what it multiplies.",
    )


def pairs(base: Any, prompts: list[Any], new_tokens: int) -> Iterator[tuple[str, TokenHeads, tuple[str, ...]]]:
    """Name, heads on their backbone, and the dtypes of files that are run."""
    yield "demo, eagle with random weights", random_heads(base), ("f32",)
    yield "demo, eagle", heads.load(ROOT / TRAINED, base), ("f32", "f16", "bf16")
    qwen3 = qwen3_of(base, str(ROOT / BASE))
    yield "Qwen3, eagle with a draft vocabulary", taught_heads(qwen3, prompts, new_tokens), ("f32",)


def random_heads(model: Any) -> TokenHeads:
    """Heads with random weights; their drafts are seldom accepted, and are compared like others."""
    token_heads = heads.create("eagle", model, num_heads=4).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return token_heads


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Heads on their backbone, as files of one dtype.

    Attributes:
        prompts: each (1, T).
        new_tokens: for each prompt.
        dtype: of the files' matrices.
    """

    token_heads: TokenHeads
    prompts: list[Any]
    new_tokens: int
    dtype: str

    def run(self, place: Path, texts: list[str]) -> tuple[dict[str, Any], dict[str, Any], str]:
        """What llama.cpp answers without and with the draft, and what the export said."""
        folder = place / "out"
        said = export_heads(self.token_heads, "gguf", folder, dtype=self.dtype, tokenizer=str(ROOT / BASE))
        job = {
            "backbone": str(folder / "backbone.gguf"),
            "depth": self.token_heads.num_heads,
            "prompts": [prompt_1T[0].tolist() for prompt_1T in self.prompts],
            "new_tokens": self.new_tokens,
        }
        plain = LLAMACPP.run_job(ENGINE, folder, "plain", job | {"draft": None, "texts": texts})
        drafted = LLAMACPP.run_job(ENGINE, folder, "draft", job | {"draft": str(folder / "draft.gguf"), "texts": []})
        return plain, drafted, said

    def compare(self, name: str, plain: dict[str, Any], drafted: dict[str, Any]) -> list[str]:
        """The cells of one row, once everything is equal."""
        depth, model = self.token_heads.num_heads, self.token_heads.backbone.model
        same, passes, totals = 0, 0, {"drafted": 0, "accepted": 0}
        for i, (prompt_1T, alone, row) in enumerate(zip(self.prompts, plain["rows"], drafted["rows"], strict=True)):
            where = f"{name}, prompt {i + 1}"
            chain = run_chain(self.token_heads, prompt_1T, self.new_tokens, depth)
            texts = {"of ours": chain.text[: self.new_tokens], "without a draft": alone["text"]}
            texts["with a draft"] = row["text"]
            if not check_texts(where, model, prompt_1T, texts, DTYPES[self.dtype]):
                continue
            counts = counts_of(chain, depth, self.new_tokens)
            check_counts(where, row, counts)
            same, passes = same + 1, passes + len(chain.drafts)
            totals = {key: count + counts[key] for key, count in totals.items()}
        cells = [same, len(self.prompts) - same, passes, totals["drafted"], totals["accepted"]]
        return [*map(str, cells), "yes" if same else "–"]


if __name__ == "__main__":
    run_benchmark(main)
