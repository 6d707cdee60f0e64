"""Full disks, removed folders, unreadable data, workers that die: a sentence, and a checkpoint that can be loaded."""

import contextlib
import os
import re
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_run import assert_same_run, logged, prepare, slow_script, start, train, wait_until, write_config

from train.checkpoint import whole as whole_checkpoint
from train.checkpoint.whole import LIST, checkpoints, newest_whole, step_of, what_is_wrong
from train.loop import ending
from train.loop.trainer import HeadsTrainer
from train.run import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch)
    return tmp_path


def in_step(monkeypatch, step, action):
    """Do something once, when this step (counted from 0) begins."""
    get_batch_samples, done = HeadsTrainer.get_batch_samples, []

    def acting(self, *args, **kwargs):
        if self.state.global_step == step and not done:
            done.append(step)
            action()
        return get_batch_samples(self, *args, **kwargs)

    monkeypatch.setattr(HeadsTrainer, "get_batch_samples", acting)


def said_by(capsys, config, *flags):
    """The last line of a command that fails."""
    with pytest.raises(SystemExit) as stop:
        main(["--config", config, *flags])
    assert stop.value.code == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_disk_that_fills_up_costs_checkpoints_and_not_the_run(folder, monkeypatch, caplog):
    """No file may become as large as the optimizer's from step 5 to 10: the kernel's own error."""
    whole = train(write_config(folder, "whole"))
    size = (whole / "checkpoint-13/optimizer.safetensors").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = lambda limit: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # noqa: E731
    try:
        with monkeypatch.context() as patch:
            in_step(patch, 5, lambda: full(size - 1))
            in_step(patch, 10, lambda: full(soft))
            where = train(write_config(folder, "full", trainer={"save_total_limit": 1}))
    finally:
        full(soft)
    assert "No checkpoint at step 6" in caplog.text
    assert "No checkpoint at step 9" in caplog.text
    assert_same_run(whole, where)
    assert [step_of(path) for path in checkpoints(where)] == [13]


def test_a_checkpoint_before_a_failed_save_is_kept(folder, monkeypatch, caplog):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        in_step(patch, 4, lambda: patch.setattr("train.checkpoint.save.write_progress", no_space))
        in_step(patch, 8, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(SystemExit):
            train(write_config(folder, "kept", trainer={"save_total_limit": 1}))
    assert newest_whole(folder / "kept") == (folder / "kept/checkpoint-3", {})
    assert "No checkpoint at step 9: [Errno 28] No space left on device Training continues." in caplog.text


def test_lines_that_cannot_be_written_wait(folder, monkeypatch, caplog):
    """The file lies on a full device for some steps."""
    whole = train(write_config(folder, "whole", trainer={"logging_steps": 1}))
    path, aside = folder / "waiting/metrics.jsonl", folder / "aside"

    def fill():
        path.rename(aside)
        path.symlink_to("/dev/full")

    with monkeypatch.context() as patch:
        in_step(patch, 3, fill)
        in_step(patch, 9, lambda: aside.rename(path))
        where = train(write_config(folder, "waiting", trainer={"logging_steps": 1}))
    assert "metrics.jsonl was not written (No space left on device); its lines wait for the next log." in caplog.text
    assert logged(where) == logged(whole)


def test_a_removed_folder_is_made_again(folder, monkeypatch, caplog):
    in_step(monkeypatch, 7, lambda: shutil.rmtree(folder / "removed"))
    where = train(write_config(folder, "removed"))
    assert f"{where} was removed during the run and is made again" in caplog.text
    assert [step_of(path) for path in checkpoints(where)] == [12, 13]
    assert (where / "last/heads.safetensors").is_file()


@pytest.mark.parametrize("there", [True, False])
def test_the_last_line_names_only_what_is_there(tmp_path, there, monkeypatch, caplog):
    """best/ may have been removed with the folder, and no later evaluation was better."""
    monkeypatch.setattr(ending, "save_last", lambda trainer, measured: None)
    best = tmp_path / "best"
    if there:
        best.mkdir()
    state = SimpleNamespace(global_step=7, log_history=[])
    args = SimpleNamespace(output_dir=str(tmp_path))
    trainer = SimpleNamespace(args=args, state=state, eval_dataset=None, best_tokens_per_pass=1.5)
    trainer.weights_are_finite = lambda: True
    with caplog.at_level("INFO"):
        ending.finish(trainer)
    assert (str(best) in caplog.records[-1].message) == there


def test_a_folder_that_cannot_be_made_again_leaves_the_result_elsewhere(folder, monkeypatch, capsys, caplog):
    def replace_by_file():
        shutil.rmtree(folder / "gone")
        (folder / "gone").write_text("in the way")

    in_step(monkeypatch, 7, replace_by_file)
    said = said_by(capsys, write_config(folder, "gone", evaluation={"every_steps": 0}))
    assert "The trained weights are in" in said, said
    assert "No checkpoint at step 9" in caplog.text
    assert (Path(said.split(" weights are in ")[1].rstrip(".")) / "heads.safetensors").is_file()


def test_what_is_damaged_is_found_and_skipped(folder, caplog):
    """Each damage on a copy; then a resume from the checkpoint before."""
    where = train(write_config(folder, "damaged"))
    lines, newest = logged(where), where / "checkpoint-13"
    for name, damage in DAMAGES.items():
        copy = shutil.copytree(newest, folder / name / "checkpoint-13")
        assert what_is_wrong(copy) is None
        damage(copy)
        assert what_is_wrong(copy) is not None, name
        assert newest_whole(copy.parent)[0] is None
    DAMAGES["cut"](newest)
    train(write_config(folder, "damaged"), "--resume", "true")
    assert "checkpoint-13 is skipped and removed, optimizer.safetensors has 100 bytes in place of" in caplog.text
    assert "the run resumes from checkpoint-12" in caplog.text
    assert logged(where) == lines
    odd = checkpoints(where)[-1]
    torch.save({"base_lrs": 7}, odd / "scheduler.pt")
    whole_checkpoint.mark_whole(odd, {"step": step_of(odd)})
    with pytest.raises(ValueError, match=r"checkpoint-13 cannot be resumed from.* holds something else \("):
        train(write_config(folder, "damaged"), "--resume", "true")


DAMAGES = {
    "cut": lambda folder: (folder / "optimizer.safetensors").write_bytes(
        (folder / "optimizer.safetensors").read_bytes()[:100]
    ),
    "mixed": lambda folder: (folder / "rng_state.pth").write_bytes(
        os.urandom((folder / "rng_state.pth").stat().st_size)
    ),
    "missing": lambda folder: (folder / "scheduler.pt").unlink(),
    "no list": lambda folder: (folder / LIST).unlink(),
    "list cut": lambda folder: (folder / LIST).write_bytes((folder / LIST).read_bytes()[:50]),
}


def test_a_large_file_is_checked_by_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_checkpoint, "READ_WHOLE", 64 * 16)
    monkeypatch.setattr(whole_checkpoint, "PIECE", 16)
    path = tmp_path / "checkpoint-1/large"
    path.parent.mkdir()
    path.write_bytes(os.urandom(5000))
    whole_checkpoint.mark_whole(path.parent, {"step": 1})
    assert "sha256_of_pieces" in (path.parent / LIST).read_text()
    assert what_is_wrong(path.parent) is None
    content = path.read_bytes()
    for other in (content[:-1], os.urandom(5000), content[:-1] + bytes([content[-1] ^ 1])):
        path.write_bytes(other)
        assert what_is_wrong(path.parent) is not None


