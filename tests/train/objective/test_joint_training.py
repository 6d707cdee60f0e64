"""Backbone and heads trained together: the gradient gate by another route, what is saved, whole runs, look-ahead."""

import json
import re
import shutil

import pytest
import test_run
import torch
from head_losses import head_rows
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_run import folder, metrics, own_cache, write_config  # noqa: F401 - fixtures
from tiny import random_tokens, tiny_model
from transformers import AutoTokenizer, set_seed
from typer.testing import CliRunner

import heads
from heads.backbone.model import Backbone
from heads.checkpoint import save_load as checkpoint
from heads.checkpoint.backbone import LoraSettings, add_adapter
from heads.checkpoint.opening import open_heads
from heads.cli.main import app
from heads.families import create
from heads.interface.token_heads import TeacherForcing
from train.config import read_config
from train.loop.building import load_trainable
from train.loop.optimizer_groups import optimizer_groups
from train.loop.overhead import measure_heads_overhead
from train.objective.model import TrainedModel
from train.run import run

SCALE = 0.1
COUNT = 16  # of labels, as far as the loss knows: its division, in float32, is exact
# Models are float64, but their norms and softmaxes round to float32 inside; what is compared reaches 0.1 and more.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}


def build(architecture="llama", family="dynamo", *, seed=0, **settings):
    """A backbone and heads in float64; the same weights at every call."""
    backbone = Backbone(tiny_model(architecture, attn="eager"))
    torch.manual_seed(seed)
    settings = {"trains_backbone": True, **settings}
    config = settings.pop("heads", {})
    token_heads = None if family is None else create(family, backbone, num_heads=2, **config).double()
    if token_heads is not None:
        for p in token_heads.parameters():
            torch.nn.init.normal_(p, std=0.2)
    return TrainedModel(backbone, token_heads, **settings)


def a_batch(rows=2, length=12):
    tokens = random_tokens(rows, length, seed=3)
    mask = torch.rand(rows, length, generator=torch.Generator().manual_seed(4)) > 0.2
    documents = (torch.arange(length) >= 7).long().expand(rows, length)
    return {"input_ids": tokens, "loss_mask": mask, "document_ids": documents}


def backbone_gradients(model):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.model.named_parameters()}


def joint(scale, architecture, family, **config):
    model = build(architecture, family, gradient_scale=scale, heads=config)
    model(**a_batch(), counts_K=torch.full((3,), COUNT))["loss"].backward()
    return backbone_gradients(model)


def apart(architecture, family, **config):
    """g_1, g_2, …: each head's loss alone, plain, through a model without gates."""
    found = []
    for which in range(3):
        model = build(architecture, family, heads=config)
        batch = a_batch()
        rows = list(head_rows(model, batch, with_backbone=True))[which]
        logits = rows.projection(rows.hidden_RD)
        labels = batch["input_ids"].flatten()[rows.rows_R + rows.shift]
        (torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / COUNT).backward()
        found.append(backbone_gradients(model))
    return found


# llama and gpt_neox have an unembedding of their own, qwen3 has it tied to its embedding.
CASES = [
    ("llama", "dynamo", {}),
    ("gpt_neox", "dynamo", {}),
    ("qwen3", "dynamo", {}),
    ("llama", "dynamo", {"tap": "last"}),
    ("llama", "dynamo", {"unembedding": "own", "layers_per_head": 2}),
    ("llama", "dynamo", {"lora_rank": 2}),
    ("gpt_neox", "dynamo", {"lora_rank": 2}),
    ("llama", "grounded", {"unembedding": "shared"}),
    ("qwen3", "grounded", {"unembedding": "shared"}),
    ("qwen3", "medusa", {}),
]


@pytest.mark.parametrize(("architecture", "family", "config"), CASES)
def test_a_gradient_is_the_first_tokens_plus_the_scaled_rest(architecture, family, config):
    """g = g_1 + (LR_MB / LR_B) · (g_2 + g_3), for every parameter of the backbone, whichever way gradients flow."""
    first, *others = apart(architecture, family, **config)
    assert any(g.abs().max() > 0.1 for g in others[0].values())
    for scale in (SCALE, 0.0, 1.0):
        found = joint(scale, architecture, family, **config)
        for name, gradient in found.items():
            wanted = first[name] + scale * sum(g[name] for g in others)
            torch.testing.assert_close(gradient, wanted, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def last_layer(name, model="llama"):
    return ".layers.2." in name if model == "llama" else ".layers.3." in name


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_which_parts_of_the_backbone_learn_from_heads(architecture):
    """The last layer belongs to the first token alone; stem, norm and unembedding learn from all."""
    _, *others = apart(architecture, "dynamo")
    for name, gradient in others[0].items():
        assert bool(gradient.any()) != last_layer(name, architecture), name


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3"])
def test_at_scale_0_the_backbone_is_trained_as_if_alone(architecture):
    alone = build(architecture, None)
    alone(**a_batch(), counts_K=torch.full((1,), COUNT))["loss"].backward()
    wanted = backbone_gradients(alone)
    for name, gradient in joint(0.0, architecture, "dynamo").items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3"])
def test_steps_at_scale_0_leave_the_backbone_as_training_alone_does(architecture):
    models = [build(architecture, "dynamo", gradient_scale=0.0), build(architecture, None)]
    for model in models:
        groups = optimizer_groups(model, heads_rate=1e-2, base_rate=1e-3, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups)
        for _ in range(3):
            model(**a_batch())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    start = build(architecture, None).model.state_dict()
    trained, alone = (model.model.state_dict() for model in models)
    assert any(not torch.equal(start[name], tensor) for name, tensor in alone.items())
    for name, tensor in alone.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}, {"start": "copied", "layers_per_head": 2}])
