"""A run's folder from elsewhere: what its links lead to is left alone, and what cannot be written is said at once."""

import json
from dataclasses import asdict

import pytest
from transformers import TrainerState

from train.checkpoint.progress import Progress, read_progress
from train.checkpoint.resume import check_state, warn_of_differences
from train.checkpoint.run_folder import check_run_folder
from train.checkpoint.whole import LIST, mark_whole, newest_whole, remove, rotate, what_is_wrong


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / LIST).write_text("{}")
    (folder / ".a.tmp").write_text("kept")
    return folder


def test_a_checkpoint_that_is_a_link_is_removed_alone(tmp_path, victim):
    run = tmp_path / "run"
    run.mkdir()
    for step in (3, 6):
        (run / f"checkpoint-{step}").symlink_to(victim)
    _, damaged = newest_whole(run)
    assert len(damaged) == 2
    rotate(run, 1)
    remove(run / "checkpoint-6")
    assert list(run.iterdir()) == []
    assert sorted(path.name for path in victim.iterdir()) == [".a.tmp", LIST]


@pytest.mark.parametrize("name", ["last", "metrics.jsonl", "checkpoint-3/heads.json"])
def test_links_out_of_the_folder_are_refused(tmp_path, victim, name):
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(victim)
    with pytest.raises(ValueError, match=rf"{name} is a link to .*victim, outside output_dir .*put a copy"):
        check_run_folder(str(run))


def test_links_inside_the_folder_and_a_folder_that_is_a_link_are_fine(tmp_path):
    (tmp_path / "disk" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "disk" / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    check_run_folder(str(tmp_path / "run"))
    check_run_folder(str(tmp_path / "not" / "yet" / "there"))
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize("name", ["file", "file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output_dir .* cannot be written \(.*\); give another one"):
        check_run_folder(str(tmp_path / name))


PROGRESS = Progress(
    losses=[[[1.5], [3.0]]],
    logged_loss=[0.5],
    all_losses=7,
    skipped=0,
    skipped_since_log=0,
    steps_since_log=2,
    metrics_bytes=100,
    measured_accuracy=None,
    evaluation_put_off=False,
    data_pass=0,
    blocks_in_pass=24,
)


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint-3"
    folder.mkdir()
    (folder / "progress.json").write_text(json.dumps(asdict(PROGRESS)))
    TrainerState(global_step=3, train_batch_size=4).save_to_json(str(folder / "trainer_state.json"))
    return folder


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("progress.json", "[]", "holds no progress of a run"),
        ("progress.json", "{}", "holds no progress of a run"),
        ("progress.json", "\ufffe{", "holds no progress of a run"),
        ("progress.json", {"skipped": "2"}, "has skipped=2, which no run wrote"),
        ("progress.json", {"losses": [["a"]]}, "has losses="),
        ("progress.json", {"logged_loss": []}, "has logged_loss="),
        ("progress.json", {"metrics_bytes": -5}, "has metrics_bytes=-5"),
        ("progress.json", {"blocks_in_pass": 10**30}, "has blocks_in_pass=1000"),
        ("trainer_state.json", "[]", "cannot be resumed from"),
        ("trainer_state.json", {"stray": 1}, "cannot be resumed from.*stray"),
        ("trainer_state.json", {"global_step": 4}, "trainer_state.json is of step 4"),
        ("trainer_state.json", {"global_step": "3"}, "trainer_state.json has global_step 3"),
        ("trainer_state.json", {"train_batch_size": {}}, "trainer_state.json has train_batch_size"),
        ("trainer_state.json", {"log_history": 5}, "trainer_state.json has log_history 5"),
    ],
)
def test_a_whole_checkpoint_with_odd_contents_ends_in_a_sentence(checkpoint, file, content, says):
    check_state(checkpoint)
    assert read_progress(checkpoint) == PROGRESS
    path = checkpoint / file
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(ValueError, match=f"{says}.*remove that (checkpoint|folder)"):
        check_state(checkpoint)


def test_a_list_of_odd_files_is_none(checkpoint):
    mark_whole(checkpoint, {"step": 3})
    assert what_is_wrong(checkpoint) is None
    listed = json.loads((checkpoint / LIST).read_text())
    for files in (
        {"../victim": {"bytes": 1}},
        {"/dev/zero": {"bytes": 0}},
        {"progress.json": {}},
        {"progress.json": 7},
    ):
        (checkpoint / LIST).write_text(json.dumps(listed | {"files": files}))
        assert what_is_wrong(checkpoint) is not None
    now = {"processes": 1, "engine": "single", "blocks_per_step": 4, "seed": 0}
    warn_of_differences({"processes": "x", "seed": None}, now)
