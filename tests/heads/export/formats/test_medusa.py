"""Medusa's folders, built from the documented names and held against a plain restatement of its mathematics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import check_greedy
from safetensors.torch import save_file
from tiny import random_tokens, shared_model

import heads
from heads.backbone.model import Backbone
from heads.export.exporting import export_heads, import_heads
from heads.export.folder import read_tensors

HEADS, BLOCKS = 3, 2


def released(folder: Path, model: Any, *, version: int, file: str = "medusa_lm_head.pt", aliased: bool = True) -> dict:
    """A folder as the original trainers write it: one block repeated, which is stored under each of its names."""
    width, vocab = model.config.hidden_size, model.config.vocab_size
    generator = torch.Generator().manual_seed(version)
    tensors = {}
    for k in range(HEADS):
        for block in range(BLOCKS):
            if block and aliased:
                tensors |= {
                    f"{k}.{block}.linear.{part}": tensors[f"{k}.0.linear.{part}"] for part in ("weight", "bias")
                }
                continue
            tensors[f"{k}.{block}.linear.weight"] = torch.randn(width, width, generator=generator) / width**0.5
            tensors[f"{k}.{block}.linear.bias"] = torch.randn(width, generator=generator)
        if version == 1:
            tensors[f"{k}.{BLOCKS}.weight"] = torch.randn(vocab, width, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (folder / "config.json").write_text(json.dumps(config | ({"version": "2"} if version == 2 else {})))
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    return tensors


def restated(tensors: dict, model: Any, tokens_BT: torch.Tensor) -> list[torch.Tensor]:
    """logits_k of each head at the last position, as the paper and its code say them."""
    hidden = model.model(tokens_BT).last_hidden_state[:, -1]
    found = []
    for k in range(HEADS):
        x = hidden
        for block in range(BLOCKS):
            weight, bias = (tensors[f"{k}.{block}.linear.{part}"].to(x.dtype) for part in ("weight", "bias"))
            x = x + torch.nn.functional.silu(x @ weight.T + bias)
        unembedding = tensors.get(f"{k}.{BLOCKS}.weight", model.lm_head.weight)
        found.append(x @ unembedding.to(x.dtype).T)
    return found


def head_logits(token_heads: Any, tokens_BT: torch.Tensor) -> list[torch.Tensor]:
    (tap,) = token_heads.taps
    hidden = token_heads.backbone.forward(tokens_BT, taps=[tap])[1][tap][:, -1]
    tokens_Bk = tokens_BT[:, :HEADS]
    return [token_heads.projection(k)(token_heads.head(k, hidden, tokens_Bk[:, :k])) for k in range(1, HEADS + 1)]


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_released_folder_gives_its_logits_and_decodes(version, file, tmp_path):
    model = shared_model("llama", "sdpa", torch.float64)
    tensors = released(tmp_path, model, version=version, file=file)
    token_heads = import_heads(tmp_path, model)
    tokens_BT = random_tokens(2, 7, seed=3)
    with torch.no_grad():
        for found, wanted in zip(head_logits(token_heads, tokens_BT), restated(tensors, model, tokens_BT), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0.0)  # float64
    assert token_heads.config.unembedding == ("own" if version == 1 else "shared")
    check_greedy(token_heads, steps=5)  # trained further, then plain generation's text


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_a_repeated_block_may_be_stored_once(prefix, tmp_path):
    """As safetensors' own savers do, which leave out further names of one object."""
    model = shared_model("llama", "sdpa", torch.float64)
    tensors = released(tmp_path / "all", model, version=1)
    released(tmp_path / "once", model, version=1).clear()
    (tmp_path / "once" / "medusa_lm_head.pt").unlink()
    kept = {prefix + name: tensor for name, tensor in tensors.items() if not re.match(r"\d\.[1-9]\.linear", name)}
    save_file(kept, tmp_path / "once" / ("model.safetensors" if prefix else "medusa_lm_head.safetensors"))
    one, other = (import_heads(tmp_path / name, model).state_dict() for name in ("all", "once"))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


@pytest.mark.parametrize("file", ["safetensors", "pt"])
@pytest.mark.parametrize("unembedding", ["own", "shared"])
def test_what_is_written_has_the_documented_names(unembedding, file, tmp_path):
    model = shared_model("llama", "sdpa", torch.float32)
    token_heads = heads.create("medusa", model, num_heads=HEADS, num_blocks=BLOCKS, unembedding=unembedding)
    assert "bit for bit" in export_heads(token_heads, "medusa", tmp_path / "out", file=file)
    assert (tmp_path / "out" / f"medusa_lm_head.{file}").stat().st_mode == (
        tmp_path / "out" / "config.json"
    ).stat().st_mode
    version = 1 if unembedding == "own" else 2
    wanted = released(tmp_path / "released", model, version=version)
    found = read_tensors(tmp_path / "out" / f"medusa_lm_head.{file}")
    assert {name: t.shape for name, t in found.items()} == {name: t.shape for name, t in wanted.items()}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (HEADS, BLOCKS)
    assert config.get("version") == ("2" if version == 2 else None)