def test_gradient_checkpointing_changes_no_gradient(config):
    """Layers of heads are copies of the backbone's and recompute themselves in backward too."""
    wanted = joint(SCALE, "llama", "dynamo", **config)
    model = build("llama", "dynamo", gradient_scale=SCALE, heads=config)
    fresh = tiny_model("llama", attn="eager")
    fresh.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    token_heads = create("dynamo", Backbone(fresh), num_heads=2, **config).double()
    token_heads.load_state_dict(model.token_heads.state_dict())
    recomputed = TrainedModel(token_heads.backbone, token_heads, trains_backbone=True, gradient_scale=SCALE).train()
    recomputed(**a_batch(), counts_K=torch.full((3,), COUNT))["loss"].backward()
    for name, gradient in backbone_gradients(recomputed).items():
        torch.testing.assert_close(gradient, wanted[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_measuring_what_heads_add_leaves_nothing_behind():
    model = build().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    share = measure_heads_overhead(model, a_batch(), repeats=1)
    assert share > -1
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(drawn, torch.random.get_rng_state())


# --- saving ----------------------------------------------------------------------------------------------------------


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
        ("gpt_neox", ["lm_head"], "'lm_head', the unembedding.*query_key_value can have one"),
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
    with pytest.raises(ValueError, match=rf"names the backbone .* {saved.name}, but does not hold it"):
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
        patch.setattr(checkpoint.os, "fsync", full)
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
    heads.save(token_heads, tmp_path / "second", recipe=checkpoint.read_description(tmp_path / "first")["recipe"])
    again, loaded = heads.load_with_backbone(tmp_path / "second")
    assert all(torch.equal(a, b) for a, b in zip(outputs(again, loaded), outputs(model, token_heads), strict=True))


def test_a_failed_save_leaves_no_backbone_behind(tmp_path, monkeypatch):
    _, model, token_heads = changed(where=tmp_path)
    save_changed(model, token_heads, tmp_path / "heads")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1.5)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_whole", full)
    with pytest.raises(OSError, match="No space"):
        save_changed(model, token_heads, tmp_path / "heads")
    assert len(list((tmp_path / "heads").glob("backbone-*"))) == 1


# --- whole runs ------------------------------------------------------------------------------------------------------

JOINT = {"family": "dynamo", "rates": {"base": 1e-3, "heads": 1e-2, "heads_to_base": 1e-4}}


def train(folder, name, *flags, **changes):  # noqa: F811
    return run(read_config(["--config", write_config(folder, name, **(JOINT | changes)), *flags]))


def weights(where):
    """All that a run saved, heads and backbone or adapter."""
    (backbone,) = where.glob("backbone-*")
    (tensors,) = backbone.glob("*.safetensors")
    return load_file(where / "heads.safetensors") | {f"base {n}": t for n, t in load_file(tensors).items()}


@pytest.mark.parametrize("lora", [{}, {"rank": 4, "alpha": 8.0}])
def test_a_joint_run_learns_saves_and_resumes(folder, lora):  # noqa: F811
    name = f"joint-{len(lora)}"
    whole = train(folder, f"{name}-whole", trainer={"max_steps": 6}, lora=lora)
    logged = metrics(whole)
    assert logged[-2]["eval_backbone_loss"] > 0
    assert {"backbone_loss", "head1_loss", "head2_loss"} <= set(logged[0])
    assert [("heads_overhead" in line) for line in logged].count(True) == 1
    last = weights(whole / "last")
    start = load_file(folder / "base/model.safetensors")
    if lora:
        assert any(t.abs().max() > 0 for n, t in last.items() if "lora_B" in n), "the adapter was trained"
        assert not any("lora" in n for n in last if not n.startswith("base "))
    else:
        moved = [n for n, t in start.items() if not torch.equal(last[f"base {n}"], t)]
        assert len(moved) == len(start)
    parts = train(folder, name, trainer={"max_steps": 6}, save_every_steps=3, lora=lora)
    (parts / "checkpoint-6").rename(folder / f"{name}-put-away")
    train(folder, name, "--resume", "true", trainer={"max_steps": 6}, save_every_steps=3, lora=lora)
    for tensor_name, tensor in weights(parts / "last").items():
        torch.testing.assert_close(tensor, last[tensor_name], rtol=0, atol=1e-6)
    _, token_heads = heads.load_with_backbone(parts / "last")
    assert token_heads.measured_accuracy is not None
    assert AutoTokenizer.from_pretrained(next((parts / "last").glob("backbone-*"))) is not None
    shown = " ".join(CliRunner().invoke(app, ["info", str(parts / "last")]).stdout.split())
    assert re.search(r"backbone-[0-9a-f]{8}; load both with heads\.load_with_backbone", shown)
    assert ("LoRA adapter" in shown) == bool(lora)


@pytest.mark.parametrize("lora", [{}, {"rank": 4}])
def test_a_backbone_alone_resumes(folder, lora):  # noqa: F811
    alone = {"family": None, "rates": {"base": 1e-3}, "lora": lora, "trainer": {"max_steps": 6}}
    name = f"alone-{len(lora)}"
    whole = train(folder, f"{name}-whole", "--heads", "{}", **alone)
    parts = train(folder, name, "--heads", "{}", save_every_steps=3, **alone)
    (parts / "checkpoint-6").rename(folder / f"{name}-put-away")
    train(folder, name, "--heads", "{}", "--resume", "true", save_every_steps=3, **alone)
    for wanted, found in zip(
        sorted(whole.glob("last/*.safetensors")), sorted(parts.glob("last/*.safetensors")), strict=True
    ):
        tensors = load_file(found)
        for tensor_name, tensor in load_file(wanted).items():
            torch.testing.assert_close(tensors[tensor_name], tensor, rtol=0, atol=1e-6)
    assert bool(list(whole.glob("last/adapter_model.safetensors"))) == bool(lora)


def test_a_copied_folder_opens_without_the_original_backbone(folder, tmp_path):  # noqa: F811
    trained = train(folder, "joint-copied")
    copied = shutil.copytree(trained / "last", tmp_path / "copy")
    (folder / "base").rename(folder / "hidden")
    try:
        opened = open_heads([copied])
        assert len(opened.tokenizer) > 0
    finally:
        (folder / "hidden").rename(folder / "base")


def test_an_adapter_is_trained_on_with_its_own_rank(folder):  # noqa: F811
    first = train(folder, "joint-adapted", lora={"rank": 4})
    with pytest.raises(ValueError, match=r"adapter of rank 4; to train it on, give lora\.rank 4"):
        train(folder, "joint-otherwise", init_from=str(first / "last"))
    frozen = train(folder, "joint-on-adapter", init_from=str(first / "last"), rates={"heads": 1e-2, "base": None})
    assert list((frozen / "last").glob("backbone-*/adapter_model.safetensors")), "the adapter goes with its heads"


def adapter_of(model):
    return {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if "lora_" in n}


def test_an_adapter_learns_in_float32_on_a_bfloat16_backbone(folder):  # noqa: F811
    """Every entry moves at a rate that bfloat16 rounds away; a run that goes on, or starts from it, has all bits."""
    half = {
        "family": "medusa",
        "backbone": {"dtype": "bfloat16"},
        "lora": {"rank": 4},
        "rates": {"base": 1e-4, "heads": 1e-3},
        "trainer": {"max_steps": 4},
    }
    path = write_config(folder, "half-start", **(JOINT | half))
    config = read_config(["--config", path])
    set_seed(config.seed)
    start = adapter_of(load_trainable(config, torch.device("cpu")))
    assert {t.dtype for t in start.values()} == {torch.float32}
    whole = train(folder, "half", save_every_steps=2, **half)
    trained = {n.removeprefix("base base_model.model."): t for n, t in weights(whole / "last").items() if "lora_" in n}
    assert {t.dtype for t in trained.values()} == {torch.float32}
    for name, tensor in trained.items():
        assert (tensor != start[name]).float().mean() > 0.99, name
    before = {name: tensor.clone() for name, tensor in weights(whole / "last").items()}
    shutil.rmtree(whole / "checkpoint-4")
    train(folder, "half", "--resume", "true", save_every_steps=2, **half)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(whole / "last").items())
    on = read_config(["--config", write_config(folder, "half-on", **(JOINT | half), init_from=str(whole / "last"))])
    for name, tensor in adapter_of(load_trainable(on, torch.device("cpu"))).items():
        assert torch.equal(tensor, trained[name]), name


