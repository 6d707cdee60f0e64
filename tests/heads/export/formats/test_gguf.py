"""GGUF files without llama.cpp: names, numbers, rotations and words; `make verify-llamacpp` runs such files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matrices import covering
from repository import ROOT
from tiny import tiny_model
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import heads
from heads.export.exporting import export_heads
from heads.export.formats import gguf as format
from heads.export.gguf.files import DTYPES, read_gguf
from heads.export.gguf.tables import paired, rotated
from heads.export.gguf.vocabulary import LLAMA3_REGEX, QWEN2_REGEX, splitting_rule, vocabulary

BASE = str(ROOT / "checkpoints" / "demo" / "base")
VOCAB = 2048


def model_of(kind: str = "llama", **changes: Any) -> Any:
    model = tiny_model(kind, attn="sdpa", dtype=torch.float32, vocab_size=VOCAB, num_hidden_layers=8, **changes)
    model.config.name_or_path = BASE  # whose tokenizer the file carries
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    token_heads = heads.create("eagle", model_of())
    folder = tmp_path_factory.mktemp("gguf") / "out"
    assert "bit for bit as f32" in export_heads(token_heads, "gguf", folder, dtype="f32")
    return token_heads, folder


def test_the_backbone_has_llama_cpp_s_names_and_numbers(exported):
    token_heads, folder = exported
    config = token_heads.backbone.config
    said, tensors = read_gguf(folder / "backbone.gguf")
    assert said["general.architecture"] == "llama"
    wanted = {
        "block_count": 8,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": 10000.0,
        "vocab_size": VOCAB,
    }
    assert {key: said[f"llama.{key}"] for key in wanted} == wanted
    assert len(tensors) == 8 * 9 + 3
    assert torch.equal(tensors["output.weight"], token_heads.backbone.model.lm_head.weight)
    assert torch.equal(
        tensors["blk.3.ffn_down.weight"], token_heads.backbone.model.model.layers[3].mlp.down_proj.weight
    )


@covering(kind=["llama", "qwen3"], dtype=list(DTYPES))
def test_transformers_reads_the_backbone_with_the_same_logits(kind, dtype, tmp_path):
    """A reader of GGUF that is not ours: names, rotated rows and numbers are what llama.cpp's files have."""
    # the reader of transformers takes Qwen3's heads to be 128 wide, whatever the file says
    qwen = {"layer_types": ["full_attention"] * 8, "head_dim": 128}
    model = model_of(kind, **(qwen if kind == "qwen3" else {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(DTYPES[dtype]))  # so that the file holds these very numbers
    export_heads(heads.create("eagle", model), "gguf", tmp_path / "out", dtype=dtype)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="backbone.gguf", dtype=torch.float32)
    tokens_1T = torch.arange(3, 40)[None]
    with torch.no_grad():
        # its epsilons and rotary base were float32 in the file
        torch.testing.assert_close(read.eval()(tokens_1T).logits, model(tokens_1T).logits, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_that_was_moved_is_noticed_by_its_logits(dtype, tmp_path, monkeypatch):
    token_heads = heads.create("eagle", model_of())
    with torch.no_grad():
        for parameter in token_heads.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    said = export_heads(token_heads, "gguf", tmp_path / "out", dtype=dtype)
    assert "draft's logits within" in said
    unturned = lambda tensors, *numbers, back=False: dict(tensors) if back else rotated(tensors, *numbers)  # noqa: E731
    monkeypatch.setattr(format, "rotated", unturned)
    with pytest.raises(ValueError, match="reads back with other logits"):
        export_heads(token_heads, "gguf", tmp_path / "other", dtype=dtype)
    assert not (tmp_path / "other").exists()


def test_the_draft_names_the_states_that_it_reads(exported):
    token_heads, folder = exported
    said, tensors = read_gguf(folder / "draft.gguf")
    assert said["general.architecture"] == "eagle3"
    assert said["eagle3.target_layers"] == [2, 4, 5]
    assert said["eagle3.target_hidden_size"] == token_heads.backbone.hidden_size
    assert said["eagle3.block_count"] == 1
    assert said["eagle3.norm_before_residual"] is False
    width = token_heads.backbone.hidden_size
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.count(".") == 1} == {
        "fc.weight": (width, 3 * width),
        "output_norm.weight": (width,),
        "output.weight": (VOCAB, width),
    }
    assert torch.equal(tensors["blk.0.attn_norm_2.weight"], token_heads.midlayer.hidden_norm.weight)
    assert tensors["blk.0.attn_q.weight"].shape[1] == 2 * width


def test_rows_in_pairs_are_rotated_as_the_halves_were():
    """llama.cpp turns neighbours by the angle that transformers turns entries n/2 apart by."""
    num_heads, width, inputs = 2, 8, 5
    matrix_OI = torch.randn(num_heads * width, inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_I = torch.arange(1.0, inputs + 1, dtype=torch.float64)
    angles = 3 * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    cos, sin = (torch.cat([f(angles), f(angles)])[None, None] for f in (torch.cos, torch.sin))
    query = (matrix_OI @ x_I).reshape(1, num_heads, 1, width)
    halves, _ = apply_rotary_pos_emb(query, query, cos, sin)
    even, odd = (paired(matrix_OI, num_heads) @ x_I).reshape(num_heads, -1, 2).unbind(-1)
    turned = torch.stack([even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()], dim=-1)
    torch.testing.assert_close(turned.flatten(), paired(halves.reshape(-1, 1), num_heads).flatten())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_vocabulary_is_written_as_ids(dtype, tmp_path):
    tokens = [3, 5, 70, 2000]
    token_heads = heads.create("eagle", model_of("qwen3", layer_types=["full_attention"] * 8), draft_tokens=tokens)
    export_heads(token_heads, "gguf", tmp_path / "out", dtype=dtype)
    said, tensors = read_gguf(tmp_path / "out" / "draft.gguf")
    assert tensors["d2t"].tolist() == tokens
    assert tensors["output.weight"].shape[0] == len(tokens)
    assert tensors["output.weight"].dtype == DTYPES[dtype]
    assert tensors["output_norm.weight"].dtype == torch.float32
    said, tensors = read_gguf(tmp_path / "out" / "backbone.gguf")
    assert said["general.architecture"] == "qwen3"
    layer = token_heads.backbone.model.model.layers[0].self_attn  # rotated as in transformers: rows stay
    assert torch.equal(tensors["blk.0.attn_q.weight"], layer.q_proj.weight.to(DTYPES[dtype]))
    assert torch.equal(tensors["blk.0.attn_q_norm.weight"], layer.q_norm.weight)


def test_words_are_the_tokenizer_s():
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    found = vocabulary(tokenizer, VOCAB + 2)
    assert found["pre"] == "gpt-2"
    assert found["tokens"][:VOCAB] == tokenizer.convert_ids_to_tokens(range(VOCAB))
    assert found["tokens"][VOCAB:] == ["[PAD2048]", "[PAD2049]"]
    assert (found["token_type"][0], found["token_type"][1], found["token_type"][-1]) == (3, 1, 5)
    assert found["merges"][0] == "Ġ Ġ"
    assert (found["bos_token_id"], found["eos_token_id"], found["add_bos_token"]) == (0, 0, False)


def bpe(*splitters: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splitters))
    return json.loads(tokenizer.to_str())


def split(expression: str) -> Any:
    return pre_tokenizers.Split(Regex(expression), behavior="isolated")


def test_splitting_rules_are_known_by_what_they_do():
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert splitting_rule(bpe(split(LLAMA3_REGEX), plain)) == "llama-bpe"
    assert splitting_rule(bpe(split(QWEN2_REGEX), plain)) == "qwen2"
    with pytest.raises(ValueError, match=r"none of llama\.cpp's rules"):
        splitting_rule(bpe(split(r"\s+"), plain))
    with pytest.raises(ValueError, match=r"none of llama\.cpp's rules"):
        splitting_rule(bpe(split(QWEN2_REGEX), pre_tokenizers.ByteLevel(use_regex=True)))
    with pytest.raises(ValueError, match="kind 'WordLevel'"):
        splitting_rule(json.loads(Tokenizer(models.WordLevel()).to_str()))


def test_what_llama_cpp_cannot_hold_is_refused(tmp_path):
    cases = {
        "medusa heads were given": heads.create("medusa", model_of()),
        "GPTNeoXForCausalLM was given": heads.create("eagle", model_of("gpt_neox")),
        "Heads with fc_norm were given": heads.create("eagle", model_of(), fc_norm=True),
        "Heads with 2 hidden states": heads.create("eagle", model_of(), taps=[2, 4]),
    }
    for said, token_heads in cases.items():
        with pytest.raises(ValueError, match=said):
            export_heads(token_heads, "gguf", tmp_path / "out")
    scaled = model_of()
    scaled.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="kind 'linear'"):
        format.backbone_contents(scaled, {}, 8)
    for kind, changes in (("llama", {"hidden_act": "gelu"}), ("mistral_windowed", {})):
        with pytest.raises(ValueError, match="silu and full attention"):
            export_heads(heads.create("eagle", model_of(kind, **changes)), "gguf", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_file_that_reads_back_otherwise_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(format, "read_gguf", lambda path: ({"general.architecture": "llama"}, {}))
    with pytest.raises(ValueError, match="reads back otherwise"):
        export_heads(heads.create("eagle", model_of()), "gguf", tmp_path / "out")
    assert not list(tmp_path.iterdir())
