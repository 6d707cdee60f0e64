"""An export replaces an earlier export, and nothing else."""

import pytest

from heads.export.replacing import check_place


def test_a_new_folder_and_an_earlier_export_may_be_written(tmp_path):
    check_place(tmp_path / "new", [tmp_path / "base", "organisation/name", None], overwrite=False)
    (tmp_path / "out" / "heads").mkdir(parents=True)
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--overwrite to replace it"):
        check_place(tmp_path / "out", [], overwrite=False)
    check_place(tmp_path / "out", [], overwrite=True)


@pytest.mark.parametrize("place", ["base", ".", "base/new"])
def test_what_is_exported_is_never_replaced(place, tmp_path):
    (tmp_path / "base").mkdir()
    with pytest.raises(ValueError, match="is, holds or lies in"):
        check_place(tmp_path / place, [tmp_path / "base"], overwrite=True)


@pytest.mark.parametrize("files", [["thesis.txt"], ["heads.json", "config.json"], ["config.json", "sub/x"]])
def test_other_folders_are_never_replaced(files, tmp_path):
    for name in files:
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text("{}")
    with pytest.raises(ValueError, match="replaces nothing else"):
        check_place(tmp_path / "mine", [], overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="no folder that an export has written"):
        check_place(tmp_path / "link", [], overwrite=True)
