"""The options of a suite or a format: typer reads them, reports mistakes as in every command, and explains each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import ROOT
from typer.testing import CliRunner

from heads.cli.main import app
from heads.cli.option_groups import config_options, read_config
from heads.evaluation.suites import suite_module, suites
from heads.export.formats import format_module, formats, writes

DEMO = ROOT / "checkpoints" / "demo" / "medusa"
KINDS = [("evaluate", "--suite", name) for name in suites()]
KINDS += [("export", "--to", name) for name in formats() if writes(name)]


def unboxed(text: str) -> str:
    """Without the frame, and in one line."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--suite", "speed", "--max-new-token", "3"], "(Possible options: --max-new-tokens)"),
        (
            ["--suite", "speed", "--max-new-tokens", "x"],
            "Invalid value for '--max-new-tokens': Input should be a valid",
        ),
        (["--suite", "speed", "--max-new-tokens", "0"], "Input should be greater than or equal to 1"),
        (["--suite", "speed", "--max-new-tokens"], "'--max-new-tokens' requires an argument"),
        (["--suite", "speed", "--form", "poem"], "'poem' is not one of 'auto', 'chat', 'text'"),
        (["--suite", "speed", "--flops", "no"], "unexpected extra argument(s) (no)"),
        (["--suite", "vicuna", "--questions", "q", "--prices", "1,a"], "Invalid value for '--prices'"),
        (["--suite", "lm-eval"], "Missing option '--tasks'"),
        (["--to", "medusa", "--out", "a", "--file", "zip"], "'zip' is not one of 'safetensors', 'pt'"),
        (["--to", "medusa", "--out", "a", "--fil", "pt"], "(Possible options: --file)"),
    ],
)
def test_mistakes_are_reported_as_of_every_command(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["evaluate" if "--suite" in words else "export", str(DEMO), *words])
    assert result.exit_code == 2
    assert said in unboxed(result.output)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "option", "name"), KINDS)
def test_a_mistake_names_the_option_that_lists_all(command: str, option: str, name: str) -> None:
    out = ["--out", "unwritten"] if command == "export" else []
    result = CliRunner().invoke(app, [command, str(DEMO), option, name, *out, "--unknown"])
    assert f"{command} HEADS {option} {name} --{'suite' if option == '--suite' else 'format'}-help' for help" in (
        unboxed(result.output)
    )


def test_a_value_that_the_config_itself_refuses_is_one_sentence() -> None:
    result = CliRunner().invoke(app, ["evaluate", str(DEMO), "--suite", "vicuna", "--questions", "q", "--step", "0"])
    assert result.exit_code == 1
    assert "step=0.0 was given; allowed are numbers above 0" in result.output


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--tree", "none", "--lookup=null"], (None, None, [])),
        (["--tree=a.json", "--tree", "None", "--lookup", "3"], (None, 3, [])),
        (["--tree", "none", "--tree", "a.json"], ("a.json", None, [])),
        (["--categories", "a,b", "--categories=c"], (None, None, ["a", "b", "c"])),
    ],
)
def test_none_stands_for_no_value_and_lists_may_be_repeated(
    words: list[str], found: tuple[str | None, int | None, list[str]]
) -> None:
    config = read_config(suite_module("speed").Config, words, "headway evaluate HEADS --suite speed")
    assert (config.tree, config.lookup, config.categories) == found


def test_none_is_no_value_of_a_field_that_needs_one() -> None:
    result = CliRunner().invoke(app, ["evaluate", str(DEMO), "--suite", "speed", "--max-new-tokens", "none"])
    assert result.exit_code == 2
    assert "Invalid value for '--max-new-tokens'" in unboxed(result.output)


@pytest.mark.parametrize(("command", "option", "name"), KINDS)
def test_every_option_is_listed_and_explained(command: str, option: str, name: str) -> None:
    shown = CliRunner().invoke(app, [command, option, name, "--suite-help" if option == "--suite" else "--format-help"])
    assert shown.exit_code == 0
    module = suite_module(name) if option == "--suite" else format_module(name)
    for parameter in config_options(module.Config):
        (found,) = parameter.annotation.__metadata__
        assert found.help, parameter.name
        assert "--" + parameter.name.replace("_", "-") in shown.output
