"""Signals to real processes: SIGKILL at any moment, SIGTERM, SIGUSR1 and Ctrl-C with a save and a code."""

import os
import signal
import time

import pytest
from tiny_run import (
    add_bad_token,
    assert_same_run,
    logged,
    prepare,
    signalled_script,
    slow_script,
    start,
    tensors,
    train,
    wait_until,
    write_config,
)

from benchmarks.training.engines import free_port
from train.checkpoint.interruption import EXIT_CODE, MARKER, SAME_KEY, SAME_SIGNAL, Interruption
from train.checkpoint.progress import read_progress
from train.checkpoint.whole import LIST, checkpoints, newest_whole, step_of
from train.loop.trainer import HeadsTrainer


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    return tmp_path


def is_saving(run_folder, step):
    folder = run_folder / f"checkpoint-{step}"
    return folder.is_dir() and any(folder.iterdir()) and not (folder / LIST).exists()


def test_killed_during_saves_and_resumed_ends_the_same(folder):
    """In the first save, when nothing is whole yet; in a later one; then in this process to the end."""
    whole = train(write_config(folder, "whole"))
    parts = write_config(folder, "parts")
    for number, flags in ((3, ()), (9, ("--resume", "true"))):
        process = start(parts, *flags, script=slow_script(folder, save=0.3))
        wait_until(lambda number=number: is_saving(folder / "parts", number), process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert (folder / "parts" / f"checkpoint-{number}").is_dir()
    found, damaged = newest_whole(folder / "parts")
    assert found == folder / "parts/checkpoint-6"
    assert list(damaged) == [folder / "parts/checkpoint-9"]
    train(parts, "--resume", "true")
    assert_same_run(whole, folder / "parts")
    assert [step_of(path) for path in checkpoints(folder / "parts")] == [12, 13]


def test_sigterm_saves_and_leaves_with_a_code(folder):
    """To the whole process group, as a scheduler does: workers that read data get it too."""
    changes = {"trainer": {"dataloader_num_workers": 1}}
    whole = train(write_config(folder, "whole", **changes))
    parts = write_config(folder, "parts", **changes)
    process = start(parts, script=slow_script(folder, step=0.15))
    wait_until((folder / "parts/metrics.jsonl").is_file, process)
    os.killpg(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE, said[-3000:]
    found, _ = newest_whole(folder / "parts")
    assert 0 < step_of(found) < 13
    assert (
        f"ended by SIGTERM; {found} is whole: the same command with --resume true resumes from it"
        in said.splitlines()[-1]
    )
    assert (folder / "parts" / MARKER).is_file()
    train(parts, "--resume", "true")
    assert_same_run(whole, folder / "parts")
    assert not (folder / "parts" / MARKER).exists()


@pytest.mark.parametrize(
    ("step", "number", "name"),  # an evaluation is due, nothing is, it was the last
    [(4, signal.SIGUSR1, "SIGUSR1"), (6, signal.SIGINT, "Ctrl-C"), (13, signal.SIGUSR1, "SIGUSR1")],
)
def test_signals_save_though_no_checkpoint_was_asked_for(folder, monkeypatch, caplog, step, number, name):
    caplog.set_level("INFO")
    whole = train(write_config(folder, "whole", save_every_steps=0))
    parts = write_config(folder, "parts", save_every_steps=0)
    with monkeypatch.context() as patch:
        signal_in_step(patch, step, number)
        with pytest.raises(SystemExit) as stop:
            train(parts)
    assert stop.value.code == EXIT_CODE
    assert newest_whole(folder / "parts")[0] == folder / f"parts/checkpoint-{step}"
    assert f"ended by {name}; {folder}/parts/checkpoint-{step} is whole" in caplog.text
    train(parts, "--resume", "true")
    assert_same_run(whole, folder / "parts")


@pytest.mark.parametrize(("number", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_a_signal_in_the_evaluation_after_the_last_step_ends_at_once(folder, monkeypatch, capfd, number, name, code):
    """The heads are saved by then, so that nothing is lost but their figures."""
    config = write_config(folder, "run", evaluation={"every_steps": 0}, save_every_steps=0)
    monkeypatch.setattr(HeadsTrainer, "evaluate", lambda self: [os.kill(os.getpid(), number), time.sleep(60)])
    with pytest.raises(SystemExit) as stop:
        train(config)
    assert stop.value.code == code
    assert (
        f"{name}: all is trained and saved in {folder / 'run' / 'last'}, but not measured.\n" in capfd.readouterr().err
    )
    assert tensors(folder / "run")
    assert not (folder / "run" / MARKER).exists()


def signal_in_step(monkeypatch, step, number):
    """Before it begins, so that this step is the last."""
    get_batch_samples = HeadsTrainer.get_batch_samples

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == step - 1:
            os.kill(os.getpid(), number)
        return get_batch_samples(self, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "get_batch_samples", interrupted)


def test_two_processes_stop_together_and_one_goes_on(folder, caplog):
    """Only one of them gets the signal. One process with the same blocks in a step then trains what two would have.

    A block whose loss is NaN is met by one of the two, and the step skipped by both.
    """
    add_bad_token(folder)
    batch = {"per_device_train_batch_size": 2}
    config = write_config(folder, "two", trainer=batch, save_every_steps=0)
    # Step 6 would end an epoch, whose last blocks two processes fill up differently than one.
    port, script = free_port(), signalled_script(folder, rank=1, step=5)
    processes = [start_rank(config, rank, port, script) for rank in (0, 1)]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [EXIT_CODE, EXIT_CODE], said[0][-3000:]
    found, _ = newest_whole(folder / "two")
    assert found.name == "checkpoint-5"
    assert {path.name for path in found.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert f"ended by a signal to another process; {found} is whole" in said[0]
    assert read_progress(found).skipped == 1
    one = train(write_config(folder, "one", save_every_steps=0))
    resumed = train(write_config(folder, "two", save_every_steps=0), "--resume", "true")
    assert "was saved by 2 processes and is resumed by 1" in caplog.text
    assert "A step took" not in caplog.text
    for line, same in zip(logged(one), logged(resumed), strict=True):
        numbers, others = ({k: v for k, v in log.items() if v is not None} for log in (line, same))
        assert numbers == pytest.approx(others, rel=1e-4, abs=1e-4)  # a skipped step's norm is None
    for name, tensor in tensors(one)["last/heads.safetensors"].items():
        assert (tensors(resumed)["last/heads.safetensors"][name] - tensor).abs().max() < 1e-5, name


def start_rank(config, rank, port, script):
    """Without a launcher, as `srun` starts them: their own exit codes are seen."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return start(config, script=script, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **place)


def signal_while_tokenising(monkeypatch):
    """SIGTERM when the data are read; the signal's handler runs before the call returns."""

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("train.run.build_datasets", signalled)


def test_a_signal_before_the_first_step_ends_at_once_and_the_run_starts_again(folder, monkeypatch):
    """Started again with --resume true, as launch/slurm.sh does; twice, the second time in a folder that is there."""
    whole = train(write_config(folder, "whole"))
    parts = write_config(folder, "parts")
    for flags in ((), ("--resume", "true")):
        with monkeypatch.context() as patch:
            signal_while_tokenising(patch)
            with pytest.raises(SystemExit) as stop:
                train(parts, *flags)
        assert stop.value.code == EXIT_CODE
        assert (folder / "parts" / MARKER).is_file()
        (folder / "parts" / MARKER).unlink()
    train(parts, "--resume", "true")
    assert_same_run(whole, folder / "parts")
    assert not (folder / "parts" / MARKER).exists()


def test_a_run_that_has_not_yet_removed_an_earlier_one_is_not_started_again(folder, monkeypatch):
    """With --resume true it would continue the earlier one, from its checkpoints."""
    where = train(write_config(folder, "run", trainer={"max_steps": 3}))
    before = sorted(where.rglob("*"))
    signal_while_tokenising(monkeypatch)
    with pytest.raises(SystemExit) as stop:
        train(write_config(folder, "run"), "--overwrite", "true")
    assert stop.value.code == EXIT_CODE
    assert sorted(where.rglob("*")) == before


@pytest.mark.parametrize(
    ("first", "second", "seconds"),
    [(signal.SIGTERM, signal.SIGUSR1, SAME_SIGNAL), (signal.SIGINT, signal.SIGINT, SAME_KEY)],
)
def test_only_a_second_signal_some_time_later_ends_at_once(monkeypatch, first, second, seconds):
    """A scheduler signals every process, and a launcher hands the signal on once more."""
    killed = []
    monkeypatch.setattr(os, "kill", lambda process, number: killed.append(number))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    interruption = Interruption()
    interruption.training = True
    interruption.receive(first, None)
    interruption.receive(first, None)
    assert not killed
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.1 * seconds)
    interruption.receive(second, None)
    assert killed == [second]
