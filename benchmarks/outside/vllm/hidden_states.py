"""`states_server` against vLLM's own API server: hidden states that it extracts beside those of this process."""
# B block, N tap, T position, D model width

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import heads
from benchmarks.outside.environment import Environment
from benchmarks.outside.vllm.regenerating import NAME, api_server
from benchmarks.shared import ROOT
from heads.backbone.model import Backbone
from train.config.states_server import StatesServerConfig
from train.data.served_states import ServedStates, layer_ids
from train.objective.model import TrainedModel
from train.objective.weights import LossConfig

HEADS = ("eagle", "grounded")
LENGTH = 160  # tokens of a block: longer than the document that both sides compute in any case
TOLERANCE = 1e-4
"""Allowed relative difference: both sides are float32, with sums in another order (measured: 1e-6)."""


def check_hidden_states(engine: Environment, place: Path, model: Any, prompts: list[Tensor]) -> str:
    """Compare the states; returns a sentence on what was compared.

    Raises:
        ValueError: vLLM did not start, or gave other states.
    """
    folder = place / "states"
    folder.mkdir()
    trained = [
        TrainedModel(Backbone(model), heads.load(ROOT / "checkpoints/demo" / name, model), loss=LossConfig(soft=0.5))
        for name in HEADS
    ]
    tokens_BT, documents_BT = blocks_of(prompts)
    worst, asked = 0.0, []
    for one in trained:
        ids = layer_ids(one.stored_taps, one.backbone.num_layers)
        with api_server(engine, place, *options_of(ids, folder)) as url:
            served = ServedStates(StatesServerConfig(url=url, folder=str(folder), model=NAME), one)
            theirs_BNTD = served(tokens_BT, documents_BT)
        with torch.no_grad():
            ours_BNTD = one.hidden_states(tokens_BT, documents_BT)
        worst = max(worst, float((theirs_BNTD - ours_BNTD).norm() / ours_BNTD.norm()))
        asked.append(str(ids))
    if not worst <= TOLERANCE:
        raise ValueError(f"vLLM's hidden states differ from ours by {worst:.1e} of their size; allowed: {TOLERANCE}.")
    return (
        f"states_server: the states that vLLM extracts after layers {' and '.join(asked)} differ from ours by at most "
        f"{worst:.0e} of their size (float32), over {tokens_BT.numel()} tokens in "
        f"{int(documents_BT.diff().ne(0).sum()) + len(tokens_BT)} documents."
    )


def blocks_of(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(B, T) tokens and document ids: one block of one document, and one of documents of 1 to 40 tokens."""
    tokens_T = torch.cat([prompt_1T[0] for prompt_1T in prompts])
    tokens_BT = torch.stack([tokens_T[:LENGTH], tokens_T[-LENGTH:]])
    short_T = (torch.arange(LENGTH) * torch.arange(LENGTH)).div(640, rounding_mode="floor")
    return tokens_BT, torch.stack([torch.zeros_like(short_T), short_T])


def options_of(ids: list[int], folder: Path) -> list[str]:
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    method["draft_model_config"] = {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "cpu_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    given = ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(transfer)]
    return ["--no-enable-chunked-prefill", *given]
