"""Saved heads load back to the same drafts; everything wrong with a folder is said exactly."""

import contextlib
import copy
import errno
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

import heads
from heads.checkpoint import save_load


@pytest.fixture
def model():
    return tiny_model("llama", dtype=torch.float32)


@pytest.fixture
def saved(model, tmp_path):
    torch.manual_seed(3)
    token_heads = heads.create("grounded", model, num_heads=3)
    for p in token_heads.parameters():
        torch.nn.init.normal_(p, std=0.3)
    token_heads.measured_accuracy = [[0.5, 0.2], [0.4, 0.1], [0.3, 0.1]]
    heads.save(token_heads, tmp_path / "heads", recipe={"steps": 7})
    return tmp_path / "heads", token_heads


@pytest.mark.parametrize("family", heads.families())
def test_every_family_loads_back_bit_for_bit(family, model, tmp_path):
    token_heads = heads.create(family, model, num_heads=2)
    for p in token_heads.parameters():
        torch.nn.init.normal_(p)
    heads.save(token_heads, tmp_path)
    loaded = heads.load(tmp_path, model)
    assert loaded.config == token_heads.config
    for name, tensor in token_heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_description_says_what_the_tensors_are(saved, model):
    folder, token_heads = saved
    description = json.loads((folder / "heads.json").read_text())
    assert description["family"] == "grounded"
    assert description["config"]["num_heads"] == 3
    assert description["num_parameters"] == sum(p.numel() for p in token_heads.parameters())
    assert description["backbone"]["vocab_size"] == model.config.vocab_size
    assert description["recipe"] == {"steps": 7}
    assert heads.load(folder, model).measured_accuracy == token_heads.measured_accuracy


def test_no_backbone_weights_are_saved(saved):
    folder, _ = saved
    assert {name.split(".")[0] for name in load_file(folder / "heads.safetensors")} == {"bodies", "unembeddings"}


def test_loads_in_the_backbones_dtype_and_on_it_in_another(saved, model):
    folder, _ = saved
    assert next(heads.load(folder, model).parameters()).dtype == torch.float32
    half = tiny_model("llama", dtype=torch.bfloat16)  # the same weights rounded: still the same backbone
    assert next(heads.load(folder, half).parameters()).dtype == torch.bfloat16


def test_another_backbone_is_refused(saved):
    folder, _ = saved
    with pytest.raises(ValueError, match=r"embedding of the given backbone"):
        heads.load(folder, tiny_model("llama", dtype=torch.float32, seed=5))
    config = copy.deepcopy(tiny_model("llama").config)
    config.hidden_size = 64
    wider = LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"hidden_size 32.*has 64"):
        heads.load(folder, wider)


