"""What `python -m train plan` prints, and how it refuses."""

import io
import re
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants
from planned_runs import config, write_backbone
from rich.console import Console

from heads.data.documents import DataConfig, SourceConfig
from train.__main__ import main
from train.config import read_config
from train.plan.command import offline_if_unreachable, plan
from train.plan.costs import Machine
from train.plan.plan import make_plan

ROOT = Path(__file__).resolve().parents[3]


def printed(*arguments, width=140, **machine):
    output = io.StringIO()
    plan(read_config(arguments), Machine(**machine), Console(file=output, width=width))
    return output.getvalue()


KINDS = {
    "base": "a backbone alone",
    "medusa2": "heads and backbone together",
    "grounded_soft": "heads with a teacher",
    "dynamo": "heads with layers of their own",
    "hydra_pp": "heads behind a prefix layer",
    "gru": "heads with a recurrent state",
    "eagle": "one layer that reads its own states",
    "mtp": "modules of the backbone's own kind",
    "mlp_speculator": "a family of a server's own",
}


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_run_is_planned(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = printed("--config", f"configs/demo/{name}.yaml", tokens=1_000_000, gpus=2, memory="80GB")
    for words in ("Parameters", "frozen weights", "zero3", "FLOPs of the run", "time on 2 x H100", "last/"):
        assert words in shown
    assert "NO" not in shown
    assert "warning" not in shown


@pytest.mark.parametrize(("width", "tables"), [(60, 2), (100, 1)])
def test_no_figure_is_broken_on_a_narrow_terminal(width, tables, monkeypatch):
    monkeypatch.chdir(ROOT)
    shown = printed("--config", "configs/demo/grounded.yaml", tokens=1_000_000, gpus=2, memory="80GB", width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    assert shown.count(" frozen weights  ") == shown.count(" fits in 80.0 GB ") == tables
    assert shown.count("% of the memory is left") == 1
    assert re.search(r"time on 2 x H100 +0\.\d+ s", shown)


def test_the_rows_of_stored_states_are_shown_where_they_are_stored(monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--config", "configs/demo/grounded.yaml"]
    live, stored = (printed(*flags, *more, tokens=100_000) for more in ((), ("--cache_hidden_states", "true")))
    assert "hidden states of all training blocks, if cached" in live
    rows = "storing hidden states", "FLOPs of storing the hidden states of a block", "in $HF_DATASETS_CACHE"
    for row in rows:
        assert row in stored
        assert row not in live


def test_data_on_this_machine_is_counted(monkeypatch, tmp_path):
    import datasets

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n" * 400)
    flags = ["--data.train", f"[{{path: {text}}}]", "--data.eval", "[]", "--trainer.max_steps", "-1"]
    shown = printed("--config", "configs/demo/grounded.yaml", *flags, "--data.heldout_list", "null")
    assert re.search(r"training blocks\s+\d", shown)
    assert re.search(r"steps\s+\d", shown)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "80 parsecs"], "--memory '80 parsecs' was given; give a size with its unit, such as 80GB"),
        (["--gpus", "0"], "gpus=0 was given; allowed are integers of at least 1."),
        (
            ["--mfu", "40"],
            "mfu=40.0 was given; allowed are numbers above 0 and of at most 1; it is a share",
        ),
        (["--tokens-per-second", "9", "--tflops", "5"], "--tokens-per-second was given with --tflops or --mfu"),
        (["--tokens-per-second", "9", "--mfu", "0.5"], "--tokens-per-second was given with --tflops or --mfu"),
        (["--tflops", "-1"], "tflops=-1.0 was given; allowed are numbers above 0, or null."),
        (
            ["--tokens-per-second", ".inf"],
            "tokens_per_second=inf was given; allowed are finite numbers above 0, or null.",
        ),
        (
            ["--backbone.name_or_path", "/nowhere/at-all"],
            "a folder that holds config.json, or a name that",
        ),
    ],
)
def test_errors_are_one_sentence(flags, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--config", "configs/demo/grounded.yaml", *flags])
    assert stopped.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert words in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--device", "tpu"], "device='tpu' was given; allowed are 'cuda', 'cpu', or null."),
        (["--tokens", "1e9"], "tokens='1e9' was given; allowed are integers, or null."),
        (["--gpus", "1.5"], "gpus='1.5' was given; allowed are integers."),
    ],
)
def test_values_of_a_wrong_type_end_in_a_short_sentence(flags, sentence, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(["plan", "--config", "configs/demo/grounded.yaml", *flags])
    assert capsys.readouterr().err == f"python -m train plan: error: {sentence}\n"


def test_a_config_json_alone_is_planned_though_no_tokenizer_can_count_the_data(tmp_path, monkeypatch):
    write_backbone(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x\n" * 9)
    run = config(tmp_path, data=DataConfig(train=[SourceConfig(path=str(text))], block_size=16))
    monkeypatch.setattr(socket, "create_connection", lambda *address: pytest.fail("the hub was asked"))
    assert make_plan(run).blocks is None
    with offline_if_unreachable(run.backbone.name_or_path):
        assert not constants.HF_HUB_OFFLINE


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch):
    def unreachable(address, timeout):
        raise OSError(address)

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for proxy in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    for names in (["EleutherAI/pythia-70m-deduped"], [str(ROOT), "EleutherAI/pythia-70m-deduped"]):
        with offline_if_unreachable(*names):
            assert constants.HF_HUB_OFFLINE
        assert not constants.HF_HUB_OFFLINE
    with offline_if_unreachable(str(ROOT), None):
        assert not constants.HF_HUB_OFFLINE


def test_a_tokenizer_on_a_hub_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    write_backbone(tmp_path)
    run = config(tmp_path)
    run.backbone.tokenizer = "somebody/some-tokenizer"
    seen = []
    monkeypatch.setattr("train.plan.command.can_connect", lambda endpoint: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("train.plan.command.make_plan", lambda *_, **__: seen.append(constants.HF_HUB_OFFLINE) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plan(run, Machine())
    assert seen == [True]


def test_help_explains_the_flags(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--gpus", "--memory", "--device", "--tokens", "--tflops", "--mfu", "--tokens-per-second", "--config"):
        assert flag in shown


def test_the_flags_are_read_beside_those_of_the_run(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    machine = ["--gpus=2", "--memory", "24GiB", "--device", "cpu", "--tokens", "64000", "--tokens-per-second", "1e3"]
    run = ["--data.block_size", "64", "--trainer.max_steps", "-1", "--trainer.num_train_epochs", "1"]
    main(["plan", "--config", "configs/demo/grounded.yaml", *machine, *run, "--trainer.per_device_train_batch_size=1"])
    shown = capsys.readouterr().out
    for words in ("2 processes", "fits in 25.8 GB", "time on 2 x 1,000 tokens/s stated"):
        assert words in shown
    assert re.search(r"training blocks\s+1,000", shown)