def test_a_config_that_counts_too_few_heads_is_read_whole_with_a_warning(tmp_path, caplog):
    """As Vicuna's released folder: 2 in config.json, 5 in the file."""
    model = shared_model("llama", "sdpa", torch.float64)
    released(tmp_path, model, version=1)
    config = {"medusa_num_heads": HEADS - 1, "medusa_num_layers": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert import_heads(tmp_path, model).num_heads == HEADS
    assert "counts 2 heads and its file holds 3" in caplog.text
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_num_heads": HEADS + 1}))
    with pytest.raises(ValueError, match=r"missing bodies\.3\.0\.linear\.bias"):
        import_heads(tmp_path, model)


@pytest.mark.parametrize("sharded", [False, True])
def test_heads_inside_a_whole_model_are_read(sharded, tmp_path):
    """Medusa-2 saves `medusa_head.…` among the backbone's tensors."""
    model = shared_model("llama", "sdpa", torch.float64)
    tensors = released(tmp_path, model, version=1)
    (tmp_path / "medusa_lm_head.pt").unlink()
    whole = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    torch.save(whole | {"model.embed_tokens.weight": torch.ones(3, 2)}, tmp_path / "pytorch_model.bin")
    if sharded:
        names = dict.fromkeys(whole, "shard.bin")
        (tmp_path / "pytorch_model.bin").rename(tmp_path / "shard.bin")
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    token_heads = import_heads(tmp_path, model)
    assert torch.equal(token_heads.bodies[2][1].linear.weight.float(), tensors["2.0.linear.weight"])
    if sharded:
        names["0.0.linear.weight"] = "../shard.bin"
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ValueError, match=r"refers to '\.\./shard\.bin'"):
            import_heads(tmp_path, model)


def test_different_blocks_are_not_written_for_code_that_repeats_one(tmp_path):
    token_heads = heads.create("medusa", shared_model("llama", "sdpa", torch.float32), num_blocks=2)
    torch.nn.init.ones_(token_heads.bodies[1][1].linear.bias)
    with pytest.raises(ValueError, match="repeats one block"):
        export_heads(token_heads, "medusa", tmp_path / "out")
    for format in ("medusa-servers", "tensorrt-llm"):
        export_heads(token_heads, format, tmp_path / format)


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("code ran",))


BAD = {
    "another kind": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'),
        "no medusa_num_heads",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "both files": (
        lambda folder: save_file({"a": torch.ones(1)}, folder / "medusa_lm_head.safetensors"),
        "with one of them",
    ),
    "code": (lambda folder: torch.save({"a": Runs()}, folder / "medusa_lm_head.pt"), "could run code"),
    "cut short": (lambda folder: (folder / "medusa_lm_head.pt").write_bytes(b"PK\x03\x04"), "damaged"),
    "a web page": (lambda folder: (folder / "medusa_lm_head.pt").write_bytes(b"<html>404</html>"), "get it again"),
    "an odd pickle": (lambda folder: (folder / "medusa_lm_head.pt").write_bytes(b"\x80\x02."), "damaged"),
    "no floats": (
        lambda folder: torch.save(
            {name: torch.full_like(x, torch.nan) for name, x in torch.load(folder / "medusa_lm_head.pt").items()},
            folder / "medusa_lm_head.pt",
        ),
        "no finite floats",
    ),
    "a stray tensor": (
        lambda folder: torch.save({"5.conv.weight": torch.ones(1)}, folder / "medusa_lm_head.pt"),
        r"5\.conv\.weight",
    ),
    "a size": (
        lambda folder: torch.save({"0.0.linear.weight": torch.ones(2, 2)}, folder / "medusa_lm_head.pt"),
        "has shape",
    ),
    "a number": (
        lambda folder: (folder / "config.json").write_text('{"medusa_num_heads": 1e9, "medusa_num_layers": 1}'),
        "allowed are integers from 1 to 32",
    ),
    "a link": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").symlink_to("/etc/hostname")),
        "is a link",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_folders_are_refused_with_the_reason(what, tmp_path):
    model = shared_model("llama", "sdpa", torch.float32)
    released(tmp_path, model, version=1)
    change, said = BAD[what]
    change(tmp_path)
    with pytest.raises(ValueError, match=said):
        import_heads(tmp_path, model, "medusa")


def test_what_the_format_cannot_say_is_refused(tmp_path):
    model = shared_model("llama", "sdpa", torch.float32)
    few = heads.create("medusa", model, draft_tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="draft vocabulary"):
        export_heads(few, "medusa", tmp_path / "a")
    with pytest.raises(ValueError, match="gru heads were given"):
        export_heads(heads.create("gru", model), "medusa", tmp_path / "a")
    with pytest.raises(ValueError, match="scales, caps or shifts"):
        export_heads(heads.create("medusa", shared_model("gemma2", "eager", torch.float32)), "medusa", tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_an_earlier_folder_stays_unless_it_is_given_up(tmp_path):
    token_heads = heads.create("medusa", shared_model("llama", "sdpa", torch.float32))
    export_heads(token_heads, "medusa", tmp_path / "out")
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(ValueError, match="--overwrite"):
        export_heads(token_heads, "medusa", tmp_path / "out")
    assert (tmp_path / "out" / "mine.txt").exists()
    export_heads(token_heads, "medusa", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "mine.txt").exists()


def test_a_folder_whose_logits_differ_is_not_written(tmp_path, monkeypatch):
    from heads.export.formats import medusa

    backbone = Backbone(shared_model("llama", "sdpa", torch.float32))
    token_heads = heads.create("medusa", backbone)
    other = heads.create("medusa", backbone)
    torch.nn.init.ones_(other.bodies[0][0].linear.weight)
    monkeypatch.setattr(medusa, "read", lambda folder, backbone: other)
    with pytest.raises(ValueError, match="other logits"):
        export_heads(token_heads, "medusa", tmp_path / "out")
    assert not list(tmp_path.iterdir())