def test_a_worker_that_is_killed_ends_in_a_sentence(folder):
    """SIGKILL, as by a machine that runs out of memory; far from the epoch's end, where one worker follows another."""
    text = folder / "text.jsonl"
    text.write_text(text.read_text() * 20)
    config = write_config(folder, "worker", trainer={"dataloader_num_workers": 1})
    process = start(config, script=slow_script(folder, step=0.1))
    wait_until(lambda: newest_whole(folder / "worker")[0], process)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1, said
    assert re.search("error: (A )?DataLoader worker", said)
    assert "Traceback" not in said
    found, damaged = newest_whole(folder / "worker")
    assert f"{found} is whole: resume from it with --resume true" in said
    assert not damaged
    train(config, "--resume", "true", "--trainer.max_steps", str(step_of(found) + 1))


HANGING_WORKER = """
import os, signal, time
from multiprocessing.process import BaseProcess
from train.checkpoint import interruption
from train.run import main

def hang(self, worker):                       # as one does that was forked while a thread held a lock
    for number in interruption.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.write(begun, b"!")
    time.sleep(1000)

def fail(self):                               # another worker dies before DataLoader knows of the new one
    start(self)
    os.read(seen, 1)
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

seen, begun = os.pipe()
interruption.ShieldedWorker.__call__ = hang
start, BaseProcess.start = BaseProcess.start, fail
main()
"""


def test_a_worker_that_nobody_asked_to_leave_does_not_keep_a_failed_run_waiting(folder):
    (folder / "hanging.py").write_text(HANGING_WORKER)
    config = write_config(folder, "hanging", trainer={"dataloader_num_workers": 1})
    process = start(config, script=folder / "hanging.py")
    try:
        said = process.communicate(timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1
    assert "error: DataLoader worker (pid 1) is killed by signal: Killed;" in said


def test_a_shard_that_vanishes_under_a_stream_ends_in_a_sentence(folder, monkeypatch, capsys):
    lines = (folder / "text.jsonl").read_text().splitlines(keepends=True)
    (folder / "shards").mkdir()
    for i in range(8):
        (folder / f"shards/{i}.jsonl").write_text("".join(lines[i::4]) * 10)
    data = {"train": [{"path": str(folder / "shards/*.jsonl")}], "streaming": True, "eval_fraction": 0.0}
    config = write_config(folder, "stream", data=data, save_every_steps=2, trainer={"max_steps": 400})
    in_step(monkeypatch, 3, lambda: [path.unlink() for path in (folder / "shards").iterdir()])
    said = said_by(capsys, config)
    assert "The training data cannot be read" in said
    assert ".jsonl" in said
    found, _ = newest_whole(folder / "stream")
    assert f"{found} is whole" in said


def test_a_cache_that_was_cut_short_ends_in_a_sentence(folder, capsys):
    config = write_config(folder, "cached")
    train(config, "--trainer.max_steps", "1")
    shutil.rmtree(folder / "cached")
    cut = sorted(folder.glob("cache/**/*.arrow"))
    assert cut
    for path in cut:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = said_by(capsys, config)
    assert str(folder / "cache") in said
    assert "remove" in said
