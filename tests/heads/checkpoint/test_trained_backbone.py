"""A backbone that was trained with its heads: what is saved of it, and how it comes back."""

import copy
import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import random_tokens, tiny_model

import heads
from heads.checkpoint import save_load, schema
from heads.checkpoint.adapter import LoraSettings, add_adapter
from heads.checkpoint.backbone import save_backbone
from heads.families import create
from heads.interface.token_heads import TeacherForcing


@torch.no_grad()
def changed(dtype=torch.float32, adapter=False, where=None):
    """A backbone that training has changed, its heads, and the folder of the original."""
    original = tiny_model("llama", attn="sdpa", dtype=dtype, max_position_embeddings=128)
    original.save_pretrained(where / "base")
    model = type(original).from_pretrained(where / "base", dtype=dtype)
    if adapter:
        add_adapter(model, LoraSettings(rank=4))
    token_heads = create("dynamo", model, num_heads=2)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if not adapter or "lora_" in name:
            p.add_(0.1 * torch.randn(p.shape, generator=generator).to(dtype))
    return original, model.eval(), token_heads.eval()


@torch.no_grad()
def outputs(model, token_heads):
    """Logits of the backbone and of each head over eight tokens."""
    tokens = random_tokens(1, 8, seed=5)
    _, taps = token_heads.backbone.forward(tokens, taps=token_heads.hidden_taps, use_cache=False)
    whole = torch.arange(8)
    batch = TeacherForcing(tokens_BT=tokens, taps=taps, positions_BT=whole[None], mask=None, rows=[whole, whole])
    states = list(token_heads.teacher_forced(batch))
    return [model(tokens).logits] + [token_heads.projection(k)(h) for k, h in enumerate(states, start=1)]


def save_changed(model, token_heads, where, **options):
    recipe = {"config": {"backbone": {"attn_implementation": "sdpa"}}}
    heads.save(token_heads, where, with_backbone=True, recipe=recipe, **options)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trained_backbone_comes_back_with_its_heads(tmp_path, dtype, adapter):
    original, model, token_heads = changed(getattr(torch, dtype), adapter, tmp_path)
    save_changed(model, token_heads, tmp_path / "heads")
    again, loaded = heads.load_with_backbone(tmp_path / "heads", dtype=dtype)
    for found, wanted in zip(outputs(again, loaded), outputs(model, token_heads), strict=True):
        assert torch.equal(found, wanted)
    if not adapter:
        assert not torch.equal(outputs(model, token_heads)[0], original(random_tokens(1, 8, seed=5)).logits)
    with pytest.raises(ValueError, match=r"trained together with their backbone.*heads\.load_with_backbone"):
        heads.load(tmp_path / "heads", original)


def test_of_an_adapter_only_the_adapter_is_saved(tmp_path):
    _, model, token_heads = changed(adapter=True, where=tmp_path)
    save_changed(model, token_heads, tmp_path / "heads")
    (saved,) = (tmp_path / "heads").glob("backbone-*")
    tensors = load_file(saved / "adapter_model.safetensors")
    assert all("lora_" in name for name in tensors)
    assert not list(saved.glob("model*.safetensors"))
    assert not any("lora_" in name for name in token_heads.state_dict())
    plain = create("dynamo", tiny_model("llama"), num_heads=2)
    assert set(token_heads.state_dict()) == set(plain.state_dict()), "heads are layers without the backbone's adapter"


def test_heads_of_a_lora_layer_go_with_no_adapter_on_the_backbone():
    model = tiny_model("llama")
    add_adapter(model, LoraSettings(rank=2))
    with pytest.raises(ValueError, match="lora_rank"):
        create("dynamo", model, lora_rank=2)


@pytest.mark.parametrize(
    ("architecture", "targets", "message"),
    [
        ("llama", ["q_proj", "k_prj"], r"'k_prj', which names no layer of LlamaForCausalLM; allowed are .*k_proj"),
        ("llama", ["proj"], "'proj', which names no layer"),
        ("llama", ["q_proj", "lm_head"], "'lm_head', the unembedding of LlamaForCausalLM"),
        ("qwen3", ["lm_head"], "'lm_head', the unembedding"),
        ("gpt_neox", ["lm_head"], "'lm_head', the unembedding.*allowed are .*query_key_value"),
        ("gpt2", ["c_atn"], "'c_atn', which names no layer.*c_attn"),
    ],
)
def test_each_target_of_an_adapter_is_a_layer_that_it_can_change(architecture, targets, message):
    with pytest.raises(ValueError, match=message) as refused:
        add_adapter(tiny_model(architecture), LoraSettings(rank=2, targets=targets))
    assert "lm_head," not in str(refused.value).partition("; ")[2]


def test_targets_may_be_parts_of_paths():
    model = tiny_model("llama")
    add_adapter(model, LoraSettings(rank=2, targets=["0.self_attn.q_proj", "mlp.up_proj"]))
    adapted = {name.partition(".lora_")[0] for name in model.state_dict() if "lora_" in name}
    layers = range(model.config.num_hidden_layers)
    assert adapted == {"model.layers.0.self_attn.q_proj", *(f"model.layers.{i}.mlp.up_proj" for i in layers)}


