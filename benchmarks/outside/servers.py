"""Our folders in TGI's, LoRAX's and TensorRT-LLM's own code: `python -m benchmarks.outside.servers --copies FOLDER`.

FOLDER (by default $HEADWAY_SERVERS) holds checkouts of github.com/huggingface/text-generation-inference,
github.com/predibase/lorax and github.com/NVIDIA/TensorRT-LLM (up to 1.2); none is a part of this project. The parts
that load heads and compute their logits are executed on a CPU in float64, without the kernels that they import; the
servers themselves do not run. TensorRT-LLM's loader gives float32, and its graph is restated here. Logits that differ
from ours end in an error.
"""
# B row, K head, V vocabulary, D model width

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import heads
from benchmarks.shared import ROOT, figures_table, parser_of, run_benchmark, wide_console
from heads.checkpoint.opening import open_backbone
from heads.export.exporting import export_heads
from heads.interface.token_heads import TokenHeads

COPIES = "HEADWAY_SERVERS"
CHECKOUTS = ("text-generation-inference", "lorax", "TensorRT-LLM")
LM_HEAD = "lm_head"
ROWS = 5
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Allowed difference, in shares of the largest number; TGI rounds probabilities of float64 states to float32."""


def main() -> None:
    parser = parser_of("benchmarks.outside.servers", __doc__)
    parser.add_argument("--copies", default=os.environ.get(COPIES), help=f"folder of the checkouts; ${COPIES}")
    options = parser.parse_args()
    if not options.copies:
        raise ValueError(f"No checkouts were given; set {COPIES} or --copies to a folder of them (see --help).")
    copies = found_in(Path(options.copies))
    model = open_backbone(str(ROOT / "checkpoints/demo/base"), dtype="float64").model.to("cpu")
    states_BD = torch.randn(ROWS, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    table = figures_table(None, "format", "heads", "program", "its class", "logits", "largest difference", left=4)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        for i, case in enumerate(CASES):
            folder = Path(place) / str(i)
            token_heads = made(model, case)
            export_heads(token_heads, case.format, folder)
            wanted_BKV = ours(token_heads, states_BD)
            for program in case.programs:
                kind, found_BKV = PROGRAMS[program](copies, folder, model, states_BD)
                furthest = float((found_BKV.double() - wanted_BKV).abs().max())
                if (
                    found_BKV.shape != wanted_BKV.shape
                    or furthest > TOLERANCE[found_BKV.dtype] * wanted_BKV.abs().max()
                ):
                    raise ValueError(f"{program} and we differ by {furthest:.2g} on {case.format}, {case.said}.")
                table.add_row(case.format, case.said, program, kind, f"{found_BKV.numel():,}", f"{furthest:.0e}")
    torch.distributed.destroy_process_group()
    wide_console().print(table)


def found_in(copies: Path) -> Path:
    """
    Raises:
        ValueError: a checkout is missing.
    """
    if missing := [name for name in CHECKOUTS if not (copies / name).is_dir()]:
        raise ValueError(f"{copies} has no {', '.join(missing)}; put a checkout of {', '.join(CHECKOUTS)} there.")
    return copies


@dataclass(frozen=True, kw_only=True)
class WrittenHeads:
    """Heads, the format that they are written in, and the programs that read it."""

    format: str
    said: str
    family: str
    options: Mapping[str, Any]
    programs: tuple[str, ...]


MEDUSA = ("TGI", "LoRAX")
BLOCKS: dict[str, dict[str, Any]] = {
    "one block, own unembeddings": {"unembedding": "own"},
    "two blocks, own unembeddings": {"unembedding": "own", "num_blocks": 2},
    "one block, the backbone's unembedding": {"unembedding": "shared"},
}
CASES = (
    *(
        WrittenHeads(format=name, said=said, family="medusa", options=options, programs=programs)
        for name, programs in (("medusa-servers", MEDUSA), ("tensorrt-llm", ("TensorRT-LLM",)))
        for said, options in BLOCKS.items()
    ),
    *(
        WrittenHeads(
            format="mlp-speculator",
            said=f"tied, scale_input {str(scaled).lower()}",
            family="mlp_speculator",
            options={"tie_weights": True, "scale_input": scaled, "inner_width": 64},
            programs=("TGI",),
        )
        for scaled in (False, True)
    ),
)


def made(model: Any, case: WrittenHeads) -> TokenHeads:
    """Heads with random weights."""
    token_heads = heads.create(case.family, model, num_heads=3, **case.options).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in token_heads.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return token_heads


def ours(token_heads: Any, states_BD: Tensor) -> Tensor:
    """(B, K, V): logits of each head; of an mlp_speculator, fed its own drafts, probabilities as in TGI."""
    tokens_Bk = token_heads.backbone.projection.without_norm()(states_BD).argmax(dim=-1, keepdim=True)
    found = []
    for k in range(1, token_heads.num_heads + 1):
        logits_BV = token_heads.projection(k)(token_heads.head(k, states_BD, tokens_Bk))
        found.append(logits_BV if token_heads.family == "medusa" else logits_BV.softmax(dim=-1))
        tokens_Bk = torch.cat([tokens_Bk, logits_BV.argmax(dim=-1, keepdim=True)], dim=1)
    return torch.stack(found, dim=1)


@contextlib.contextmanager
def imported(folder: Path, package: str, inner: tuple[str, ...], given: Mapping[str, Any]) -> Iterator[None]:
    """A package whose modules can be imported while none of its own `__init__` runs.

    Args:
        inner: packages in it.
        given: attributes of stand-ins for modules that it imports, by the module's full name.
    """
    before = set(sys.modules)
    try:
        for name in (package, *(f"{package}.{part}" for part in inner)):
            found = types.ModuleType(name)
            found.__path__ = [str(folder.joinpath(*name.split(".")))]
            sys.modules[name] = found
        for name, attributes in given.items():
            found = sys.modules.setdefault(name, types.ModuleType(name))
            vars(found).update(attributes)
        yield
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in (package, "loguru"):
                del sys.modules[name]


def backbone_file(folder: Path, model: Any) -> Path:
    """Write the backbone's unembedding under the name by which these programs read it."""
    path = folder.with_suffix(".backbone.safetensors")
    save_file({f"{LM_HEAD}.weight": model.get_output_embeddings().weight.clone()}, path)
    return path


