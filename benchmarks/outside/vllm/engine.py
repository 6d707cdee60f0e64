"""Run by build/vllm-env's Python, never imported: vLLM decodes prompts one after another, and its drafts are recorded.

    python -P engine.py JOB.json        reads model, speculative_config, prompts, new_tokens, out

Writes for each prompt the text, what was drafted after each pass, and what vLLM's own counters say.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

PROPOSERS = {
    "medusa": ("vllm.v1.spec_decode.medusa", "MedusaProposer"),
    "eagle": ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer"),
    "eagle3": ("vllm.v1.spec_decode.llm_base_proposer", "SpecDecodeBaseProposer"),
}
COUNTERS = {
    "passes": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "accepted_per_depth": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def watch(method: str) -> list[list[int]]:
    """A list to which the drafted ids of each pass are appended from now on."""
    module, name = PROPOSERS[method]
    proposer = getattr(importlib.import_module(module), name)
    propose, drafts = proposer.propose, list[list[int]]()

    def propose_and_keep(self: Any, *given: Any, **named: Any) -> Any:
        drafted = propose(self, *given, **named)
        drafts.append(drafted[0].tolist())
        return drafted

    proposer.propose = propose_and_keep
    return drafts


def counted(llm: Any) -> dict[str, Any]:
    found = {metric.name: getattr(metric, "value", getattr(metric, "values", None)) for metric in llm.get_metrics()}
    return {key: found.get(name) for key, name in COUNTERS.items()}


def main(job: dict[str, Any]) -> None:
    vllm = importlib.import_module("vllm")
    speculative = job["speculative_config"]
    drafts = watch(speculative["method"]) if speculative else []
    llm = vllm.LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative,
        max_model_len=512,
        max_num_seqs=len(job["prompts"]),
    )
    asked = vllm.SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True)
    rows: list[dict[str, Any]] = []
    for prompt in job["prompts"]:
        drafts.clear()  # those of start-up, and of the text before
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        rows.append({"text": list(answer.outputs[0].token_ids), "drafts": [list(one) for one in drafts]})
    counts = counted(llm) if speculative else None
    together = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], asked, use_tqdm=False)
    result = {
        "version": vllm.__version__,
        "rows": rows,
        "batch": [list(answer.outputs[0].token_ids) for answer in together],
        "counts": counts,
    }
    Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