def test_half_precision_on_disk_is_loaded_in_half_precision_and_recognised(tmp_path):
    _, model, token_heads = changed(where=tmp_path)
    save_changed(model, token_heads, tmp_path / "heads", dtype=torch.bfloat16)
    (saved,) = (tmp_path / "heads").glob("backbone-*")
    assert {t.dtype for t in load_file(saved / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"
    for dtype in ("bfloat16", "float32", "float16"):
        heads.load_with_backbone(tmp_path / "heads", dtype=dtype)


def test_a_backbone_that_moved_a_little_is_told_from_the_original(tmp_path):
    """A few steps at a rate of 1e-5 move a weight by a thousandth of itself."""
    original, model, _ = changed(where=tmp_path)
    model.load_state_dict(original.state_dict())
    token_heads = create("dynamo", model, num_heads=1)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.0005)
    save_changed(model, token_heads, tmp_path / "heads")
    with pytest.raises(ValueError, match="trained together with their backbone"):
        heads.load(tmp_path / "heads", original)
    heads.load(tmp_path / "heads", model)


def test_a_folder_without_its_backbone_says_so(tmp_path):
    _, model, token_heads = changed(where=tmp_path)
    save_changed(model, token_heads, tmp_path / "heads")
    (saved,) = (tmp_path / "heads").glob("backbone-*")
    saved.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"does not hold {saved.name}, the backbone"):
        heads.load_with_backbone(tmp_path / "heads")


def test_a_new_save_replaces_the_old_backbone_only_when_it_is_whole(tmp_path, monkeypatch):
    _, model, token_heads = changed(where=tmp_path)
    where = tmp_path / "heads"
    save_changed(model, token_heads, where)
    (old,) = where.glob("backbone-*")
    before = outputs(model, token_heads)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    def full_as_safetensors_says_it(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(save_load.os, "fsync", full)
        with pytest.raises(OSError, match="untouched"):
            save_changed(model, token_heads, where)
    again, loaded = heads.load_with_backbone(where, dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(outputs(again, loaded), before, strict=True))
    for raised in (full, full_as_safetensors_says_it):
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "save_pretrained", raised)
            with pytest.raises(OSError, match=r"No space left on device.*untouched"):
                save_changed(model, token_heads, where)
    assert old.is_dir()
    save_changed(model, token_heads, where)
    (new,) = where.glob("backbone-*")
    assert new != old
    (where / "backbone-mine").mkdir()
    again, loaded = heads.load_with_backbone(where, dtype="float32")
    heads.save(loaded, where)
    assert new.is_dir(), "loaded heads are saved with the backbone that they were trained with"
    assert (where / "backbone-mine").is_dir(), "nothing is removed that heads.json does not name"
    with pytest.raises(ValueError, match="with_backbone=False"):
        heads.save(loaded, where, with_backbone=False)


def test_heads_on_an_adapted_backbone_take_the_adapter_along(tmp_path):
    _, model, token_heads = changed(adapter=True, where=tmp_path)
    save_changed(model, token_heads, tmp_path / "first")
    model, token_heads = heads.load_with_backbone(tmp_path / "first")
    heads.save(token_heads, tmp_path / "second", recipe=schema.read_description(tmp_path / "first").recipe)
    again, loaded = heads.load_with_backbone(tmp_path / "second")
    assert all(torch.equal(a, b) for a, b in zip(outputs(again, loaded), outputs(model, token_heads), strict=True))


def test_a_failed_save_leaves_no_backbone_behind(tmp_path, monkeypatch):
    _, model, token_heads = changed(where=tmp_path)
    save_changed(model, token_heads, tmp_path / "heads")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_load, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        save_changed(model, token_heads, tmp_path / "heads")
    assert len(list((tmp_path / "heads").glob("backbone-*"))) == 1


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"r": 5_000_000}, "adapter_config.json has rank 5000000 and adapter_model.safetensors 4"),
        ({"layer_replication": [[0, 10_000]]}, "sets layer_replication, which no run does"),
        ({"target_modules": "(a+)+b"}, "sets target_modules"),
        ({"rank_pattern": {"q_proj": 10**6}}, "sets rank_pattern"),
        (None, "holds no adapter that was trained with heads"),
    ],
)
def test_an_adapter_that_asks_for_more_than_it_holds_is_refused(tmp_path, fields, says):
    _, model, token_heads = changed(adapter=True, where=tmp_path)
    save_changed(model, token_heads, tmp_path / "heads")
    (settings,) = (tmp_path / "heads").glob("backbone-*/adapter_config.json")
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps(content | fields if fields else [content]))
    with pytest.raises(ValueError, match=says):
        heads.load_with_backbone(tmp_path / "heads")


def test_a_tokenizer_with_several_chat_templates_is_saved_too(tmp_path):
    """transformers writes them into a folder of their own beside the backbone's files."""
    tokenizer = copy.deepcopy(byte_tokenizer())  # all tests share it
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ messages }}{{ tools }}"}
    facts = save_backbone(tiny_model("llama"), tmp_path, tokenizer=tokenizer)
    assert (tmp_path / facts["folder"] / "additional_chat_templates/tool_use.jinja").is_file()
