"""Training steps of Model-Optimizer's medusa, in a Python that has it: `training_peers` starts this file there.

    PYTHON modelopt_step.py FOLDER THREADS

FOLDER holds the backbone, `heads.safetensors` with Medusa's names, and `batch.safetensors`. For each line on stdin it
takes a step and prints its seconds and loss; at the end of stdin it prints the memory that model, optimizer and steps
added. Nothing of Headway is imported.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

RATE = 1e-4
IGNORED = -100


def main(folder: Path, threads: int) -> None:
    warnings.simplefilter("ignore")
    convert = importlib.import_module("modelopt.torch.speculative").convert  # no package of ours: another Python has it
    torch.set_num_threads(threads)
    weights, batch = load_file(folder / "heads.safetensors"), load_file(folder / "batch.safetensors")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    model = AutoModelForCausalLM.from_pretrained(folder / "backbone", attn_implementation="sdpa")
    convert(model, [("medusa", {"medusa_num_heads": int(batch["heads"]), "medusa_num_layers": 1})])
    model.medusa_heads.load_state_dict(weights)
    model.requires_grad_(False)
    model.medusa_heads.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.medusa_heads.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    tokens_BT = batch["input_ids"]
    # Its first head predicts the next label: labels that begin one token later make it ours, which skips x_{t+1}.
    labels_BT = torch.cat([tokens_BT[:, 1:], torch.full_like(tokens_BT[:, :1], IGNORED)], dim=1)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = model(
            input_ids=tokens_BT, labels=labels_BT, medusa_heads_coefficient=1.0, medusa_decay_coefficient=1.0
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss.item()}), flush=True)
    print(json.dumps({"bytes": resident("VmHWM") - before}), flush=True)


def resident(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
