"""Warm-in of the heads' loss: its values by hand, the gradient that it gives, what it does not touch, and resuming."""

import math

import pytest
import torch
from joint_model import TOLERANCE, a_batch, apart, backbone_gradients, build
from learned_run import folder, metrics, own_cache, train, train_jointly, write_config  # noqa: F401 - fixtures
from tiny_run import assert_same_run

from train.config import read_config
from train.objective.model import TrainedModel
from train.objective.weights import WarmInConfig, warmth

JOINT = {"rates": {"base": 1e-3, "heads": 1e-2, "heads_to_base": None}}
SINE = {"schedule": "sine", "steps": 8, "coefficient": 0.5}


def test_schedules_by_hand():
    assert [warmth("linear", t, 5) for t in range(7)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1, 1])
    half = math.sqrt(0.5)
    assert [warmth("sine", t, 4) for t in (0, 2, 4, 100)] == pytest.approx([0, half, 1, 1])
    assert [warmth("constant", t, 0) for t in (0, 9)] == [1, 1]
    share = WarmInConfig(schedule="linear", steps=0.1, coefficient=0.2)
    assert [share.weight(t, 50) for t in (0, 1, 4, 5, 49)] == pytest.approx([0, 0.04, 0.16, 0.2, 0.2])
    assert WarmInConfig(schedule="sine", steps=30).length(50) == 30


@pytest.mark.parametrize("weight", [0.0, 0.2, 1.0])
def test_the_combined_gradient_is_the_sum_of_separate_ones(weight):
    """g = g_backbone + LR_MB / LR_B · c · s(t) · (g_1 + g_2): the gate and the weight multiply each other."""
    first, *others = apart("llama", "medusa")
    model = build("llama", "medusa", gradient_scale=0.5)
    model(**a_batch(), counts_K=torch.full((3,), 16), heads_weight=weight)["loss"].backward()
    assert any(g.abs().max() > 0.1 for g in others[0].values())
    for name, gradient in backbone_gradients(model).items():
        wanted = first[name] + 0.5 * weight * sum(g[name] for g in others)
        torch.testing.assert_close(gradient, wanted, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
    assert all((p.grad != 0).any() == (weight > 0) for p in model.token_heads.parameters() if p.ndim == 2)


def test_the_backbones_own_loss_is_not_scaled():
    losses = []
    for weight in (0.0, 1.0):
        out = build("llama", "medusa")(**a_batch(), counts_K=torch.full((3,), 16), heads_weight=weight)
        losses.append((out["loss"].item(), out["loss_sums_K"]))
    (without, sums), (whole, same) = losses
    assert torch.equal(sums, same)
    assert without == pytest.approx(float(sums[0]) / 16)
    assert whole == pytest.approx(float(sums.sum()) / 16)


def test_a_run_weighs_by_its_step_and_goes_on_bit_by_bit(folder):  # noqa: F811
    options = {"trainer": {"max_steps": 6, "logging_steps": 1}, "lora": {"rank": 4, "dropout": 0.1}, "warm_in": SINE}
    whole = train_jointly(folder, "warm-whole", save_every_steps=3, **options, **JOINT)
    found = [line["heads_weight"] for line in metrics(whole) if "heads_weight" in line]
    assert found == pytest.approx([0.5 * math.sin(math.pi * t / 16) for t in range(6)])
    parts = train_jointly(folder, "warm-parts", save_every_steps=3, **options, **JOINT)
    (parts / "checkpoint-6").rename(folder / "warm-put-away")
    train_jointly(folder, "warm-parts", "--resume", "true", save_every_steps=3, **options, **JOINT)
    assert_same_run(whole, parts)


def test_the_model_is_given_the_weight_of_the_step_under_way(folder, monkeypatch):  # noqa: F811
    """Of every micro-batch; what is logged says nothing of what was trained with."""
    given, forward = [], TrainedModel.forward

    def spied(self, *args, **kwargs):
        if "heads_weight" in kwargs:
            given.append(kwargs["heads_weight"])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TrainedModel, "forward", spied)
    steps = {"max_steps": 3, "gradient_accumulation_steps": 2}
    train_jointly(
        folder, "warm-given", trainer=steps, warm_in={"schedule": "linear", "steps": 2, "coefficient": 0.5}, **JOINT
    )
    assert given == pytest.approx([0, 0, 0.25, 0.25, 0.5, 0.5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rates": {"heads": 1e-3}, "warm_in": {"coefficient": 0.2}}, "AdamW divides by the gradient's size"),
        ({"rates": {"base": 1e-4, "heads_to_base": 0.0}, "warm_in": SINE}, "heads change no backbone"),
        ({"warm_in": {"schedule": "linear"}}, "linear and sine take steps"),
        ({"warm_in": {"steps": 0.1}}, "constant takes none"),
        ({"warm_in": {"coefficient": 0.0}}, "allowed are numbers above 0"),
        ({"warm_in": {"schedule": "sine", "steps": -1}}, "give whole steps, or a share"),
        (
            {"warm_in": {"schedule": "sine", "steps": 1.5}},
            r"warm_in\.steps=1\.5 was given; give whole steps, or a share",
        ),
    ],
)
def test_what_is_refused(folder, changes, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        read_config(["--config", write_config(folder, "refused", **(JOINT | changes))])


def test_under_adamw_the_heads_own_weights_do_not_feel_a_constant_coefficient(folder):  # noqa: F811
    """Why it is refused on a frozen backbone: one step with a fifth of the loss is the same step."""
    moved = []
    for weight in (0.2, 1.0):
        model = build("llama", "medusa")
        optimizer = torch.optim.AdamW(model.token_heads.parameters(), lr=1e-3, eps=1e-20)
        before = [p.detach().clone() for p in model.token_heads.parameters()]
        for _ in range(3):
            optimizer.zero_grad()
            model(**a_batch(), heads_weight=weight)["loss"].backward()
            optimizer.step()
        moved.append([p.detach() - b for p, b in zip(model.token_heads.parameters(), before, strict=True)])
    for one, other in zip(*moved, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_a_warm_in_that_the_run_does_not_reach_is_told(folder, caplog):  # noqa: F811
    steps = {"max_steps": 2}
    train_jointly(folder, "warm-long", trainer=steps, warm_in={"schedule": "linear", "steps": 4}, **JOINT)
    assert (
        "warm_in.steps=4 is longer than the run of 2 steps; at its last step the heads' loss has 25 % of" in caplog.text
    )
    caplog.clear()
    train_jointly(folder, "warm-whole-run", trainer=steps, warm_in={"schedule": "linear", "steps": 2}, **JOINT)
    assert "warm_in" not in caplog.text


def test_default_is_what_was(folder):  # noqa: F811
    assert not any("heads_weight" in line for line in metrics(train(folder, "no-warm-in")))
