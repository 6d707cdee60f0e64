"""The backbone as found is the teacher: it never changes, it starts at no divergence and no gradient, runs resume."""

import json
import math

import pytest
import torch
from head_losses import head_rows
from joint_model import TOLERANCE, a_batch, backbone_gradients
from learned_run import folder, metrics, own_cache, train, train_jointly, write_config  # noqa: F401 - fixtures
from safetensors.torch import load_file
from tiny import tiny_model
from tiny_run import assert_same_run
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

from heads.backbone.model import Backbone
from heads.checkpoint.adapter import LoraSettings, adapter_off, add_adapter
from heads.cli.main import app
from heads.families import create
from train.config import read_config
from train.engine.engine import Engine
from train.loop.building import refuse_what_cannot_be_split
from train.objective.model import TrainedModel
from train.objective.weights import SelfDistillationConfig

SETTINGS = {"rates": {"base": 1e-3, "heads": 1e-2, "heads_to_base": None}, "self_distillation": {"weight": 0.5}}


def build(*, adapter=True, weight=1.0, temperature=1.0, checkpointing=False, dropout=0.0, inner_dropout=0.0, **options):
    """A backbone and heads in float64, with what makes the teacher another model where it is not switched off."""
    hf = tiny_model("llama", attn="eager", attention_dropout=inner_dropout)
    if checkpointing:
        hf.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if adapter:
        torch.manual_seed(0)
        add_adapter(hf, LoraSettings(rank=2, dropout=dropout))
    backbone = Backbone(hf)
    torch.manual_seed(1)
    token_heads = create("medusa", backbone, num_heads=2).double()
    settings = SelfDistillationConfig(weight=weight, temperature=temperature)
    model = TrainedModel(backbone, token_heads, trains_backbone=True, self_distillation=settings, **options)
    return model.train()


@torch.no_grad()
def change(model):
    """As after long training."""
    generator = torch.Generator().manual_seed(2)
    for p in model.model.parameters():
        if p.requires_grad:
            p.add_(0.3 * torch.randn(p.shape, generator=generator))


def own(model):
    return next(head_rows(model, a_batch(), with_backbone=True))


