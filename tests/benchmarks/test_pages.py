"""Pages point at what is there: links, files, commands with their options, and results of nothing but a check."""

import re
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import stale as staleness
from benchmarks import verify
from benchmarks.stale import UNCOMMITTED, why_stale
from benchmarks.verify import CHECKS, RESULTS, as_markdown, last_measured, stale
from heads.cli.main import app
from heads.evaluation.suites import suite_module
from heads.export.formats import format_module

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "checkpoints/README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`((?:heads|train|benchmarks|tests|configs|launch|docs)/[\w./*-]*\w\.(?:py|yaml|json|md|sh|png))`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_files_are_there(page):
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in LINK.findall(text) if "://" not in link and not link.startswith("#")]
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in CODE.findall(text) if not list(ROOT.glob(path))]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configs_and_modules_in_commands_are_there(page):
    text = page.read_text(encoding="utf-8")
    configs = re.findall(r"(?:configs|launch)/[\w/]+\.(?:yaml|sh)", text)
    modules = re.findall(r"python -m (benchmarks\.[\w.]+\w)", text)
    missing = [path for path in configs if not (ROOT / path).is_file()]
    for module in modules:
        path = ROOT / module.replace(".", "/")
        missing += [] if path.with_suffix(".py").is_file() or (path / "__main__.py").is_file() else [module]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_headway_and_their_options_are_there(page):
    assert [name for line in headway_lines(page.read_text(encoding="utf-8")) for name in unknown_names(line)] == []


def test_commands_of_headway_that_are_not_there_are_found():
    text = (
        "`headway generate | chatt HEADS --pack`, `headway evaluate HEADS\n--suite speed --max-new-tokens 9 --fresh`\n"
        "```\nheadway evaluate HEADS --suite speeds --speeds\nheadway export HEADS --to hub \\\n  --license M --licence"
        "  # --remark\nX=1 headway info --fold\nheadway evaluate HEADS --max-new-tokens 9   # headway info\n```\n"
        "| `headway chat \\| benchmark HEADS --no-prompt-lookup` | `headway …`, --prose |\n"
    )
    assert [unknown_names(line) for line in headway_lines(text)] == [
        ["speeds", "evaluate --speeds"],
        ["export --licence"],
        ["info --fold"],
        ["evaluate --max-new-tokens"],
        ["chatt"],
        [],
        ["chat --no-prompt-lookup"],
    ]


def headway_lines(text: str) -> list[str]:
    """What follows `headway` in a page's blocks of code and then in its spans of code, without remarks."""
    block = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    lines = [line for code in block.findall(text) for line in code.replace("\\\n", " ").splitlines()]
    lines += [" ".join(span.replace("\\|", "|").split()) for span in re.findall(r"`([^`]+)`", block.sub("", text))]
    found = [re.search(r"\bheadway (\w.*)", line) for line in lines]
    return [match[1].partition(" #")[0] for match in found if match]


def unknown_names(line: str) -> list[str]:
    """The commands, suites, formats and options of a line that do not exist; `generate | chat` are two commands."""
    known: Any = typer.main.get_command(app)
    names = re.match(r"[\w-]+(?: \| [\w-]+)*", line)[0].split(" | ")
    wrong = [name for name in names if name not in known.commands]
    own: set[str] = set()
    for kind, module in re.findall(r"--(suite|to) ([a-z][\w-]*)", line):
        try:
            config = (suite_module if kind == "suite" else format_module)(module).Config
        except ValueError:
            wrong.append(module)
        else:
            words = [field.name.replace("_", "-") for field in fields(config)]
            own |= {option for word in words for option in (f"--{word}", f"--no-{word}")}
    for name in filter(known.commands.__contains__, names):
        options = {option for each in known.commands[name].params for option in (*each.opts, *each.secondary_opts)}
        asked = re.findall(r"(?<!\S)--[a-z][\w-]*", line)
        wrong += [f"{name} {option}" for option in asked if option not in {"--help", *options, *own}]
    return wrong


def visible_words(markdown: str) -> list[str]:
    """What a reader sees: no comments, no bars and fences; words that a no-break space keeps together count one by one.

    >>> visible_words("<!-- by a command --> |plain|28.0&nbsp;tokens/s| | same text |")
    ['|plain|28.0', 'tokens/s|', 'same', 'text']
    """
    shown = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL).replace("&nbsp;", " ")
    return [word for word in shown.split() if re.search(r"\w", word)]


def test_the_first_screen_is_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert max(len(readme.split()), len(visible_words(readme))) <= 900
    assert len((ROOT / "docs/decisions.md").read_text(encoding="utf-8").split()) <= 3000


