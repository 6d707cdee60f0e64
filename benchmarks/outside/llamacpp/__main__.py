"""Our GGUF files in llama.cpp, in float32, beside our own chain decoder.

    make verify-llamacpp        or        python -m benchmarks.outside.llamacpp

Exports the demo backbone and eagle heads, lets llama.cpp decode with and without the draft, and compares texts, drafted
and accepted tokens, and the ids of texts. Whatever differs ends in an error.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

import heads
from benchmarks.outside.chain import run_chain
from benchmarks.outside.environment import Environment
from benchmarks.outside.llamacpp.comparing import check_counts, check_texts, check_words, counts_of
from benchmarks.shared import ROOT, figures_table, held_out, parser_of, run_benchmark, say, wide_console
from heads.checkpoint.opening import open_backbone
from heads.export.exporting import export_heads
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
"""Where rules of splitting differ: contractions, runs of spaces, numbers, scripts."""


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
    named = {
        "eagle, random weights": random_heads(opened.model),
        "eagle, trained": heads.load(ROOT / TRAINED, opened.model),
    }
    with tempfile.TemporaryDirectory() as place:
        job = {
            "prompts": [prompt_1T[0].tolist() for prompt_1T in prompts],
            "texts": texts,
            "new_tokens": options.new_tokens,
        }
        table = figures_table(
            None, "heads", "texts the same", "parted at a tie", "passes", "drafted", "accepted", "both count", left=1
        )
        for i, (name, token_heads) in enumerate(named.items()):
            folder = Path(place) / str(i)
            said = export_heads(token_heads, "gguf", folder, dtype="f32")
            job |= {"backbone": str(folder / "backbone.gguf"), "depth": token_heads.num_heads}
            plain = LLAMACPP.run_job(ENGINE, folder, "plain", job | {"draft": None})
            drafted = LLAMACPP.run_job(ENGINE, folder, "draft", job | {"draft": str(folder / "draft.gguf")})
            if i == 0:
                ids = [opened.tokenizer(text, add_special_tokens=False).input_ids for text in texts]
                compared = check_words(texts, plain["texts"], ids)
                say(
                    console,
                    f"llama.cpp in xllamacpp {plain['version']}, CPU, float32, greedy; {len(prompts)} held-out prompts "
                    f"of {options.prompt_tokens} tokens, {options.new_tokens} new tokens each; {said}. Both split "
                    f"{len(texts)} texts into the same {compared} tokens.\n",
                )
            table.add_row(name, *compare(token_heads, prompts, plain, drafted, options.new_tokens))
    console.print(table)
    say(
        console,
        "Each text is llama.cpp's own without a draft, and our plain generation's; drafted and accepted tokens are "
        "those of our chain on the same prompt, with drafts cut before the last token asked for, as llama.cpp cuts "
        "them. Counts are compared where no text parts at a tie.",
    )


def random_heads(model: Any) -> TokenHeads:
    """Their drafts are seldom accepted, and compared alike."""
    token_heads = heads.create("eagle", model, num_heads=4).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return token_heads


def compare(
    token_heads: TokenHeads, prompts: list[Any], plain: dict[str, Any], drafted: dict[str, Any], new_tokens: int
) -> list[str]:
    """The cells of one row, once everything is equal."""
    depth, model = token_heads.num_heads, token_heads.backbone.model
    same, passes, totals = 0, 0, {"drafted": 0, "accepted": 0}
    for i, (prompt_1T, alone, row) in enumerate(zip(prompts, plain["rows"], drafted["rows"], strict=True)):
        where = f"{token_heads.family}, prompt {i + 1}"
        chain = run_chain(token_heads, prompt_1T, new_tokens, depth)
        texts = {"of ours": chain.text[:new_tokens], "without a draft": alone["text"], "with a draft": row["text"]}
        if not check_texts(where, model, prompt_1T, texts):
            continue
        counts = counts_of(chain, depth, new_tokens)
        check_counts(where, row, counts)
        same, passes = same + 1, passes + len(chain.drafts)
        totals = {key: count + counts[key] for key, count in totals.items()}
    cells = [same, len(prompts) - same, passes, totals["drafted"], totals["accepted"]]
    return [*map(str, cells), "yes" if same else "–"]


if __name__ == "__main__":
    run_benchmark(main)
