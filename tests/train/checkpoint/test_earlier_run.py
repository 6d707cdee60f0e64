"""A folder that holds a run is refused before anything is loaded; what is nobody's business is left alone."""

import pytest
from planned_runs import config

from train.checkpoint.earlier_run import refuse_used_folder, remove_earlier_run


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (
            ["checkpoint-3/", "last/"],
            r"checkpoint-3, last of .*add --resume true to continue it, --overwrite true to",
        ),
        (["last/"], r"holds last of .* it has no checkpoint for --resume true; add --overwrite true to remove them"),
        (["metrics.jsonl"], r"holds metrics.jsonl of an earlier run: add --resume true .* or give another output_dir"),
    ],
)
def test_a_run_is_not_destroyed_without_a_word(tmp_path, left, message):
    fill(tmp_path / "run", left)
    with pytest.raises(ValueError, match=message):
        refuse_used_folder(config(tmp_path))
    refuse_used_folder(config(tmp_path, resume=True))
    refuse_used_folder(config(tmp_path, overwrite=True))


def test_a_folder_without_a_run_is_fine(tmp_path):
    refuse_used_folder(config(tmp_path))
    fill(tmp_path / "run", ["notes.txt", "checkpoint-best/", "runs/"])
    refuse_used_folder(config(tmp_path))


def test_overwrite_removes_what_a_run_left_and_nothing_else(tmp_path):
    fill(tmp_path / "elsewhere", ["heads.json"])
    fill(tmp_path / "run", ["notes.txt", "checkpoint-3/", "metrics.jsonl"])
    (tmp_path / "run/last").symlink_to(tmp_path / "elsewhere")
    remove_earlier_run(config(tmp_path))
    remove_earlier_run(config(tmp_path, overwrite=True, resume=True))
    assert len(list((tmp_path / "run").iterdir())) == 4
    remove_earlier_run(config(tmp_path, overwrite=True))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]
    assert (tmp_path / "elsewhere/heads.json").is_file()


def test_the_heads_to_start_from_are_not_overwritten(tmp_path):
    fill(tmp_path / "run", ["last/"])
    with pytest.raises(ValueError, match=r"init_from .* lies in output_dir .*, from which overwrite removes last"):
        refuse_used_folder(config(tmp_path, overwrite=True, init_from=str(tmp_path / "run/last")))


def test_the_backbone_to_start_from_is_not_overwritten(tmp_path):
    fill(tmp_path / "run", ["last/"])
    starts = config(tmp_path, overwrite=True)
    starts.backbone.name_or_path = str(tmp_path / "run/last")
    with pytest.raises(ValueError, match=r"backbone.name_or_path .* lies in output_dir .*, from which overwrite"):
        refuse_used_folder(starts)


def fill(folder, names):
    folder.mkdir()
    for name in names:
        (folder / name).mkdir() if name.endswith("/") else (folder / name).write_text("")
