"""The command line on a tiny model: text is plain generation's, errors are one sentence, help explains every option."""

from __future__ import annotations

import codecs
import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from byte_tokenizer import EOS, NUM_TOKENS, byte_tokenizer
from tiny import tiny_model
from typer.testing import CliRunner

from heads.checkpoint import save_load
from heads.checkpoint.opening import open_backbone
from heads.cli import main as cli_main
from heads.cli.main import COMMANDS, app
from heads.cli.options import SamplingOptions, TreeOptions, use_color
from heads.cli.writing.text import DecodingOptions
from heads.decoding.draft_model_decoding import DraftModelDecoding
from heads.decoding.tuned_file import TunedTree
from heads.families import create

PROMPT = "def main"
NEW_TOKENS = 24
SUMMARY = re.compile(
    r"^\d+ tokens, \d+\.\d\d tokens per pass, \d+\.\d tokens/s(, the first after \d+\.\d\d s)?$", re.MULTILINE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a backbone `base` and heads `medusa` and `grounded` on it."""
    folder = tmp_path_factory.mktemp("demo")
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = EOS
    model.config.eos_token_id = model.config.pad_token_id = EOS
    model.config.bos_token_id = model.generation_config.bos_token_id = EOS
    model.config.name_or_path = str(folder / "base")
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    held_out = {"heldout_files": ["copyreg.py", "dataclasses.py", "fractions.py"]}
    (folder / "base" / "training.json").write_text(json.dumps(held_out), encoding="utf-8")
    draft_model = tiny_model("qwen3", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    draft_model.save_pretrained(folder / "draft")
    byte_tokenizer().save_pretrained(folder / "draft")
    tiny_model("qwen3", dtype=torch.float32).save_pretrained(folder / "smaller_vocabulary")
    for family in ("medusa", "grounded"):
        token_heads = create(family, model, num_heads=2)
        token_heads.measured_accuracy = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.05]]
        save_load.save(token_heads, folder / family, recipe={"commit": "abc123", "measured": {"step": 7}})
    return folder


@pytest.fixture(scope="module")
def plain_text(folder: Path) -> str:
    """What plain `generate` says after the prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    prompt_1T = torch.tensor([byte_tokenizer()(PROMPT)["input_ids"]])
    output = model.generate(prompt_1T, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(byte_tokenizer().decode(output[0, prompt_1T.shape[1] :], skip_special_tokens=True))


def run(*arguments: Any, **more: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **more)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    parameters = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    assert parameters
    assert [p.name for p in parameters if p.name != "help" and not getattr(p, "help", None)] == []


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("family", ["medusa", "grounded"])
def test_greedy_text_is_plain_generations_text(folder: Path, plain_text: str, family: str) -> None:
    result = run("generate", folder / family, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plain_text + "\n"
    assert SUMMARY.search(result.stderr)


@pytest.mark.parametrize(
    "options", [["--plain"], ["--tree", "3"], ["--lookup", "0"], ["--temperature", "0"], ["--pack"]]
)
def test_text_does_not_depend_on_how_it_is_decoded(folder: Path, plain_text: str, options: list[str]) -> None:
    result = run("generate", folder / "grounded", "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, *options)
    assert result.stdout == plain_text + "\n"


@pytest.mark.parametrize("draft", ["draft", "base"])
def test_text_does_not_depend_on_who_drafts(folder: Path, plain_text: str, draft: str) -> None:
    asked = ["generate", folder / "grounded", "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS]
    result = run(*asked, "--draft-model", folder / draft)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plain_text + "\n"
    per_pass = re.search(r"(\d+\.\d\d) tokens per pass", result.stderr)
    assert per_pass
    assert draft == "draft" or float(per_pass[1]) > 3, "the backbone as its own draft model is always right"


def test_sampling_with_a_draft_model_is_repeated_by_its_seed(folder: Path) -> None:
    asked = ["generate", folder / "medusa", "--prompt", PROMPT, "--temperature", "1.5", "--max-new-tokens", "16"]
    asked += ["--draft-model", folder / "base"]
    first, again, other = (run(*asked, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other


def test_a_draft_model_needs_no_folder_of_heads(folder: Path, plain_text: str, tmp_path: Path) -> None:
    pair = ["--backbone", folder / "base", "--draft-model", folder / "draft"]
    result = run("generate", *pair, "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS))
    assert (result.exit_code, result.stdout.rstrip("\n")) == (0, plain_text), result.stderr
    assert run("chat", *pair, "--max-new-tokens", "2", input="Hi\n").exit_code == 0
    plain = run("generate", *pair[:2], "--plain", "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS))
    assert plain.stdout.rstrip("\n") == plain_text
    small = ["--num-prompts", "1", "--prompt-tokens", "8", "--max-new-tokens", "4", "--repeats", "1"]
    result = run("benchmark", *pair, *small, "--no-prompt-lookup", "--json", tmp_path / "rows.json")
    assert result.exit_code == 0, result.stderr
    (rows,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["blocks"].values()
    assert [row["name"] for row in rows] == ["plain", "draft model", "draft model, k=adaptive", "assistant_model"]


def test_a_conversation_with_a_draft_model_keeps_the_caches_of_both(folder: Path) -> None:
    options = DecodingOptions(draft_model=str(folder / "draft"))
    opened = open_backbone(str(folder / "base"))
    decoding = options.build(opened, "auto", greedy=True, keep_caches=True)
    assert isinstance(decoding, DraftModelDecoding)
    assert (decoding.reusable is not None, decoding.lookup) == (True, 10)
    decoding = DecodingOptions(draft_model=str(folder / "draft"), lookup=0).build(opened, "auto", greedy=True)
    assert isinstance(decoding, DraftModelDecoding)
    assert (decoding.reusable, decoding.lookup) == (None, 0)


@pytest.mark.parametrize("command", ["benchmark", "tune-tree"])
def test_the_old_name_of_max_new_tokens_is_refused_with_the_new_one(folder: Path, command: str) -> None:
    result = run(command, folder / "medusa", "--new-tokens", "5")
    assert result.exit_code == 2
    assert "No such option: --new-tokens" in result.stderr
    assert "--max-new-tokens" in result.stderr


def test_benchmark_compares_a_draft_model_both_ways(folder: Path, tmp_path: Path) -> None:
    small = ["--num-prompts", "1", "--prompt-tokens", "8", "--max-new-tokens", "12", "--repeats", "1"]
    files = ["--json", tmp_path / "rows.json"]
    result = run("benchmark", folder / "medusa", "--draft-model", folder / "base", *small, *files)
    assert result.exit_code == 0, result.stderr
    (rows,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["blocks"].values()
    per_pass = {row["name"]: row["tokens_per_pass"] for row in rows}
    assert list(per_pass)[-3:] == ["draft model", "draft model, k=adaptive", "assistant_model"]
    assert per_pass["draft model"] == 12 / 3, "the prompt's pass, one of 8 tokens and one of 3"
    assert all(row["same_text"].startswith("yes") for row in rows)


def test_highlight_without_its_colours_is_the_text(folder: Path, plain_text: str, tmp_path: Path) -> None:
    every_token = {"paths": [[rank] for rank in range(NUM_TOKENS)]}  # so that untrained heads have drafts accepted
    (tmp_path / "tree.json").write_text(json.dumps(every_token), encoding="utf-8")
    asked = ["generate", folder / "medusa", "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--highlight"]
    asked += ["--tree", tmp_path / "tree.json"]
    coloured = run(*asked, "--color", "always", color=True)
    assert "\x1b[32m" in coloured.stdout
    assert re.sub(r"\x1b\[\d+m", "", coloured.stdout) == plain_text + "\n"
    assert run(*asked, color=True).stdout == plain_text + "\n"  # no terminal, no colours


def test_the_prompt_may_come_through_a_pipe(folder: Path, plain_text: str) -> None:
    result = run("generate", folder / "medusa", "--max-new-tokens", NEW_TOKENS, input=PROMPT + "\n")
    assert result.stdout == plain_text + "\n"


def test_sampling_is_repeated_by_its_seed(folder: Path) -> None:
    asked = ["generate", folder / "medusa", "--prompt", PROMPT, "--temperature", "1.5", "--max-new-tokens", "16"]
    first, again, other = (run(*asked, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "{folder}/nothing", "--prompt", "a"], "holds no heads.json"),
        (["info", "{folder}/base"], "holds no heads.json"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--top-k", "5"], "--temperature above 0"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--temperature", "1e-45"], "give 1e-06 or more, or 0"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--plain", "--highlight"], "leave out --plain"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--plain", "--lookup", "0"], "leave out --plain"),
        (["chat", "{folder}/medusa", "--plain", "--lookup", "10"], "leave out --plain"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--plain", "--draft-model", "x"], "leave out --plain"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--tree", "3", "--draft-model", "x"], "leave out --tree"),
        (["generate", "--prompt", "a", "--draft-model", "x"], "No folder of heads was given; give one, or --backbone"),
        (["chat", "--backbone", "{folder}/base"], "--draft-model MODEL, or --backbone MODEL and --plain, to decode"),
        (["benchmark", "--backbone", "{folder}/base"], "No folder of heads was given; give one, or --backbone"),
        (["benchmark", "--backbone", "x", "--draft-model", "x", "--tree", "3"], "need a folder of heads"),
        (["chat", "{folder}/medusa", "--draft-model", "{folder}/no"], "could not be loaded"),
        (
            ["generate", "{folder}/medusa", "--prompt", "a", "--draft-model", "{folder}/smaller_vocabulary"],
            "trained with the backbone's tokenizer",
        ),
        (["generate", "{folder}/medusa", "--prompt", "a", "--tree", "no.json"], "no.json does not exist"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--backbone", "{folder}/no"], "could not be loaded"),
        (["generate", "{folder}/medusa", "--prompt", "a", "--max-new-tokens", "9999"], "lower --max-new-tokens"),
        (["generate", "{folder}/medusa", "--prompt", ""], "prompt is empty"),
        (
            ["chat", "{folder}/medusa", "--dtype", "float64", "--pack"],
            "--pack was given for weights in float64, and only float32, bfloat16 and float16 can be packed",
        ),
        (
            ["generate", "{folder}/medusa", "--prompt", "a", "--pack", "--compile"],
            "--pack was given with --compile",
        ),
        (["benchmark", "{folder}/medusa", "--pack", "--compile"], "--pack was given with --compile"),
        (["race", "{folder}/medusa", "--prompt", "a", "--pack", "--compile"], "--pack was given with --compile"),
        (["benchmark", "{folder}/medusa", "{folder}/medusa"], "given twice"),
        (["race", "a", "b", "c", "--prompt", "a"], "3 folders of heads were given; a race has room"),
        (["race", "a", "b", "--mx", "m", "--prompt", "a"], "2 folders of heads and --mx were given; a race has room"),
        (["benchmark", "{folder}/medusa", "--prompts", "{folder}/no.txt"], "does not exist"),
        (["benchmark", "{folder}/medusa", "--num-prompts", "1", "--max-new-tokens", "705"], "lower --prompt-tokens or"),
    ],
)
def test_what_a_user_can_cause_is_one_sentence(folder: Path, arguments: list[str], message: str) -> None:
    result = run(*(argument.format(folder=folder) for argument in arguments))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["info"], ["generate", "--prompt", "a"]])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone": "base"}, "backbone='base' was given; allowed are mappings"),
        ({"backbone": {}}, "backbone.name"),
        ({"config": {"num_heads": "2"}}, "num_heads='2' was given"),
        ({"config": None}, "config=None was given"),
        ({"family": 1}, "family=1 was given; allowed are texts"),
        ({"format_version": "1"}, "format_version='1' was given; allowed are integers"),
        ({"measured_accuracy": [[]]}, "measured_accuracy"),
        ({"recipe": [1]}, "recipe=[1] was given; allowed are mappings, or null"),
    ],
)
def test_a_broken_description_is_one_sentence(
    folder: Path, tmp_path: Path, command: list[str], change: dict[str, Any], message: str
) -> None:
    description = json.loads((folder / "medusa" / "heads.json").read_text(encoding="utf-8"))
    (tmp_path / "heads.json").write_text(json.dumps(description | change), encoding="utf-8")
    (tmp_path / "heads.safetensors").symlink_to(folder / "medusa" / "heads.safetensors")
    result = run(command[0], tmp_path, *command[1:])
    assert result.exit_code == 1
    assert message in result.stderr
    assert "heads.json" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_traceback_is_there_when_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_TRACEBACK", "1")
    assert isinstance(run("info", folder / "base").exception, ValueError)


def test_info_shows_what_the_folder_holds(folder: Path) -> None:
    parameters = json.loads((folder / "grounded" / "heads.json").read_text(encoding="utf-8"))["num_parameters"]
    text = run("info", folder / "grounded").stdout
    for expected in ("grounded", "num_heads 2", f"{parameters:,}", "LlamaForCausalLM", "abc123", "50.0%", "steps"):
        assert expected in text
    described = json.loads(run("info", folder / "grounded", "--json").stdout)
    assert described["num_parameters"] == parameters
    assert described["bytes"] > 4 * parameters
    assert described["backbone_found_at"] == str(folder / "base")
    assert described["recipe"]["commit"] == "abc123"


def test_info_says_what_heads_were_trained_on(folder: Path, tmp_path: Path) -> None:
    description = json.loads((folder / "medusa" / "heads.json").read_text(encoding="utf-8"))
    loss = {"hard": 0.5, "soft": 1.0, "divergence": "kl", "temperature": 2.0, "top_n": 64, "regression": 0.1}
    description["recipe"]["config"] = {"loss": loss, "head_decay": 0.8}
    (tmp_path / "heads.json").write_text(json.dumps(description), encoding="utf-8")
    (tmp_path / "heads.safetensors").symlink_to(folder / "medusa" / "heads.safetensors")
    text = " ".join(run("info", tmp_path).stdout.split())
    for expected in (
        "0.5 × true tokens",
        "(KL, T 2, its 64 best tokens)",
        "0.1 × distance",
        "0.8^(k - 1)",
    ):
        assert expected in text


def test_info_says_how_many_heads_the_tuned_tree_uses(folder: Path, tmp_path: Path) -> None:
    for name in ("heads.json", "heads.safetensors"):
        (tmp_path / name).symlink_to(folder / "medusa" / name)
    tuned = TunedTree(kind="static", paths=((0,), (1,)), lookup=10, measured_on={"batch": 1, "device_type": "cpu"})
    (tmp_path / "tree.json").write_text(tuned.as_json(), encoding="utf-8")
    text = " ".join(run("info", tmp_path).stdout.split())
    assert "static, 3 nodes, uses 1 of 2 heads, lookup 10; measured on batch 1, device cpu" in text
    assert json.loads(run("info", tmp_path, "--json").stdout)["tuned_tree"]["heads_used"] == 1
    (tmp_path / "tree.json").write_text("{", encoding="utf-8")
    assert "must hold" in run("info", tmp_path).stdout
    assert "tuned tree" not in run("info", folder / "medusa").stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_one_line(folder: Path, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for place in (
        "options.open_heads",
        "suites.read_runs",
        "writing.autocomplete.open_backbone",
        "export.open_heads",
        "export.open_backbone",
        "export.recognise",
        "export.push_to_hub",
        "quantize.open_backbone",
        "folders.open_heads",
        "folders.describe",
        "folders.merge",
        "ngrams.load_tokenizer",
    ):
        monkeypatch.setattr(f"heads.cli.{place}", interrupted)
    files = {"merge": ["--out", tmp_path], "generate": ["--prompt", "a"], "race": ["--prompt", "a"]}
    files["prune-vocabulary"] = ["--ngrams", tmp_path, "--tokens", 5, "--out", tmp_path]
    files["export"] = ["--to", "medusa", "--out", tmp_path / "out"]
    files["import"] = ["--backbone", "a", "--out", tmp_path / "out"]
    files["push"] = ["organisation/name"]
    files["count-ngrams"] = ["--tokenizer", "a", "--data", "b", "--out", tmp_path]
    heads = [] if command == "count-ngrams" else [folder / "medusa"]
    result = run(command, *heads, *files.get(command, []))
    assert (result.exit_code, result.stderr) == (130, "interrupted: ended before it was done.\n")


def test_info_of_a_run_names_the_heads_that_it_saved(folder: Path, tmp_path: Path) -> None:
    for name, measured in {"best": {"step": 4, "tokens_per_pass": 2.5}, "last": {"step": 9}}.items():
        (tmp_path / name).mkdir()
        description = json.loads((folder / "medusa" / "heads.json").read_text(encoding="utf-8"))
        description["recipe"]["measured"] = measured
        (tmp_path / name / "heads.json").write_text(json.dumps(description), encoding="utf-8")
        (tmp_path / name / "heads.safetensors").symlink_to(folder / "medusa" / "heads.safetensors")
    result = run("info", tmp_path)
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    said = ("heads that a run saved", "the best by tokens per pass", "as the run ended", "2.50", "not measured")
    for expected in said:
        assert expected in text
    assert set(json.loads(run("info", tmp_path, "--json").stdout)) == {"best", "last"}


ODD_RECIPES: list[dict[str, Any]] = [
    {"measured": [1], "config": [2], "versions": "3", "command": {"a": 1}, "commit": [4]},
    {"measured": {"step": [1], "backbone_ppl": {"before": "x"}}, "versions": {"a": {}}, "command": "train"},
    {"measured": {"backbone_ppl": 3}, "config": {"data": {"train": [3]}, "loss": {"hard": "a"}}, "command": [1]},
    {"config": {"data": {"train": "abc"}, "loss": [1], "head_decay": {}}, "draft_vocabulary": {"coverage": "x"}},
    {"config": {"loss": {"soft": 1, "temperature": None, "head_weights": 3}}, "draft_vocabulary": 7, "command": 3},
]


@pytest.mark.parametrize("recipe", ODD_RECIPES, ids=range(len(ODD_RECIPES)))
def test_info_shows_what_it_can_of_an_odd_recipe(folder: Path, tmp_path: Path, recipe: dict[str, Any]) -> None:
    description = json.loads((folder / "medusa" / "heads.json").read_text(encoding="utf-8"))
    (tmp_path / "heads.json").write_text(json.dumps(description | {"recipe": recipe}), encoding="utf-8")
    (tmp_path / "heads.safetensors").symlink_to(folder / "medusa" / "heads.safetensors")
    result = run("info", tmp_path)
    assert (result.exit_code, result.exception) == (0, None)
    assert "shape that is not known" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", ["heads.json", "tree.json"])
def test_json_that_begins_with_a_byte_order_mark_is_read(folder: Path, tmp_path: Path, name: str) -> None:
    for file in ("heads.json", "heads.safetensors"):
        (tmp_path / file).write_bytes((folder / "medusa" / file).read_bytes())
    (tmp_path / "tree.json").write_text(json.dumps({"paths": [[0]]}), encoding="utf-8")
    before = run("info", tmp_path).stdout
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (tmp_path / name).read_bytes())
    result = run("info", tmp_path)
    assert (result.exit_code, result.stdout.splitlines()[3:]) == (0, before.splitlines()[3:])


def test_the_backbone_is_found_beside_heads_that_were_moved_with_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "medusa").mkdir()
    description = json.loads((folder / "medusa" / "heads.json").read_text(encoding="utf-8"))
    description["backbone"]["name"] = "elsewhere/base"
    (tmp_path / "medusa" / "heads.json").write_text(json.dumps(description), encoding="utf-8")
    (tmp_path / "medusa" / "heads.safetensors").write_bytes((folder / "medusa" / "heads.safetensors").read_bytes())
    (tmp_path / "base").symlink_to(folder / "base")
    result = run("generate", tmp_path / "medusa", "--prompt", PROMPT, "--max-new-tokens", "2")
    assert result.exit_code == 0, result.stderr


def test_chat_answers_resets_and_ends_with_its_input(folder: Path) -> None:
    asked = "Hi\n/what\n\n/reset\nHi\n"
    result = run("chat", folder / "medusa", "--max-new-tokens", "4", input=asked)
    assert result.exit_code == 0, result.stderr
    assert len(SUMMARY.findall(result.stderr)) == 2
    assert "no command /what" in result.stderr
    assert "A new conversation starts" in result.stderr
    first, second = result.stdout[: len(result.stdout) // 2], result.stdout[len(result.stdout) // 2 :]
    assert first == second  # after /reset the same question has the same answer
    assert run("chat", folder / "medusa", input="/exit\nHi\n").stdout == ""


def test_a_conversation_that_outgrows_the_backbone_can_begin_anew(folder: Path) -> None:
    asked = "Hi\n" + "a" * 700 + "\n/reset\nHi\n"
    result = run("chat", folder / "medusa", "--max-new-tokens", "4", input=asked)
    assert result.exit_code == 0, result.stderr
    assert "start a new conversation with /reset" in result.stderr
    assert len(SUMMARY.findall(result.stderr)) == 2


def test_benchmark_compares_several_folders(folder: Path, tmp_path: Path) -> None:
    files = ["--json", tmp_path / "rows.json", "--picture", tmp_path / "speed.png"]
    small = ["--num-prompts", "2", "--prompt-tokens", "12", "--max-new-tokens", "6", "--repeats", "1"]
    result = run("benchmark", folder / "medusa", folder / "grounded", *small, *files)
    assert result.exit_code == 0, result.stderr
    (rows,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["blocks"].values()
    alone, both = (
        [f"{name}, {what}" for name in ("medusa", "grounded")] for what in ("heads alone", "heads with lookup")
    )
    assert [row["name"] for row in rows] == ["plain", *alone, "prompt lookup", "lookup without heads", *both]
    assert all(row["same_text"].startswith("yes") for row in rows)
    assert all(word in result.stdout for row in rows for word in row["name"].split())  # long names take two lines
    assert "rows: text held out from the backbone, for the heads do not record what their run held out" in result.stderr
    assert (tmp_path / "speed.png").stat().st_size > 1000


def test_benchmark_takes_prompts_from_a_file_and_can_leave_prompt_lookup_out(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n", encoding="utf-8")
    small = ["--max-new-tokens", "4", "--repeats", "1", "--no-prompt-lookup", "--repetition-penalty", "1.1"]
    result = run("benchmark", folder / "medusa", "--prompts", tmp_path / "p.txt", *small)
    assert result.exit_code == 0, result.stderr
    assert "2 prompts" in " ".join(result.stdout.split())
    assert "prompt lookup" not in result.stdout
    assert "lookup without heads" in result.stdout  # ours, which any backbone can do


def test_rows_are_labelled_by_the_penalty_that_was_used(folder: Path, tmp_path: Path) -> None:
    """The given one, or the backbone's own; 1 switches that off."""
    shutil.copytree(folder / "base", tmp_path / "base")
    file = tmp_path / "base" / "generation_config.json"
    own = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**own, "repetition_penalty": 1.3}), encoding="utf-8")
    small = ["--num-prompts", "1", "--prompt-tokens", "8", "--max-new-tokens", "4", "--repeats", "1"]
    asked = ["benchmark", folder / "medusa", "--backbone", tmp_path / "base", *small, "--json", tmp_path / "rows.json"]

    def label(*options: str) -> str:
        result = run(*asked, *options)
        assert result.exit_code == 0, result.stderr
        (found,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["blocks"]
        return str(found)

    assert label() == "greedy, repetition penalty 1.3"
    assert label("--repetition-penalty", "1") == "greedy"
    assert SamplingOptions(repetition_penalty=1.0).arguments() == {"do_sample": False, "repetition_penalty": 1.0}
    assert SamplingOptions().arguments() == {"do_sample": False}


def test_what_the_run_held_out_is_measured_on_by_default(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n} and so on " * 4}) + "\n" for n in range(4)))
    description = json.loads((folder / "medusa" / "heads.json").read_text(encoding="utf-8"))
    description["recipe"]["config"] = {"data": {"train": [], "eval": [{"path": str(tmp_path / "rows.jsonl")}]}}
    (tmp_path / "heads.json").write_text(json.dumps(description), encoding="utf-8")
    (tmp_path / "heads.safetensors").symlink_to(folder / "medusa" / "heads.safetensors")
    for command in (
        ["evaluate", tmp_path, "--metrics", "accuracy", "--block-tokens", "16"],
        [
            "benchmark",
            tmp_path,
            "--num-prompts",
            "1",
            "--prompt-tokens",
            "8",
            "--max-new-tokens",
            "2",
            "--repeats",
            "1",
        ],
    ):
        result = run(*command)
        assert result.exit_code == 0, result.stderr
        assert f"rows: 4 documents of the run's eval sources, {tmp_path / 'rows.jsonl'}" in result.stderr


@pytest.mark.parametrize(
    ("lookup", "names"),
    [
        ("0", ["medusa, heads alone"]),
        ("4", ["medusa, heads alone", "lookup without heads", "medusa, heads with lookup"]),
    ],
)
def test_benchmark_shows_the_heads_alone_before_heads_with_lookup(
    folder: Path, tmp_path: Path, lookup: str, names: list[str]
) -> None:
    small = ["--num-prompts", "1", "--prompt-tokens", "8", "--max-new-tokens", "4", "--repeats", "1"]
    files = ["--json", tmp_path / "rows.json"]
    result = run("benchmark", folder / "medusa", "--lookup", lookup, "--no-prompt-lookup", *small, *files)
    assert result.exit_code == 0, result.stderr
    (rows,) = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["blocks"].values()
    assert [row["name"] for row in rows] == ["plain", *names]


def test_a_tree_is_a_number_of_nodes_or_a_file() -> None:
    assert TreeOptions(tree="12").shape == 12
    assert TreeOptions(tree="configs/trees/a.json").shape == "configs/trees/a.json"
    assert TreeOptions().shape is None


def test_colours_follow_the_terminal_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pipe:
        def isatty(self) -> bool:
            return False

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert [use_color(Pipe(), color) for color in ("auto", "always", "never")] == [False, True, False]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert use_color(Pipe(), "auto")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color(Pipe(), "auto")


def test_a_warning_is_one_sentence_without_its_place_in_the_code(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restored afterwards
    monkeypatch.setattr(cli_main, "app", lambda: None)
    cli_main.main()
    assert warnings.formatwarning("tree.json is\n not used.", UserWarning, "defaults.py", 107) == (
        "warning: tree.json is not used.\n"
    )