def test_every_file_of_results_belongs_to_a_check_and_names_its_day():
    measured = [path.stem for path in RESULTS.glob("*.md")]
    assert set(measured) <= set(CHECKS)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", last_measured(name)) for name in measured)


def test_every_file_of_results_has_the_present_command_or_says_what_has_changed():
    assert [name for name in CHECKS if stale(name).startswith("was measured as")] == []


def test_results_do_not_name_folders_of_the_machine() -> None:
    text = as_markdown("plan", "python -m x", "2026-01-02", f"saved in {verify.ROOT}/checkpoints/runs/x")
    assert "saved in checkpoints/runs/x\n" in text
    with tempfile.TemporaryDirectory() as place:
        assert "saved in heads/last\n" in as_markdown(
            "plan", "python -m x", "2026-01-02", f"saved in {place}/heads/last"
        )


def test_results_are_stale_once_what_they_measure_has_changed():
    text = as_markdown("plan", "python -m x", "2026-01-02, 1.0 minutes, a machine, commit abc1234", "a")

    def changed(commit, paths):
        return {"abc1234": [path for path in paths if path == "heads/loop.py"]}.get(commit)

    assert why_stale(text, ["python -m x"], ["benchmarks/x*"], [], changed) == ""
    assert why_stale(text, ["python -m x"], [], ["heads/loop.py"], changed) == "changed since: heads/loop.py"
    assert why_stale(text, ["python -m y"], [], [], changed) == "was measured as `python -m x`"
    since = text.replace("\n\n```", "\n- since then: rows were added\n\n```", 1)
    assert why_stale(since, ["python -m x"], [], [], changed) == "rows were added"
    assert "does not name a commit" in why_stale(text.replace("abc1234", "def5678"), ["python -m x"], [], [], changed)


def test_rows_of_an_earlier_call_are_stale_by_themselves():
    rows = "rows were made by commit abc1234, torch 2.13.0 and commit 0123abc, torch 2.13.0"
    text = as_markdown("plan", "python -m x", "2026-01-02, 1.0 minutes, a machine, commit abc1234", rows)
    since = {"abc1234": [], "0123abc": ["benchmarks/x.py", "heads/loop.py"]}

    def changed(commit, paths):
        return None if commit not in since else [path for path in since[commit] if path in paths]

    assert why_stale(text, ["python -m x"], ["benchmarks/x.py"], [], changed) == ""
    reason = why_stale(text, ["python -m x"], ["benchmarks/x.py"], ["heads/loop.py"], changed)
    assert reason == "changed since: heads/loop.py (rows of commit 0123abc)"
    unsaved = text.replace("0123abc", f"0123abc{UNCOMMITTED}")
    assert why_stale(unsaved, ["python -m x"], [], [], changed) == "was measured on files that no commit holds"
    assert "not recorded" in why_stale(text.replace("commit 0123abc", "not recorded"), ["python -m x"], [], [], changed)
    for end in ("of commit 0123abc", "(commit 0123abc)", "commit 0123abc; torch 2.13.0"):
        ends = text.replace("commit 0123abc, torch 2.13.0", end)
        assert why_stale(ends, ["python -m x"], [], ["heads/loop.py"], changed) == reason
    del since["0123abc"]
    assert "has rows of commit 0123abc, which is not" in why_stale(text, ["python -m x"], [], [], changed)


def test_results_say_that_they_were_measured_on_uncommitted_files(monkeypatch):
    changed = " M heads/loop.py"
    monkeypatch.setattr(staleness, "git", lambda *asked: changed if asked[0] == "status" else "abc1234")
    text = as_markdown("plan", "python -m x", f"2026-01-02, 1.0 minutes, a machine, commit {verify.head()}", "a")
    assert "a machine, commit abc1234, with changes that are not committed\n" in text
    assert why_stale(text, ["python -m x"], [], [], lambda *_: []) == "was measured on files that no commit holds"
    changed = ""
    assert verify.head() == "abc1234"


def test_the_page_of_the_race_has_the_command_that_recorded_its_picture():
    assert f"\n{CHECKS['race'].command}\n" in (ROOT / "docs/evaluate.md").read_text(encoding="utf-8")


def test_results_are_plain_text_without_progress():
    text = as_markdown(
        "plan", "python -m x", "2026-01-02, 1.0 minutes, a machine", "\x1b[1ma  \x1b[0m\n 3/9 1.2it/s]\nb"
    )
    assert "- command: `python -m x`\n- measured: 2026-01-02, 1.0 minutes, a machine\n\n```\na\nb\n```" in text


def test_the_readmes_lines_load_heads_and_generate(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGES[0].read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    exec(compile(code.replace("max_new_tokens=128", "max_new_tokens=6"), "README.md", "exec"), {})
    assert "def main(" in capsys.readouterr().out
