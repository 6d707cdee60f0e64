"""Decode, and use what needs extras, where an installed wheel of Headway is all there is.

An interpreter that does not see this repository runs it, so it imports nothing from here. It prints JSON, and fails
where decoding differs from `generate`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heads
from heads.extras import MissingExtraError

LLAMA = LlamaConfig(
    vocab_size=29,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    eos_token_id=None,
    bos_token_id=2,
    pad_token_id=0,
    initializer_range=0.5,  # wide, so that the text does not repeat one token
)
OPTIONAL = ("datasets", "peft", "matplotlib", "jsonargparse", "deepspeed", "tensorboard", "wandb", "pytest")


def decode() -> dict[str, Any]:
    """Greedy text of heads that were saved and loaded again, and that of `generate`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.float64).eval()
    prompt_1T = torch.tensor([[2, 5, 7, 11]])
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(prompt_1T, **settings)
    with tempfile.TemporaryDirectory() as folder:
        heads.save(heads.create("grounded", model, num_heads=3), folder)
        token_heads = heads.load(folder, model)
        decoded = model.generate(prompt_1T, custom_generate=heads.TreeDecoding(token_heads), **settings)
    return {"plain": plain.sequences.tolist(), "decoded": decoded.sequences.tolist(), "passes": decoded.stats.passes}


def sentence(use: Callable[[], Any]) -> str | None:
    """What the missing extra is told, if it is."""
    try:
        use()
    except MissingExtraError as error:
        return str(error)
    return None


def adapt() -> None:
    heads.create("dynamo", AutoModelForCausalLM.from_config(LLAMA), num_heads=3, lora_rank=2)


def read_rows() -> None:
    importlib.import_module("heads.data.documents")


if __name__ == "__main__":
    found = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    sentences = {"lora": sentence(adapt), "train": sentence(read_rows)}
    result = {"heads": heads.__file__, "optional": found, "sentences": sentences, **decode()}
    print(json.dumps(result))
    sys.exit(result["decoded"] != result["plain"])
