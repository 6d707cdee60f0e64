"""The commands for a machine with a GPU: each within its time, output kept however it ends, wheels by closure."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import transformers
from repository import ROOT

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import machine
from benchmarks.gpu.__main__ import COMMANDS, STOPPED, Program, main, run
from benchmarks.gpu.machine import describe
from benchmarks.gpu.marked import marked_files
from benchmarks.gpu.wheels import IN_THE_IMAGE, NEEDED, closure, install


def test_each_command_takes_under_ten_minutes_and_all_of_them_25_as_the_pages_say():
    minutes = {name: sum(program.minutes for program in programs) for name, programs in COMMANDS.items()}
    assert max(minutes.values()) < 10
    assert sum(minutes.values()) == 25
    assert "tests and measures in 25 minutes" in Path("docs/trees.md").read_text()
    assert "about 25 minutes" in Path("Makefile").read_text()


def test_a_program_with_a_budget_ends_before_it_is_stopped():
    for program in itertools.chain(*COMMANDS.values()):
        if found := re.search(r"--minutes ([\d.]+)", program.asked):
            assert 0.8 * program.minutes < float(found[1]) < program.minutes


def test_tiny_programs_take_the_ways_of_the_full_ones():
    """Budgets, compiled graphs, several processes and tuned trees are what breaks on a machine never seen before."""
    for program in itertools.chain(*COMMANDS.values()):
        for flag in ("--minutes", "--compile", "--only-losses"):
            assert (flag in program.asked) <= (flag in program.tiny), (program.name, flag)
    tiny = {program.name: program.tiny for program in itertools.chain(*COMMANDS.values())}
    assert "--processes 2 1" in tiny["engines"]
    assert "--compile" in tiny["decoding"], "on a GPU it is the default"
    assert "--no-tuned" not in tiny["decoding"]
    assert "--batches 1 2" in tiny["decoding"]


def test_what_a_program_prints_is_kept_however_it_ends(tmp_path, capsys):
    program = Program(name="x", asked="", tiny="", minutes=1)
    code = run(program, "-c \"import sys; print('measured'); sys.exit(3)\"", tmp_path / "x.txt", dict(os.environ))
    assert code == 3
    written = (tmp_path / "x.txt").read_text()
    assert "measured\n\nended with 3, after" in written
    assert "measured" in capsys.readouterr().out


def test_a_program_and_its_children_end_at_the_limit(tmp_path):
    child = "import time; time.sleep(60)"
    code = f"import subprocess, sys; print('measured', flush=True); subprocess.run([sys.executable, '-c', '{child}'])"
    program = Program(name="x", asked="", tiny="", minutes=3 / 60)
    started = time.monotonic()
    assert run(program, f'-c "{code}"', tmp_path / "x.txt", dict(os.environ)) == STOPPED
    assert time.monotonic() - started < 30, "its child held the output open"
    written = (tmp_path / "x.txt").read_text()
    assert "measured" in written
    assert "was stopped at its 0.05 minutes; what it had not printed by then is left out" in written


def test_a_failed_program_is_named_at_the_end_and_the_others_run(tmp_path, monkeypatch):
    programs = (
        Program(name="bad", asked="", tiny="-c 'import sys; sys.exit(2)'", minutes=1),
        Program(name="good", asked="", tiny="-c 'print(1)'", minutes=1),
    )
    monkeypatch.setattr(gpu, "COMMANDS", {"tests": programs})
    with pytest.raises(SystemExit, match="bad ended with 2"):
        main(["--tiny", "--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.txt", "good.txt", "machine.txt"]


def test_figures_come_home_with_their_commit_gpus_and_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "COMMANDS", {"tests": ()})
    monkeypatch.setattr(gpu, "describe_gpus", lambda environment: "NVIDIA Made Up, 80 GiB, CUDA 13.0")
    main(["--out", str(tmp_path)])
    written = (tmp_path / "machine.txt").read_text()
    assert re.match(r"commit ([0-9a-f]{40}(-dirty)?|unknown.*)\nNVIDIA Made Up, 80 GiB, CUDA 13.0\nPython 3", written)
    assert capsys.readouterr().out == written


def test_without_a_gpu_nothing_begins_and_a_sentence_says_why(tmp_path):
    """A CPU build of PyTorch would skip each test, end with 0 and leave a CPU's figures among those of GPUs."""
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(ValueError, match=r"PyTorch \S+ finds no GPU here; give `make gpu` a Python whose PyTorch"):
        machine.describe_gpus(hidden)
    command = [sys.executable, "-m", "benchmarks.gpu", "tests", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=hidden, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: PyTorch")
    assert not list((tmp_path / "out").iterdir())


def test_ctrl_c_ends_the_program_that_runs(tmp_path):
    """It has a session of its own, which Ctrl-C does not reach: it would hold the GPU until its limit."""
    number = tmp_path / "number"
    waits = f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); print('begun'); time.sleep(60)"
    here = (
        "from benchmarks.gpu.__main__ import Program, run; import os, pathlib, signal; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # what starts in the background ignores it
        f"run(Program(name='x', asked='', tiny='', minutes=1), {shlex.join(['-uc', waits])!r}, "
        f"pathlib.Path({str(tmp_path / 'x.txt')!r}), dict(os.environ))"
    )
    process = subprocess.Popen([sys.executable, "-uc", here], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    next(line for line in process.stdout if line == "begun\n")
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert process.wait() != 0
    assert time.monotonic() - started < 30, "the timer of its limit held the interpreter"
    with contextlib.suppress(psutil.NoSuchProcess):  # it is an orphan, which init may take a moment to reap
        psutil.Process(int(number.read_text())).wait(timeout=30)


def test_an_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["train"])
    assert "train is no command; allowed are tests, costs, decoding, mx, learn" in capsys.readouterr().err