def by_tgi(copies: Path, folder: Path, model: Any, states_BD: Tensor) -> tuple[str, Tensor]:
    """Through `SpeculativeHead.load`, which chooses the class by the folder."""
    name, config = "text_generation_server", json.loads((folder / "config.json").read_text())
    given = {f"{name}.utils.import_utils": {"SYSTEM": "cpu"}}
    with imported(copies / "text-generation-inference/server", name, ("layers", "utils"), given):
        take = importlib.import_module
        take(f"{name}.utils.speculate").set_speculate(config.get("medusa_num_heads") or config["n_predict"])
        parallel = take(f"{name}.layers.tensor_parallel")
        vars(sys.modules[f"{name}.layers"]).update(
            TensorParallelEmbedding=parallel.TensorParallelEmbedding,
            FastLinear=take(f"{name}.layers.linear").FastLinear,
        )
        reading = take(f"{name}.utils.weights")
        weights = reading.Weights(
            [backbone_file(folder, model)],
            "cpu",
            torch.float64,
            torch.distributed.group.WORLD,
            reading.DefaultWeightsLoader(reading.UnquantizedWeight),
        )
        files = ["medusa_lm_head.safetensors"]  # by name; of other speculators every file
        if "medusa_num_heads" not in config:
            files = [path.name for path in folder.glob("*.safetensors")]
        settings = types.SimpleNamespace(
            quantize=None,
            speculator={"path": folder, "model_paths": files},
            vocab_size=model.config.vocab_size,
            hidden_size=model.config.hidden_size,
        )
        found = take(f"{name}.layers.speculative").SpeculativeHead.load(settings, LM_HEAD, weights)
        logits_BKV = found(states_BD)[1]
    return type(found.speculator).__name__, logits_BKV