def test_init_from_goes_on_with_the_changed_backbone(folder):  # noqa: F811
    first = train(folder, "joint-first", trainer={"max_steps": 10})
    trained = metrics(first)[-2]  # the last line says what became of the backbone
    init = {"init_from": str(first / "last"), "trainer": {"max_steps": 1, "eval_on_start": True}}
    start = metrics(train(folder, "joint-again", **init))[0]
    assert start["step"] == 0
    for name in ("eval_backbone_loss", "eval_head1_loss", "eval_head2_loss"):
        assert start[name] == pytest.approx(trained[name], rel=1e-5)


def test_a_run_draws_the_same_with_and_without_the_measured_overhead(folder, monkeypatch):  # noqa: F811
    measured = train(folder, "joint-measured")
    monkeypatch.setattr("train.run.log_heads_overhead", lambda trainer: None)
    plain = train(folder, "joint-unmeasured")
    found = weights(measured / "last")
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights(plain / "last").items())


def test_heads_on_a_frozen_backbone_save_none(folder):  # noqa: F811
    where = test_run.train(folder, "joint-frozen", family="dynamo")
    assert not list((where / "last").glob("backbone-*"))
    assert "heads_overhead" not in metrics(where)[0]


TABLE_4 = {"70m": 1e-5, "160m": 6e-6, "410m": 3e-6, "1b": 2e-6, "1_4b": 2e-6, "2_8b": 1.6e-6, "6_9b": 1.2e-6}