def rewrite(folder, change):
    """Change the tensors and keep the pair consistent, so that the tensor check itself is reached."""
    tensors = load_file(folder / "heads.safetensors")
    change(tensors)
    save_file(tensors, folder / "heads.safetensors")
    description = json.loads((folder / "heads.json").read_text())
    content = (folder / "heads.safetensors").read_bytes()
    description["sha256"] = save_load.hashlib.sha256(content).hexdigest()
    (folder / "heads.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("bodies.1.first.bias"), "missing bodies.1.first.bias"),
        (lambda t: t.update(stray=torch.zeros(1)), "extra stray"),
        (
            lambda t: t.update({"bodies.0.first.bias": torch.zeros(5)}),
            r"bodies.0.first.bias has shape \(5,\) in place of \(32,\)",
        ),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(saved, model, change, message):
    folder, _ = saved
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        heads.load(folder, model)


def test_truncated_swapped_and_missing_files(saved, model, tmp_path):
    folder, token_heads = saved
    tensors, description = folder / "heads.safetensors", folder / "heads.json"
    whole, text = tensors.read_bytes(), description.read_text()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"cut short at {len(whole) // 2} bytes"):
        heads.load(folder, model)
    with torch.no_grad():
        token_heads.bodies[0].first.bias += 1
    heads.save(token_heads, tmp_path / "other")
    tensors.write_bytes((tmp_path / "other" / "heads.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"not the file that heads\.json beside it describes"):
        heads.load(folder, model)
    tensors.unlink()
    with pytest.raises(ValueError, match="without their tensors"):
        heads.load(folder, model)
    description.write_text(text[:40])
    with pytest.raises(ValueError, match="is no JSON"):
        heads.load(folder, model)
    description.write_text(text.replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(ValueError, match="format version 99"):
        heads.load(folder, model)
    with pytest.raises(ValueError, match=r"holds no heads\.json"):
        heads.load(tmp_path / "nothing", model)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("format_version", "1", "format_version='1' was given; allowed are integers"),
        ("format_version", True, "format_version=True was given; allowed are integers"),
        ("family", 3, "family=3 was given; allowed are texts"),
        ("family", "medussa", "Did you mean 'medusa'"),
        ("sha256", None, "sha256=None was given; allowed are texts"),
        ("config", [1], r"config=\[1\] was given; allowed are mappings"),
        ("config.num_heads", "2", "num_heads='2' was given; allowed are integers from 1 to 32"),
        ("config.family", "gru", "'family' is no field of grounded heads"),
        ("backbone", "base", "backbone='base' was given; allowed are mappings"),
        ("backbone.name", None, r"backbone\.name=None was given; allowed are texts"),
        ("backbone.hidden_size", 2.5, r"backbone\.hidden_size=2\.5 was given; allowed are integers"),
        ("backbone.vocab_size", "29", r"backbone\.vocab_size='29' was given; allowed are integers"),
        ("backbone.embedding_fingerprint", 3, "embedding_fingerprint=3 was given; allowed are lists of numbers"),
        ("backbone.embedding_fingerprint", ["a"], r"fingerprint=\['a'\] was given; allowed are lists of numbers"),
        ("trained_backbone", {"folder": "x"}, r"field trained_backbone\.fingerprint of heads\.json was not given"),
        ("measured_acuracy", None, "'measured_acuracy' is no field of .* Did you mean 'measured_accuracy'"),
        ("measured_accuracy", 0.5, "measured_accuracy"),
        ("measured_accuracy", [0.5], "measured_accuracy"),
        ("measured_accuracy", [[]], "measured_accuracy"),
        ("measured_accuracy", [[0.5], [0.5, 0.1]], "measured_accuracy"),
        ("measured_accuracy", [["a"]], "measured_accuracy"),
        ("recipe", "x", "recipe='x' was given; allowed are mappings, or null"),
    ],
)
def test_a_field_of_another_type_is_named_with_its_file(saved, model, place, value, message):
    folder, _ = saved
    change_description(folder, place, value)
    with pytest.raises(ValueError, match=rf"heads\.json .*{message}"):
        heads.load(folder, model)


def test_a_description_that_is_no_object_is_refused(saved, model):
    folder, _ = saved
    (folder / "heads.json").write_text("3")
    with pytest.raises(ValueError, match="it is no description of heads"):
        heads.load(folder, model)


def test_a_fingerprint_of_another_length_is_another_backbones(saved, model):
    folder, _ = saved
    change_description(folder, "backbone.embedding_fingerprint", [0.5])
    with pytest.raises(ValueError, match="embedding of the given backbone"):
        heads.load(folder, model)


def change_description(folder, place, value):
    description = json.loads((folder / "heads.json").read_text())
    *way, last = place.split(".")
    inner = description
    for name in way:
        inner = inner[name]
    inner[last] = value
    (folder / "heads.json").write_text(json.dumps(description))


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_full_disk_leaves_the_old_files_whole(saved, model, monkeypatch, fails_at):
    folder, token_heads = saved
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(save_load.os, "fsync", full)
    with torch.no_grad():
        token_heads.bodies[0].first.bias += 1
    with pytest.raises(OSError, match=r"No space left on device.*untouched"):
        heads.save(token_heads, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    heads.load(folder, model)


def test_the_same_weights_give_the_same_bytes(saved, tmp_path):
    folder, token_heads = saved
    heads.save(token_heads, tmp_path / "again", recipe={"steps": 7})
    for name in ("heads.safetensors", "heads.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@contextlib.contextmanager
def largest_tensor():
    """Bytes of the largest tensor that an operation makes outside the meta device."""

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and not made.is_meta:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
            return made

    with Watch() as watch:
        yield watch


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("grounded", {"hidden_width": 131_072}, r"bodies.0.down.weight"),
        (
            "grounded",
            {"hidden_width": 3_000_000},
            r"hidden_width=3000000 was given; allowed are integers from 1 to 131072",
        ),
        ("dynamo", {"lora_rank": 4096}, r"missing layers.0.0.lora"),
        ("dynamo", {"lora_rank": 5_000_000}, r"lora_rank=5000000 was given; allowed are .* from 1 to 4096"),
        ("dynamo", {"layers_per_head": 16}, r"missing layers.0.1.*and 127 more"),
        ("dynamo", {"layers_per_head": 20_000}, r"layers_per_head=20000 was given; allowed are integers from 0 to 16"),
        ("medusa", {"num_heads": 32, "num_blocks": 8}, r"missing bodies.0.1.*and \d+ more"),
        ("eagle", {"intermediate_size": 1 << 18}, r"mlp.*weight"),
        (
            "eagle",
            {"intermediate_size": 10**18},
            r"intermediate_size=10{18} was given; allowed .* 1 to 1048576",
        ),
        ("eagle", {"head_dim": 10**18}, r"head_dim=10{18} was given; allowed are .* from 2 to 1048576"),
        ("gru", {"draft_vocabulary": 29}, r"missing draft_tokens_S"),
        ("gru", {"draft_vocabulary": 10**12}, r"draft_vocabulary=1000000000000 was given"),
    ],
)
def test_nothing_large_is_built_before_the_tensors_are_compared(model, tmp_path, family, fields, says):
    heads.save(heads.create(family, model, num_heads=1), tmp_path)
    description = json.loads((tmp_path / "heads.json").read_text())
    description["config"] |= fields
    (tmp_path / "heads.json").write_text(json.dumps(description))
    backbone = heads.Backbone(model)
    with largest_tensor() as watch, pytest.raises(ValueError, match=says):
        heads.load(tmp_path, backbone)
    assert watch.largest < 100_000


def test_loading_takes_no_random_numbers(model, tmp_path):
    """The shapes are compared on heads that draw none, so that what follows a load is what it was."""
    heads.save(heads.create("dynamo", model), tmp_path)
    states = []
    for check in (save_load.check_fit, lambda *_: None):
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(save_load, "check_fit", check)
            heads.load(tmp_path, model)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
