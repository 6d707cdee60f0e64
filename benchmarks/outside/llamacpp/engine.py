"""Run by build/llamacpp-env's Python, never imported: llama.cpp's server on a CPU, asked over HTTP on this machine.

    python -P engine.py JOB.json        reads backbone, draft (or null), depth, prompts, texts, new_tokens, out

Writes for each prompt the new ids and llama.cpp's own counts of drafted and accepted tokens, and the ids of each text.
Caches are float32 and flash attention is off, so that only the order of sums differs.
"""

from __future__ import annotations

import importlib
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any


def parameters(job: dict[str, Any]) -> Any:
    llama = importlib.import_module("xllamacpp")
    found = llama.CommonParams()
    found.model.path = job["backbone"]
    found.n_ctx, found.n_parallel, found.n_gpu_layers, found.port = 512, 1, 0, 0  # port 0: any that is free
    found.warmup = found.fit_params = False
    found.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    found.cache_type_k = found.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    if job["draft"]:
        kind = llama.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_EAGLE3
        found.speculative.types = [kind]
        draft = found.speculative.draft
        draft.mparams.path = job["draft"]
        draft.n_max, draft.n_min, draft.p_min, draft.n_gpu_layers = job["depth"], 0, 0.0, 0
        draft.cache_type_k = draft.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    return found


def ask(address: str, path: str, asked: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(asked).encode()
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return dict(json.loads(answer.read()))


def main(job: dict[str, Any]) -> None:
    llama = importlib.import_module("xllamacpp")
    server = llama.Server(parameters(job))
    greedy = {"temperature": 0, "top_k": 1, "cache_prompt": False, "return_tokens": True, "ignore_eos": True}
    rows = []
    for prompt in job["prompts"]:
        answer = ask(
            server.listening_address, "/completion", {"prompt": prompt, "n_predict": job["new_tokens"], **greedy}
        )
        timings = answer["timings"]
        counts = {"drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0)}
        rows.append({"text": answer["tokens"], **counts})
    texts = [ask(server.listening_address, "/tokenize", {"content": text})["tokens"] for text in job["texts"]]
    result = {"version": llama.__version__, "rows": rows, "texts": texts}
    Path(job["out"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