def by_lorax(copies: Path, folder: Path, model: Any, states_BD: Tensor) -> tuple[str, Tensor]:
    """Through `MedusaConfig.load` and `MedusaWeights.load`."""
    name = "lorax_server"
    given = {
        "loguru": {"logger": logging.getLogger("lorax")},
        f"{name}.utils.import_utils": {"SYSTEM": "cpu"},
        f"{name}.utils.punica": {"segmented_matmul": None},
        f"{name}.utils.sources": dict.fromkeys(("PBASE", "S3", "map_pbase_model_id_to_s3")),
    }
    with imported(copies / "lorax/server", name, ("layers", "utils", "adapters"), given):
        take = importlib.import_module
        vars(sys.modules[f"{name}.layers"]).update(
            FastLinear=take(f"{name}.layers.linear").FastLinear,
            TensorParallelColumnLinear=take(f"{name}.layers.tensor_parallel").TensorParallelColumnLinear,
        )
        medusa = take(f"{name}.adapters.medusa")
        config = medusa.MedusaConfig.load(json.loads((folder / "config.json").read_text()))
        tensors: dict[str, Tensor] = {}
        for path in folder.glob("*.safetensors"):
            tensors |= load_file(path)
        server = types.SimpleNamespace(
            device=torch.device("cpu"), dtype=torch.float64, process_group=torch.distributed.group.WORLD
        )
        found = medusa.MedusaWeights.load(config, server, tensors, LM_HEAD, set()).model
        logits_BKV = found(states_BD, model.get_output_embeddings())[1]
    return type(found.medusa).__name__, logits_BKV


def by_tensorrt_llm(copies: Path, folder: Path, model: Any, states_BD: Tensor) -> tuple[str, Tensor]:
    """`load_medusa_hf` reads the weights; their graph of an engine (`MedusaHead`) is restated."""
    name, config = "tensorrt_llm", json.loads((folder / "config.json").read_text())

    class Mapping:
        tp_size, tp_rank = 1, 0

    given = {
        name: {"logger": logging.getLogger(name)},
        f"{name}._utils": {"str_dtype_to_torch": lambda dtype: getattr(torch, dtype)},
        f"{name}.mapping": {"Mapping": Mapping},
        f"{name}.models.convert_utils": dict.fromkeys(
            ("dup_kv_weight", "generate_int8", "smooth_gemm", "smooth_gemm_fc1_gate", "split_matrix_tp", "split_qkv_tp")
        )
        | {"split": lambda tensor, size, rank: tensor.chunk(size)[rank]},
    }
    with imported(copies / "TensorRT-LLM", name, ("models", "models.medusa"), given):
        load = importlib.import_module(f"{name}.models.medusa.weight").load_medusa_hf
        count, layers = config["medusa_num_heads"], config["medusa_num_layers"]
        weights = load(str(folder), count, layers, Mapping(), "float32")
    found = []
    for k in range(count):
        hidden_BD = states_BD.float()
        for layer in range(layers):
            part = f"medusa_heads.{k}.medusa_layers.{layer}.linear"
            linear_BD = nn.functional.linear(hidden_BD, weights[f"{part}.weight"], weights[f"{part}.bias"])
            hidden_BD = hidden_BD + nn.functional.silu(linear_BD)
        found.append(hidden_BD @ weights[f"medusa_heads.{k}.lm_head.weight"].T)
    return "load_medusa_hf", torch.stack(found, dim=1)


PROGRAMS = {"TGI": by_tgi, "LoRAX": by_lorax, "TensorRT-LLM": by_tensorrt_llm}


if __name__ == "__main__":
    run_benchmark(main)
