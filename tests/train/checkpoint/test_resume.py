"""A run that was killed goes on and ends as one that never stopped: weights bit by bit, logs line by line."""

import pytest
from matrices import wide
from tiny_run import assert_same_run, logged, prepare, train, write_config

from train.checkpoint.whole import newest_whole
from train.loop.trainer import HeadsTrainer


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    return tmp_path


def kill_at(monkeypatch, step):
    """In the middle of a step, after its first micro-batch."""
    training_step = HeadsTrainer.training_step

    def dying(self, *args, **kwargs):
        if self.state.global_step == step:
            raise Killed
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "training_step", dying)


TRAINED = {"heads": 3e-3, "base": 1e-3, "heads_to_base": 5e-4}
ALONE = {"heads": 3e-3, "base": 1e-3}
RUNS = {
    "frozen": {"trainer": {"save_total_limit": 1, "lr_scheduler_type": "linear"}},
    "dynamo": {"family": "dynamo", "rates": TRAINED},
    "lora-dropout": {"family": "dynamo", "rates": TRAINED, "lora": {"rank": 2, "dropout": 0.3}},
    "lookahead": {"family": None, "heads": None, "rates": ALONE, "label_shift": 2, "lookahead": 0.5},
    "draft vocabulary": {"family": "medusa", "heads": {"num_heads": 2, "draft_vocabulary": 6}},
    "taught": {"loss": {"hard": 0.5, "soft": 1.0, "temperature": 2.0, "regression": 0.3}},
    "stored states": {"cache_hidden_states": True, "data": {"packing": "whole"}},
    "streamed": {"data": {"streaming": True, "max_eval_blocks": 4, "packing": "whole"}},
}


KILLS = [((8, 6),), ((2, None), (8, 6), (11, 9))]  # in step, then resumed after step
COVERED = ("dynamo",)  # by its adapter here, and by tests/train/test_joint_runs.py


@pytest.mark.parametrize("kind", [wide(kind) if kind in COVERED else kind for kind in RUNS])
def test_a_resumed_run_ends_as_one_that_never_stopped(folder, monkeypatch, kind):
    whole = train(write_config(folder, "whole", **RUNS[kind]))
    parts = write_config(folder, "parts", **RUNS[kind])
    for step, expected in KILLS[kind == "frozen"]:
        flags = ("--resume", "true") if (folder / "parts").exists() else ()
        with monkeypatch.context() as patch:
            kill_at(patch, step)
            with pytest.raises(Killed):
                train(parts, *flags)
        found, damaged = newest_whole(folder / "parts")
        assert found == (folder / f"parts/checkpoint-{expected}" if expected else None)
        assert not damaged
    train(parts, "--resume", "true")
    assert_same_run(whole, folder / "parts")
    if kind == "taught":
        names = {f"head{k}_{loss}" for k in (1, 2) for loss in ("loss", "soft", "regression")}
        steps = [line for line in logged(whole) if "head1_loss" in line]
        assert all(names <= line.keys() for line in steps)


def test_a_run_that_was_killed_while_it_tokenised_starts_from_the_beginning(folder, monkeypatch, caplog):
    whole, parts = train(write_config(folder, "whole")), write_config(folder, "parts")

    def dying(*args, **kwargs):
        raise Killed

    with pytest.raises(ValueError, match="holds no checkpoint-"):
        train(parts, "--resume", "true")  # nothing was begun there
    with monkeypatch.context() as patch:
        patch.setattr("train.run.build_datasets", dying)
        with pytest.raises(Killed):
            train(parts)
    train(parts, "--resume", "true")
    assert "no checkpoint was saved yet; the run starts from the beginning" in caplog.text
    assert_same_run(whole, folder / "parts")


STREAMED = pytest.param({"streaming": True, "max_eval_blocks": 4}, 1, id="streamed")


@pytest.mark.parametrize(("data", "workers"), [pytest.param({}, 2, id="stored", marks=pytest.mark.wide), STREAMED])
def test_workers_and_a_resume_change_no_batch(folder, monkeypatch, data, workers):
    """Workers read, a stream's only one, the run is killed and goes on: the run without workers, bit by bit."""
    alone = train(write_config(folder, "alone", data=data))
    parts = write_config(folder, "parts", data=data, trainer={"dataloader_num_workers": workers})
    with monkeypatch.context() as patch:
        kill_at(patch, 8)
        with pytest.raises(Killed):
            train(parts)
    train(parts, "--resume", "true")
    assert_same_run(alone, folder / "parts")


def test_the_sums_that_are_logged_make_the_loss(folder):
    """Step by step: a mean of steps is not the mean over their labels, of which steps have unequal numbers."""
    lines = logged(
        train(write_config(folder, "taught", **RUNS["taught"], trainer={"max_steps": 4, "logging_steps": 1}))
    )
    steps = [line for line in lines if "head1_loss" in line]
    assert len(steps) == 4
    for line in steps:
        of_heads = [0.5 * line[f"head{k}_loss"] + 4 * line[f"head{k}_soft"] for k in (1, 2)]
        distances = [0.3 * line[f"head{k}_regression"] for k in (1, 2)]
        assert line["loss"] == pytest.approx(sum(of_heads + distances), rel=1e-6)  # float32 sums
