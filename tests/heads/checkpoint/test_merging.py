"""`headway merge`: the same heads and the same text without an adapter, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from safetensors.torch import load_file
from tiny import random_tokens, tiny_model
from typer.testing import CliRunner

import heads
from heads.checkpoint import schema
from heads.checkpoint.adapter import LoraSettings, add_adapter, has_adapter
from heads.checkpoint.convert import check_same, check_stored, merge, merge_adapter, probe, round_weights
from heads.cli.main import app
from heads.families import create


@torch.no_grad()
def adapted(where, dtype=torch.float64, architecture="llama", family="grounded", scale=0.3, **lora):
    """Heads in a folder, on a backbone with an adapter that changes it clearly, or as `scale` says."""
    tiny_model(architecture, attn="sdpa", dtype=dtype, vocab_size=NUM_TOKENS).save_pretrained(where / "base")
    byte_tokenizer().save_pretrained(where / "base")
    model = heads.load_backbone(heads.BackboneConfig(name_or_path=str(where / "base"), dtype="float64"))
    add_adapter(model, LoraSettings(rank=4, alpha=8.0, **lora))
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.copy_(scale * torch.randn(p.shape, generator=generator))
    token_heads = create(family, model, num_heads=2)
    recipe = {"config": {"backbone": {"attn_implementation": "sdpa"}}}
    heads.save(token_heads, where / "heads", recipe=recipe, dtype=torch.float32)
    return where / "heads"


@torch.no_grad()
def logits(folder, dtype="float64"):
    model, token_heads = heads.load_with_backbone(folder, dtype=dtype)
    tokens = random_tokens(1, 12, seed=3)
    final, _ = token_heads.backbone.forward(tokens, use_cache=False)
    states = [token_heads.head(k, final[0], tokens[0, :1].expand(12, k)) for k in (1, 2)]
    return [model(tokens).logits, *(token_heads.projection(k)(h) for k, h in enumerate(states, start=1))], model


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3"])
def test_logits_and_greedy_text_are_the_same(tmp_path, architecture):
    folder = adapted(tmp_path, architecture=architecture)
    merge(folder, tmp_path / "merged", dtype="float64")
    (before, with_adapter), (after, merged) = logits(folder), logits(tmp_path / "merged")
    for found, wanted in zip(after, before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    base = heads.load_backbone(heads.BackboneConfig(name_or_path=str(tmp_path / "base"), dtype="float64"))
    assert (base(random_tokens(1, 12, seed=3)).logits - before[0]).abs().max() > 0.01, "the adapter changes something"
    assert has_adapter(with_adapter)
    assert not has_adapter(merged)
    prompt = random_tokens(1, 5, seed=4)
    texts = [m.generate(prompt, max_new_tokens=24, do_sample=False).tolist() for m in (with_adapter, merged)]
    assert texts[0] == texts[1]


def test_what_is_written(tmp_path):
    """A plain Hugging Face folder in the original's dtype; heads byte for byte; the fingerprint is the new one's."""
    folder = adapted(tmp_path, dtype=torch.bfloat16)
    (folder / "tree.json").write_text("{}")
    backbone = merge(folder, tmp_path / "merged")
    assert {t.dtype for t in load_file(backbone / "model.safetensors").values()} == {torch.bfloat16}
    assert not any("lora_" in name or "base_layer" in name for name in load_file(backbone / "model.safetensors"))
    assert (backbone / "tokenizer_config.json").is_file()
    for name in ("heads.safetensors", "tree.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (folder / name).read_bytes()
    old, new = (schema.read_description(f) for f in (folder, tmp_path / "merged"))
    assert (new.trained_backbone.adapter, new.merged_from) == (False, str(folder))
    assert new.trained_backbone.fingerprint != old.trained_backbone.fingerprint
    assert new.recipe == old.recipe
    original = heads.load_backbone(heads.BackboneConfig(name_or_path=str(tmp_path / "base")))
    with pytest.raises(ValueError, match="trained together with their backbone"):
        heads.load(tmp_path / "merged", original)
    shutil.rmtree(tmp_path / "base")
    heads.load_with_backbone(tmp_path / "merged", dtype="float32")  # the original is no longer needed


def refused(*arguments):
    result = CliRunner().invoke(app, ["merge", *map(str, arguments)])
    assert result.exit_code == 1
    return " ".join(result.stderr.split())


def test_the_command_and_what_it_refuses(tmp_path):
    folder, out = adapted(tmp_path), tmp_path / "merged"
    result = CliRunner().invoke(app, ["merge", str(folder), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "their backbone, merged" in result.stdout
    assert "is not empty; give a folder that does not exist" in refused(folder, "--out", out)
    assert "no adapter to merge: their backbone is a whole one already" in refused(out, "--out", tmp_path / "twice")
    description = json.loads((folder / "heads.json").read_text())
    description["recipe"]["config"]["backbone"]["quantization"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "heads.json").write_text(json.dumps(description))
    assert "quantised (bitsandbytes)" in refused(folder, "--out", tmp_path / "other")
    demo = Path(__file__).resolve().parents[3] / "checkpoints/demo/medusa"
    assert "no adapter to merge: their backbone was not trained with them" in refused(demo, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@torch.no_grad()
def test_an_adapter_on_a_tied_weight_is_not_merged_into_both():
    """An adapter on the embedding alone would change the unembedding too, which is the same tensor."""
    model = tiny_model("qwen3")
    add_adapter(model, LoraSettings(rank=2, targets=["embed_tokens"]))
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.copy_(torch.randn(p.shape, generator=generator))
    before = probe(model)
    merge_adapter(model)
    with pytest.raises(ValueError, match="on a tied weight"):
        check_same(before, probe(model), "here")


@torch.no_grad()
def test_a_merge_that_changes_logits_is_seen():
    model = tiny_model("llama")
    add_adapter(model, LoraSettings(rank=2))
    tokens = random_tokens(1, 8, seed=1)
    before = model(tokens).logits
    merge_adapter(model)
    check_same(before, model(tokens).logits, "here")
    with pytest.raises(ValueError, match="cannot be merged"):
        check_same(before, before * 1.001, "here")


def test_nothing_is_written_of_a_merge_that_changes_logits(tmp_path, monkeypatch):
    folder = adapted(tmp_path)

    def wrong(model):
        merge_adapter(model)
        model.get_output_embeddings().weight.data.mul_(1.01)

    monkeypatch.setattr("heads.checkpoint.convert.merge_adapter", wrong)
    with pytest.raises(ValueError, match="cannot be merged: its logits would change by"):
        merge(folder, tmp_path / "merged", dtype="float64")
    assert not (tmp_path / "merged").exists()


@torch.no_grad()
def distance(folder, dtype="float32"):
    """KL(folder's ‖ the adapted one's) on tokens that the merge did not read."""
    (found, *_), _ = logits(folder, dtype)
    (wanted, *_), _ = logits(folder.parent / "heads", dtype)
    found, wanted = found.double().log_softmax(-1), wanted.double().log_softmax(-1)
    return float((found.exp() * (found - wanted)).sum(-1).mean())


@pytest.mark.parametrize(
    ("scale", "dtype", "told"), [(0.3, "auto", False), (0.02, "auto", True), (0.02, "float32", False)]
)
def test_an_adapter_that_rounding_would_lose_is_told(tmp_path, caplog, scale, dtype, told):
    """A product that is small beside the weights falls below the eight bits that bfloat16 keeps of them."""
    folder = adapted(tmp_path, dtype=torch.bfloat16, scale=scale)
    merge(folder, tmp_path / "merged", dtype=dtype)
    assert ("much of what was trained is lost. Give --dtype float32" in caplog.text) == told
    assert (distance(tmp_path / "merged") > 1e-9) == (dtype == "auto")
    if told:
        assert "Rounded to bfloat16" in caplog.text


@torch.no_grad()
def test_what_is_stored_is_checked_as_it_is_stored(tmp_path):
    """Weights that float16 cannot hold, which were fine as they were added up."""
    model = tiny_model("llama", dtype=torch.float32)
    model.model.embed_tokens.weight.mul_(1e6)  # the norm behind it takes it back
    before = probe(model)
    round_weights(model, torch.bfloat16)
    check_stored(before, probe(model), torch.bfloat16)
    round_weights(model, torch.float16)
    with pytest.raises(ValueError, match=r"cannot be stored in float16.*give --dtype float32"):
        check_stored(before, probe(model), torch.float16)


def test_nothing_is_written_of_a_merge_that_cannot_be_stored(tmp_path, monkeypatch):
    folder = adapted(tmp_path)
    monkeypatch.setattr(
        "heads.checkpoint.convert.round_weights", lambda model, dtype: model.get_output_embeddings().weight.data.mul_(2)
    )
    with pytest.raises(ValueError, match="cannot be stored in bfloat16"):
        merge(folder, tmp_path / "merged", dtype="bfloat16")
    assert not (tmp_path / "merged").exists()
