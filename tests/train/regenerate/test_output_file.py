"""The file that is written: resumed to the same bytes, and refused where it is another one."""

import json
import subprocess
import sys

import pytest
import torch
from regenerated_runs import ENDS, rows, write
from repository import ROOT
from tiny import tiny_model
from transformers import GenerationConfig

from train.regenerate.output import OutputFile, is_finished


@pytest.mark.parametrize("data", ["text", "chat"])
def test_a_killed_run_goes_on_to_the_same_bytes(folder, data):
    flags = ("--limit", "14", "--backbone.dtype", "float32")  # rounding tells batches apart
    whole = write(folder, "out.jsonl", *flags, data=data, batch=2)
    lines = whole.splitlines(keepends=True)
    for kept, rest in ((0, 5), (1, 0), (5, 9), (len(lines) - 1, 3), (len(lines), 0)):
        following = lines[kept][:rest] if kept < len(lines) else b""
        (folder / "out.jsonl").write_bytes(b"".join(lines[:kept]) + following)
        assert write(folder, "out.jsonl", *flags, data=data, batch=2) == whole


def test_a_kill_between_lines_of_a_window_loses_nothing(folder, monkeypatch):
    whole = write(folder, "whole.jsonl", batch=2)
    append = OutputFile.append

    def killed(self, made):
        append(self, made)
        if self.lines >= 16:
            raise KeyboardInterrupt

    monkeypatch.setattr(OutputFile, "append", killed)
    with pytest.raises(SystemExit, match="130"):
        write(folder, "out.jsonl", batch=2)
    monkeypatch.undo()
    prefix = (folder / "out.jsonl").read_bytes()
    assert whole.startswith(prefix)
    assert prefix.count(b"\n") == 16
    assert write(folder, "out.jsonl", batch=2) == whole


def test_other_settings_and_other_files_are_refused(folder):
    write(folder, "out.jsonl", "--limit", "2")
    with pytest.raises(ValueError, match=r"begun with other settings: temperature 0.7 \(now 0.0\); give those again"):
        write(folder, "out.jsonl", "--temperature", "0")
    with pytest.raises(ValueError, match=r"begun with other settings: .*rows"):
        write(folder, "out.jsonl", data="chat")
    (folder / "mine.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="this command did not write it; give another --out"):
        write(folder, "mine.jsonl")
    assert (folder / "mine.jsonl").read_text() == "{}\n"
    with pytest.raises(ValueError, match=r"give a name that ends in \.jsonl"):
        write(folder, "out.txt")
    assert len(rows(write(folder, "out.jsonl", "--limit", "3"))) == 3  # more rows of the same


def copy_weights(folder, seed):
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=257, seed=seed).save_pretrained(folder / "base")
    GenerationConfig(eos_token_id=list(ENDS)).save_pretrained(folder / "base")


def test_other_weights_in_the_same_folder_are_refused(folder):
    write(folder, "out.jsonl", "--limit", "2")
    copy_weights(folder, seed=5)
    with pytest.raises(ValueError, match=r"begun with other settings: weights '\w+' \(now '\w+'\); give those again"):
        write(folder, "out.jsonl")
    copy_weights(folder, seed=0)
    write(folder, "out.jsonl", "--limit", "3")
    GenerationConfig(eos_token_id=[256]).save_pretrained(folder / "base")
    with pytest.raises(ValueError, match=r"begun with other settings: ends \[256, 0, 8, .*\(now \[256"):
        write(folder, "out.jsonl")


def test_the_dtype_that_auto_means_is_what_counts(folder):
    write(folder, "out.jsonl", "--limit", "2", "--backbone.dtype", "auto")
    write(folder, "out.jsonl", "--limit", "3", "--backbone.dtype", "float32")  # what it is on CPUs
    with pytest.raises(ValueError, match=r"dtype 'float32' \(now 'float64'\)"):
        write(folder, "out.jsonl")


DAMAGED = ("[]", '"x"', "{", "[" * 100_000, '{"version": 2, "finished_bytes": 3, "settings": 0}')


@pytest.mark.parametrize("content", DAMAGED, ids=["list", "text", "cut", "deep", "settings"])
def test_damaged_settings_are_told_of(folder, content):
    write(folder, "out.jsonl", "--limit", "2")
    (folder / "out.jsonl.settings").write_text(content)
    with pytest.raises(ValueError, match=r"out\.jsonl\.settings is damaged; remove it together with out\.jsonl"):
        write(folder, "out.jsonl")
    assert not is_finished(folder / "out.jsonl")


def test_settings_of_an_older_version_are_refused(folder):
    write(folder, "out.jsonl", "--limit", "2")
    content = json.loads((folder / "out.jsonl.settings").read_text())
    for older in (content["settings"], {**content, "version": 1}):
        (folder / "out.jsonl.settings").write_text(json.dumps(older))
        with pytest.raises(ValueError, match=r"begun by another version of this command.*give another --out"):
            write(folder, "out.jsonl")


@pytest.mark.parametrize(
    ("order", "place", "number"), [((0, 0, 1), 2, "0"), ((1, 0), 1, "1"), ((0, None), 2, "None"), ((0, 2), 2, "2")]
)
def test_lines_that_are_not_in_their_places_are_told_of(folder, order, place, number):
    lines = write(folder, "out.jsonl", "--limit", "3").splitlines(keepends=True)
    changed = b"".join(b"{}\n" if i is None else lines[i] for i in order) + b'{"li'
    (folder / "out.jsonl").write_bytes(changed)
    with pytest.raises(
        ValueError, match=rf"out\.jsonl was changed .* line {place} of the file has the number {number}, "
    ):
        write(folder, "out.jsonl")
    assert (folder / "out.jsonl").read_bytes() == changed


def test_one_process_writes_a_file(folder):
    settings = {"seed": 0}
    with OutputFile(folder / "out.jsonl", settings) as first:
        script = "import sys; from train.regenerate.output import OutputFile; OutputFile(sys.argv[1], {'seed': 0})"
        other = subprocess.run(
            [sys.executable, "-c", script, first.path], check=False, cwd=ROOT, capture_output=True, text=True
        )
        assert "out.jsonl is being written by another process; wait until that has ended" in other.stderr
        first.append([{"line": 0}])
    with OutputFile(folder / "out.jsonl", settings) as second:
        assert second.lines == 1


def test_a_file_is_finished_with_its_last_line(folder):
    path = folder / "out.jsonl"
    assert not is_finished(path)
    write(folder, "out.jsonl", "--limit", "5")
    assert not is_finished(path)
    whole = write(folder, "out.jsonl")
    assert is_finished(path)
    assert json.loads((folder / "out.jsonl.settings").read_text())["settings"]["lines"] == whole.count(b"\n") == 44
    path.write_bytes(whole[:-1])
    assert not is_finished(path)
    write(folder, "out.jsonl", "--limit", "2")  # the last line stays away
    assert not is_finished(path)
    assert write(folder, "out.jsonl") == whole
    assert is_finished(path)
    (folder / "out.jsonl.settings").unlink()
    assert not is_finished(path)


def test_a_full_disk_leaves_whole_lines(folder, monkeypatch):
    output = OutputFile(folder / "out.jsonl", {"seed": 0})
    output.append([{"line": 0}])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left.*its 1 lines are whole: free space"):
        output.append([{"line": 1}, {"line": 2}])
    assert (folder / "out.jsonl").read_bytes() == b'{"line": 0}\n'