def test_wheels_are_what_the_code_needs_without_what_the_image_has():
    found = closure(NEEDED)
    assert {"transformers", "datasets", "dill", "xxhash", "tokenizers"} <= found.keys()
    assert {"numpy", "pandas", "pyarrow"} <= found.keys(), "an image may hold PyTorch alone"
    assert not IN_THE_IMAGE & found.keys()
    assert found["transformers"] == transformers.__version__


def test_the_files_of_tests_that_need_a_gpu_are_found_by_their_marks(request, tmp_path):
    found = marked_files()
    marked = {Path(item.path) for item in request.session.items if item.get_closest_marker("cuda")}
    assert {str(path.relative_to(ROOT)) for path in marked} <= set(found)
    assert "tests/heads/decoding/test_devices.py" in found
    assert "tests/benchmarks/test_gpu.py" not in found, "it speaks of the mark and bears none"
    (tmp_path / "test_new.py").write_text("import pytest\n\n\n@pytest.mark.cuda\ndef test_it(): ...\n")
    assert marked_files(tmp_path) == [str(tmp_path / "test_new.py")]
    for program in COMMANDS["tests"][:1]:
        assert program.asked == program.tiny == "-m pytest -m cuda -ra {marked}"


def test_first_lines_say_which_packages_came_with_the_wheels(tmp_path, monkeypatch):
    unpacked = tmp_path / "unpacked"
    for name, version in (("typer", "99.1"), ("transformers", "5.17.0")):
        (folder := unpacked / f"{name}-{version}.dist-info").mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    first, travelled, *sentences = describe(unpacked).splitlines()
    assert f"torch {importlib.metadata.version('torch')}, " in first
    assert travelled == f"from {tmp_path}: transformers 5.17.0, typer 99.1"
    assert "transformers 5.17.0 is here and Headway's tests ran with <5.24,>=5.23" in " ".join(sentences)


def test_what_is_missing_is_a_sentence(monkeypatch):
    monkeypatch.setattr(machine, "NEEDED", ("transformers", "never-installed"))
    with pytest.raises(ValueError, match="This Python lacks never-installed; `make gpu-wheels` on a machine with"):
        describe()


def test_a_tiny_program_has_more_time(tmp_path, monkeypatch):
    slow = Program(name="slow", asked="", tiny="-c 'import time; time.sleep(1.5)'", minutes=0.5 / 60)
    monkeypatch.setattr(gpu, "COMMANDS", {"tests": (slow,)})
    main(["--tiny", "--out", str(tmp_path)])
    assert "ended with 0" in (tmp_path / "slow.txt").read_text()


def test_an_empty_folder_of_wheels_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="has no wheels; `make gpu-wheels` on a machine with a network fills it"):
        install(tmp_path)
    with pytest.raises(SystemExit, match=r"error: --wheels .* has no wheels"):
        main(["--wheels", str(tmp_path), "--out", str(tmp_path / "out")])
