"""Modules in FP8 with scales by block, as DeepSeek-V3 releases its own: read, decoded with, written back."""

from __future__ import annotations

import json

import pytest
import torch
from mtp_checkpoints import model_with_modules, write_model
from safetensors.torch import load_file, save_file

from heads.export.exporting import export_heads, import_heads
from heads.export.fp8 import CODES, dequantised, quantised

BLOCK = (16, 24)  # cuts the last block of 32 × 64 in its columns
ROOT = "model.layers.3."


def plain_dequantised(codes_RC, scales_SU, block):
    """The plain restatement: one entry after another."""
    rows, columns = codes_RC.shape
    codes, scales = codes_RC.double(), scales_SU.double()
    found = [[codes[r, c] * scales[r // block[0], c // block[1]] for c in range(columns)] for r in range(rows)]
    return torch.tensor(found, dtype=torch.float64)


def in_fp8(folder, split=False):
    """Store every matrix of the modules' layer in FP8; with `split` the scales lie in a file of their own."""
    path = folder / "model.safetensors"
    tensors, scales = load_file(path), {}
    for name, tensor in list(tensors.items()):
        if name.startswith(ROOT) and tensor.ndim == 2 and "_proj" in name:
            tensors[name], scales[f"{name}_scale_inv"] = quantised(tensor, BLOCK, torch.float32)
    if split:
        save_file(tensors, folder / "model-1.safetensors", metadata={"format": "pt"})
        save_file(scales, folder / "model-2.safetensors", metadata={"format": "pt"})
        path.unlink()
        where = dict.fromkeys(tensors, "model-1.safetensors") | dict.fromkeys(scales, "model-2.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    else:
        save_file(tensors | scales, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, scales


@pytest.fixture(params=[False, True], ids=["one file", "scales apart"])
def case(request, tmp_path):
    model, modules = model_with_modules("deepseek_v3")
    folder = write_model(tmp_path / "model", "deepseek_v3", model, modules)
    return model, folder, *in_fp8(folder, request.param)


def test_what_is_read_is_code_times_scale(case):
    model, folder, tensors, scales = case
    state = import_heads(folder, model).state_dict()
    for name, ours in (
        ("eh_proj.weight", "layers.0.eh_proj.weight"),
        ("self_attn.o_proj.weight", "layers.0.mtp_block.self_attn.o_proj.weight"),
    ):
        wanted = plain_dequantised(tensors[ROOT + name], scales[f"{ROOT}{name}_scale_inv"], BLOCK)
        torch.testing.assert_close(state[ours], wanted, rtol=2**-23, atol=0.0)  # the product is float32
    down = plain_dequantised(
        *(t[ROOT + "mlp.experts.2.down_proj.weight" + s] for t, s in ((tensors, ""), (scales, "_scale_inv"))), BLOCK
    )
    torch.testing.assert_close(state["layers.0.mtp_block.mlp.experts.down_proj"][2], down, rtol=2**-23, atol=0.0)


def test_what_was_not_trained_keeps_its_bytes(case, tmp_path):
    model, folder, _, _ = case
    for dtype in (torch.float64, torch.bfloat16):  # as heads are saved with save_dtype
        out = tmp_path / str(dtype)
        said = export_heads(import_heads(folder, model).to(dtype).double(), "mtp", out, model=str(folder))
        assert "in FP8" in said
        before = {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}
        after = {k: t for path in out.glob("*.safetensors") for k, t in load_file(path).items()}
        assert before.keys() == after.keys()
        kept = [k for k in before if before[k].dtype == CODES or k.endswith("_scale_inv")]
        assert kept
        assert all(torch.equal(before[k].view(torch.uint8), after[k].view(torch.uint8)) for k in kept)


def test_what_was_trained_is_stored_in_fp8_again(case, tmp_path):
    model, folder, tensors, scales = case
    token_heads = import_heads(folder, model)
    projection, norm = token_heads.layers[0].eh_proj.weight, token_heads.layers[0].enorm.weight
    with torch.no_grad():
        projection.mul_(3.7)
        norm.mul_(1.5)
    export_heads(token_heads, "mtp", tmp_path / "out", model=str(folder))
    after = {k: t for path in (tmp_path / "out").glob("*.safetensors") for k, t in load_file(path).items()}
    changed = {k for k in after if not torch.equal(after[k].float(), (tensors | scales)[k].float())}
    assert changed <= {ROOT + end for end in ("eh_proj.weight", "eh_proj.weight_scale_inv", "enorm.weight")}
    assert f"{ROOT}eh_proj.weight_scale_inv" in changed
    again = import_heads(tmp_path / "out", model).layers[0]
    torch.testing.assert_close(
        again.eh_proj.weight, projection, rtol=2**-4, atol=float(projection.detach().abs().max()) * 2**-18
    )
    torch.testing.assert_close(again.enorm.weight, norm, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_blocks_of_any_size_and_scale_come_back_near(scale_dtype):
    generator = torch.Generator().manual_seed(0)
    weight_RC = torch.randn(3, 35, 50, generator=generator) * torch.logspace(-6, 3, 50)
    weight_RC[1, :16, :24] = 0.0
    codes, scales = quantised(weight_RC, BLOCK, scale_dtype)
    assert scales.dtype == scale_dtype
    assert scales.shape == (3, 3, 3)
    back = dequantised("w", codes, scales, BLOCK)
    largest = weight_RC.abs().amax(dim=(1, 2), keepdim=True)
    assert bool(((back - weight_RC).abs() <= torch.maximum(weight_RC.abs() / 16, largest / 448 / 512)).all())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "blocks of 128 × 128 need"),
    ],
)
def test_other_blocks_are_a_sentence(case, settings, said):
    model, folder, _, _ = case
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        import_heads(folder, model, "mtp")


# --- in place --------------------------------------------------------------------------------------------------------


def test_the_model_s_own_modules_are_replaced_with_overwrite(case, tmp_path):
    model, folder, _, _ = case
    token_heads = import_heads(folder, model)
    with torch.no_grad():
        token_heads.layers[0].enorm.weight.mul_(1.5)
    with pytest.raises(ValueError, match="is, holds or lies in"):
        export_heads(token_heads, "mtp", folder, model=str(folder))
    export_heads(token_heads, "mtp", tmp_path / "copy", model=str(folder))
    before = sorted(path.name for path in folder.iterdir())
    export_heads(token_heads, "mtp", folder, overwrite=True, model=str(folder))
    assert sorted(path.name for path in folder.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "model"]
    assert all(path.read_bytes() == (tmp_path / "copy" / path.name).read_bytes() for path in folder.iterdir())


def test_nothing_is_replaced_where_writing_fails(case, monkeypatch):
    model, folder, _, _ = case
    token_heads = import_heads(folder, model)
    with torch.no_grad():
        token_heads.layers[0].enorm.weight.mul_(1.5)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr("heads.export.formats.mtp.compare_files", lambda *_: (_ for _ in ()).throw(ValueError("other")))
    with pytest.raises(ValueError, match="other"):
        export_heads(token_heads, "mtp", folder, overwrite=True, model=str(folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_files_that_are_links_are_not_replaced(case, tmp_path):
    model, folder, _, _ = case
    token_heads = import_heads(folder, model)
    for path in list(folder.glob("*.safetensors")):
        blob = tmp_path / "blobs" / path.name
        blob.parent.mkdir(exist_ok=True)
        path.rename(blob)
        path.symlink_to(blob)
    with pytest.raises(ValueError, match="link"):
        export_heads(token_heads, "mtp", folder, overwrite=True, model=str(folder))