@pytest.mark.parametrize("size", TABLE_4)
def test_paper_settings_of_the_suite(size):
    """DynaMo, table 4 and appendix A.1: LR_M is 100 times LR_B, LR_MB a tenth of it."""
    config = read_config(["--config", str(test_run.ROOT / f"configs/pile/dynamo_pythia_{size}.yaml")])
    base = TABLE_4[size]
    assert config.rates.base == base
    assert (config.rates.heads, config.rates.heads_to_base) == pytest.approx((100 * base, base / 10))
    assert (config.optimizer.beta1, config.optimizer.beta2, config.optimizer.eps) == (0.9, 0.95, 1e-8)
    trainer = config.trainer
    assert trainer["per_device_train_batch_size"] * trainer["gradient_accumulation_steps"] * 8 == 64
    assert (trainer["num_train_epochs"], trainer["lr_scheduler_type"], trainer["warmup_steps"]) == (1, "cosine", 0.01)
    assert (config.num_heads, config.data.block_size, config.data.eval_fraction) == (2, 2048, 0.03)
    assert config.evaluation.every_steps == 5000


# --- look-ahead ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "mistral_windowed", "gemma3"])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_position_reads_the_next_token_if_it_sees_ahead_and_never_the_second_next(architecture, attn, share):
    backbone = Backbone(tiny_model(architecture, attn=attn))
    model = TrainedModel(backbone, None, label_shift=2, lookahead=share)
    length, first_of_second = 10, 6
    documents = (torch.arange(length) >= first_of_second).long()[None]
    tokens = random_tokens(1, length, seed=6)

    def final_states(tokens):
        with torch.no_grad():
            return model.backbone_states(tokens, torch.ones_like(tokens).bool(), documents).final_BTD[0]

    before = final_states(tokens)
    for changed_at in range(1, length):
        other = tokens.clone()
        other[0, changed_at] = 3 + (tokens[0, changed_at] - 2) % 20
        differs = (final_states(other) - before).abs().amax(dim=1) > 1e-9
        start = 0 if changed_at < first_of_second else first_of_second
        inside = torch.arange(length) < (first_of_second if changed_at < first_of_second else length)
        first_reader = max(start, changed_at - (1 if share else 0))
        reads = inside & (torch.arange(length) >= first_reader)
        assert not bool(differs[~reads].any()), f"x_{changed_at} reaches {differs.nonzero().flatten().tolist()}"
        assert bool(differs[first_reader]), f"x_{changed_at} does not reach {first_reader}"


def test_the_share_that_sees_ahead_is_drawn_anew_at_every_forward():
    model = TrainedModel(Backbone(tiny_model("llama")), None, label_shift=2, lookahead=0.5)
    torch.manual_seed(0)
    with torch.no_grad():
        sums = {model(**a_batch())["loss"].item() for _ in range(4)}
    assert len(sums) == 4


def test_recomputation_in_backward_sees_the_same_tokens():
    gradients = []
    for recomputed in (False, True):
        hf = tiny_model("llama")
        if recomputed:
            hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = TrainedModel(Backbone(hf), None, label_shift=2, lookahead=0.5).train()
        torch.manual_seed(0)
        model(**a_batch())["loss"].backward()
        gradients.append(backbone_gradients(model))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