@pytest.mark.parametrize("adapter", [True, False])
def test_the_teacher_stays_as_found_however_far_the_student_went(adapter):
    """With the adapter off, or from the copy: logits of a model that never had either."""
    model = build(adapter=adapter, dropout=0.5 if adapter else 0.0)
    change(model)
    fresh = TrainedModel(Backbone(tiny_model("llama", attn="eager")), None)
    with torch.no_grad():
        (wanted,) = head_rows(fresh, a_batch(), with_backbone=True)
        found = own(model)
    logits = model.teacher.projection(found.distillation.hidden())
    torch.testing.assert_close(logits, wanted.projection(wanted.hidden_RD), rtol=0, atol=1e-12)
    assert (found.projection(found.hidden_RD) - logits).abs().max() > 0.1, "and the student is another by now"
    assert not found.distillation.hidden().requires_grad
    assert model.model.training
    assert all(p.requires_grad for n, p in model.model.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("adapter", [True, False])
def test_at_the_start_there_is_no_divergence_and_no_gradient(adapter):
    model = build(adapter=adapter)
    out = model(**a_batch(), counts_K=torch.full((3,), 16), heads_weight=0.0)
    assert out["loss"].item() == pytest.approx(0, abs=1e-6)
    assert out["logged_sums_M"][-1].item() == pytest.approx(0, abs=1e-5)
    out["loss"].backward()
    for name, gradient in backbone_gradients(model).items():
        assert gradient.abs().max() < 1e-6, name  # softmaxes of one number, rounded twice
    change(model)
    model(**a_batch(), heads_weight=0.0)["loss"].backward()
    assert any(g.abs().max() > 1e-3 for g in backbone_gradients(model).values())


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 1.0), (1.0, 2.0)])
def test_the_loss_is_labels_and_divergence_in_their_shares(weight, temperature):
    model = build(weight=weight, temperature=temperature)
    change(model)
    with torch.no_grad():
        found = own(model)
        student = found.projection(found.hidden_RD)
        teacher = model.teacher.projection(found.distillation.hidden())
        labels = a_batch()["input_ids"].flatten()[found.rows_R + 1]
        soft = F.kl_div(
            (student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1), reduction="batchmean"
        )
        wanted = (1 - weight) * F.cross_entropy(student, labels) + weight * temperature**2 * soft
        loss = model(**a_batch(), heads_weight=0.0)["loss"]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_gradient_checkpointing_changes_no_gradient():
    """What is recomputed in backward is the student, with its adapter on, and its dropout drawn alike."""
    found = []
    for checkpointing in (False, True):
        model = build(checkpointing=checkpointing, weight=0.5, dropout=0.3)
        change(model)
        torch.manual_seed(5)
        model(**a_batch(), counts_K=torch.full((3,), 16))["loss"].backward()
        found.append(backbone_gradients(model))
    assert any(g.abs().max() > 0.01 for g in found[0].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("adapter", [True, False])
def test_the_teachers_pass_draws_nothing(adapter):
    """Neither the adapter's dropout nor the backbone's own, which trains with both."""
    model = build(adapter=adapter, dropout=0.5 if adapter else 0.0, inner_dropout=0.5)
    before = torch.random.get_rng_state()
    tokens = a_batch()["input_ids"]
    _, positions, mask = model.attention(torch.zeros_like(tokens))
    with model.teacher.running():
        model.run(model.teacher.backbone, tokens, positions, mask)
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.model.training
    with torch.no_grad():
        own(model)
    assert not torch.equal(before, torch.random.get_rng_state())


def test_the_adapter_comes_back_where_the_pass_fails():
    model = build()
    with pytest.raises(RuntimeError, match="on purpose"), adapter_off(model.model):
        raise RuntimeError("on purpose")
    assert not any(getattr(m, "disable_adapters", False) is True for m in model.model.modules())


@pytest.mark.parametrize("lora", [{"rank": 4, "dropout": 0.1}, {}])
def test_a_run_goes_on_bit_by_bit_and_says_what_became_of_the_backbone(folder, lora, caplog):  # noqa: F811
    options = {
        "trainer": {"max_steps": 6, "gradient_accumulation_steps": 2, "logging_steps": 1},
        "lora": lora,
        "save_every_steps": 3,
    }
    name = f"self-{len(lora)}"
    with caplog.at_level("INFO"):
        whole = train_jointly(folder, f"{name}-whole", **options, **SETTINGS)
    lines = metrics(whole)
    drifts = [line["backbone_kl"] for line in lines if "backbone_kl" in line]
    assert abs(drifts[0]) < 1e-5 < drifts[-1], "nothing at the start, in float32"
    assert lines[-2]["eval_backbone_kl"] > 0
    last = lines[-1]
    assert last["backbone_ppl_after"] == pytest.approx(math.exp(lines[-2]["eval_backbone_loss"]))
    assert last["backbone_ppl_kl_to_original"] == lines[-2]["eval_backbone_kl"]
    (said,) = [r.getMessage() for r in caplog.records if "PPL1 of the backbone" in r.getMessage()]
    assert f"{last['backbone_ppl_before']:.2f} before, {last['backbone_ppl_after']:.2f} after (held-out" in said
    recorded = json.loads((whole / "last/heads.json").read_text())["recipe"]["measured"]["backbone_ppl"]
    assert recorded == {n: last[f"backbone_ppl_{n}"] for n in ("before", "after", "tokens", "kl_to_original")}
    shown = " ".join(CliRunner().invoke(app, ["info", str(whole / "last")]).stdout.split())
    assert f"{recorded['before']:.2f} before" in shown
    parts = train_jointly(folder, name, **options, **SETTINGS)
    (parts / "checkpoint-6").rename(folder / f"{name}-put-away")
    train_jointly(folder, name, "--resume", "true", **options, **SETTINGS)
    assert_same_run(whole, parts)
    assert not any("original" in n for path in parts.rglob("*.safetensors") for n in load_file(path))


def test_before_is_the_loss_at_step_0(folder):  # noqa: F811
    """Whether the run begins with an evaluation or measures the backbone alone."""
    options = {"rates": {"base": 1e-3, "heads_to_base": None}, "lora": {"rank": 2}}
    evaluated = metrics(train_jointly(folder, "before-a", trainer={"max_steps": 1, "eval_on_start": True}, **options))
    alone = metrics(train_jointly(folder, "before-b", trainer={"max_steps": 1}, **options))
    wanted = math.exp(evaluated[0]["eval_backbone_loss"])
    assert evaluated[-1]["backbone_ppl_before"] == wanted
    assert alone[-1]["backbone_ppl_before"] == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": {"base": None, "heads_to_base": None}}, "no backbone is trained with heads"),
        ({"self_distillation": {"weight": 1.5}}, r"weight=1\.5 was given; allowed are numbers from 0 to 1"),
        ({"self_distillation": {"temperature": 0.0}}, "allowed are numbers above 0"),
        ({"self_distillation": {"weight": 0.0, "temperature": 2.0}}, "without a weight"),
    ],
)
def test_what_is_refused(folder, changes, message):  # noqa: F811
    merged = {key: {**SETTINGS.get(key, {}), **value} for key, value in (SETTINGS | changes).items()}
    with pytest.raises(ValueError, match=message):
        read_config(["--config", write_config(folder, "refused", **merged)])


def test_a_second_backbone_is_not_split(folder):  # noqa: F811
    whole = read_config(["--config", write_config(folder, "whole", **SETTINGS)])
    with pytest.raises(ValueError, match="a second, unsharded backbone in each process"):
        refuse_what_cannot_be_split(whole, Engine.FSDP2)
    refuse_what_cannot_be_split(whole, Engine.DDP)
    lora = read_config(["--config", write_config(folder, "lora", lora={"rank": 2}, **SETTINGS)])
    refuse_what_cannot_be_split(lora, Engine.ZERO3)
