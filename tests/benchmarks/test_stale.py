"""Which files have changed since a commit: only code counts, wherever it lies now."""

from __future__ import annotations

import os
import subprocess

from benchmarks import stale, verify

CODE = "def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n"


def commit(folder, files):
    """Write files, delete those that are None, commit everything; the commit's hash."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_text(text, encoding="utf-8")
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for arguments in (("init", "--quiet"), ("add", "--all"), (*author, "commit", "--quiet", "--message", "test")):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True)
    return head.stdout.strip()


def test_a_renamed_file_with_the_same_code_has_not_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    before = commit(tmp_path, {"lib/old.py": CODE, "lib/gone.py": "def half(x):\n    return x / 2\n", "lib/a.yaml": ""})
    commit(tmp_path, {"lib/old.py": None, "lib/new.py": '"""What it is."""\nimport math\n\n' + CODE})
    assert stale.changed_since(before, ["lib"]) == []
    commit(tmp_path, {"lib/new.py": CODE.replace("3 * x", "4 * x"), "lib/gone.py": None, "lib/a.yaml": "y"})
    assert stale.changed_since(before, ["lib"]) == ["lib/a.yaml", "lib/gone.py", "lib/new.py"]
    assert stale.changed_since("0" * 40, ["lib"]) is None


def test_a_check_trains_a_folder_that_it_reads_or_says_what_failed(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    monkeypatch.setattr(verify, "head", lambda: "abc1234")
    monkeypatch.setattr(verify, "output_of", lambda name, typed: ran.append(typed) or "")
    verify.run("downstream", quick=True)
    made_by, command = ran
    assert made_by == "python -m benchmarks.paper.dynamo_first_token"
    assert verify.CHECKS["downstream"].folder in command
    assert (
        "which is missing; `python -m benchmarks.paper.dynamo_first_token` trains it first" in capsys.readouterr().out
    )
    (tmp_path / verify.CHECKS["downstream"].folder).mkdir(parents=True)
    verify.run("downstream", quick=True)
    assert ran[2:] == [command]


def test_what_checks_measure_exists_and_checks_of_training_name_code_of_it():
    for name, check in verify.CHECKS.items():
        assert all((verify.ROOT / path).exists() for path in check.measures), name
        if "benchmarks.training" in check.command:
            assert any(path.startswith("train/") for path in check.measures), name


def test_variables_before_a_command_are_its_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    monkeypatch.delenv("SHOWN", raising=False)
    typed = "SHOWN=1 OTHER=x python -c \"import os; print(os.environ['SHOWN'], os.environ['OTHER'], 'A=2')\""
    assert verify.output_of("plan", typed) == "1 x A=2\n"
    assert "SHOWN" not in os.environ


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert stale.head() == "unknown"


def test_a_command_held_to_older_instructions_says_so_in_its_page():
    assert "AVX2 at most, by ATEN_CPU_CAPABILITY, " in verify.machine_of("plan", f"{verify.AVX2} python -m x")
