"""Compiled decoder layers: the same losses, taps and names; decoding runs uncompiled; the choice is said."""

import copy
import json
import types

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from tiny import tiny_model
from torch.utils.data import default_collate

from heads.backbone.model import Backbone
from heads.families import create
from train.config import read_config
from train.engine import compiling
from train.engine.compiling import compile_layers, compile_where_it_wins, has_cpp_compiler, num_passes
from train.engine.engine import Engine
from train.objective.model import TrainedModel
from train.run import run

needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler is here for torch.compile")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Graphs are captured and run as they are: what Inductor makes of them is its own tests' concern."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **{"backend": "eager", **options}))
    yield
    torch._dynamo.reset()


def build(family="dynamo", **settings):
    backbone = Backbone(tiny_model("llama", attn="sdpa", dtype=torch.float32))
    torch.manual_seed(1)
    return TrainedModel(backbone, create(family, backbone, num_heads=2).float(), **settings)


def a_batch(rows=2, length=12):
    tokens = torch.randint(3, 20, (rows, length), generator=torch.Generator().manual_seed(rows))
    documents = (torch.arange(length) >= 7).long().expand(rows, length)
    return {"input_ids": tokens, "loss_mask": torch.ones_like(tokens, dtype=torch.bool), "document_ids": documents}


@pytest.mark.parametrize(
    ("family", "trains"), [("grounded", True), ("dynamo", False), ("dynamo", True), ("eagle", True)]
)
def test_compiled_layers_give_the_same_loss_and_gradients(family, trains):
    plain, compiled = (build(family, trains_backbone=trains) for _ in range(2))
    names = list(compiled.state_dict())
    compile_layers(compiled)
    assert list(compiled.state_dict()) == names
    for rows in (2, 3):  # the last batch of an epoch has another size
        found = []
        for model in (plain, compiled):
            model.zero_grad()
            loss = model(**a_batch(rows))["loss"]
            loss.backward()
            found.append([loss, *(p.grad for p in model.parameters() if p.requires_grad)])
        for fast, reference in zip(*reversed(found), strict=True):
            torch.testing.assert_close(fast, reference, rtol=1e-4, atol=1e-5)  # float32, fused in another order
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"


def test_taps_follow_each_call_though_layers_are_compiled():
    """Hooks that were traced into a graph would go on writing to the first call's record."""
    model = build()
    compile_layers(model)
    for _ in range(2):
        tokens = a_batch()["input_ids"]
        for taps in ((1,), (0, 2), ("final",)):
            with torch.no_grad():
                _, recorded = model.backbone.forward(tokens, taps=taps, use_cache=False)
            assert set(recorded) == set(taps)


def test_copied_heads_run_their_own_weights():
    """Heads are copied into the backbone's dtype for decoding; a copy that called the original would measure it."""
    model = build()
    compile_layers(model)
    changed = copy.deepcopy(model.token_heads, {id(model.backbone): model.backbone})
    with torch.no_grad():
        for p in changed.parameters():
            p.zero_()
    hidden, positions = torch.randn(1, 4, 32), torch.arange(4)[None]
    with torch.no_grad():
        original, copied = (h.run_stack(0, hidden, positions, None, None) for h in (model.token_heads, changed))
    torch.testing.assert_close(copied, hidden)  # a layer of zeros adds nothing
    assert not torch.allclose(original, hidden)


def write_config(folder, **changes):
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"abc{i} " * 9}) + "\n" for i in range(20)))
    content = {
        "output_dir": str(folder / "run"),
        "backbone": {"name_or_path": str(folder / "base")},
        "data": {"train": [{"path": str(folder / "text.jsonl")}], "eval_fraction": 0.1, "block_size": 16},
        "heads": {"num_heads": 2},
        "evaluation": {"every_steps": 2, "num_prompts": 1, "prompt_tokens": 4, "new_tokens": 6},
        "trainer": {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "use_cpu": True},
    }
    (folder / "run.yaml").write_text(json.dumps(content | changes))
    return ["--config", str(folder / "run.yaml")]


@needs_compiler
def test_a_compiled_run_evaluates_saves_and_resumes(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)
    flags = write_config(tmp_path, save_every_steps=2)
    caplog.set_level("INFO", "train")
    torch._dynamo.utils.counters.clear()
    run(read_config([*flags, "--compile", "true"]))
    assert "torch.compile: decoder layers are compiled, as compile is true" in caplog.text
    # One graph for all layers of the backbone; decoding, which would add one for each shape, runs uncompiled.
    assert 0 < torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    where = run(read_config([*flags, "--compile", "true", "--resume", "true", "--trainer.max_steps", "5"]))
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 5
    assert [line["step"] for line in lines if "eval_tokens_per_pass" in line] == [2, 3, 4, 5]


def a_trainer(**config):
    args = types.SimpleNamespace(
        device=torch.device("cpu"),
        per_device_train_batch_size=4,
        world_size=2,
        max_steps=-1,
        num_train_epochs=3,
        gradient_accumulation_steps=5,
        bf16=False,
        fp16=False,
    )
    data = types.SimpleNamespace(block_size=16)
    settings = types.SimpleNamespace(**{"cache_hidden_states": False, "compile": "auto", "data": data, **config})
    return types.SimpleNamespace(
        args=args,
        config=settings,
        train_dataset=[{"document_ids": torch.zeros(16, dtype=torch.long)}] * 81,
        data_collator=default_collate,
        model=build("medusa"),
        engine=Engine.ONE,
    )


def test_passes_ahead_are_counted():
    trainer = a_trainer()
    assert num_passes(trainer) == 33  # 81 blocks in batches of 8, three epochs
    trainer.config.cache_hidden_states = True
    assert num_passes(trainer) == 11
    trainer.config.cache_hidden_states = False
    trainer.args.max_steps = 7
    assert num_passes(trainer) == 35


@needs_compiler
@pytest.mark.parametrize(("seconds", "on"), [(1.0, False), (10.0, True)])
def test_auto_compiles_runs_that_are_long_enough(seconds, on, monkeypatch, caplog):
    caplog.set_level("INFO", "train")
    monkeypatch.setattr(compiling, "seconds_per_pass", lambda *_: seconds)
    assert compile_where_it_wins(a_trainer(), "auto") is on
    assert (
        f"torch.compile: {'decoder layers are compiled' if on else 'off'}, as the run will spend about" in caplog.text
    )


DENSE = "attention: with dense masks, as decoder layers are compiled"


@needs_compiler
@pytest.mark.parametrize(
    ("block_size", "compile", "choice", "attention"),
    [
        (
            512,
            "auto",
            "off, as compiled layers need dense masks, and in blocks of 512 tokens",
            "attention: each document",
        ),
        (256, "auto", "decoder layers are compiled, as the run will spend about", DENSE),
        (512, "true", "decoder layers are compiled, as compile is true", DENSE),
    ],
)
def test_auto_leaves_long_blocks_to_attention_by_document(
    tmp_path, monkeypatch, caplog, block_size, compile, choice, attention
):
    """In a run that is long enough to repay compiling."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)
    monkeypatch.setattr(compiling, "REPAYS_AFTER", 0.0)
    caplog.set_level("INFO", "train")
    path = str(tmp_path / "text.jsonl")
    data = {"train": [{"path": path}], "eval_fraction": 0.2, "block_size": block_size}
    flags = write_config(tmp_path, data=data)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"abc{i} " * 90}) + "\n" for i in range(20)))
    run(read_config([*flags, "--compile", compile, "--trainer.max_steps", "1"]))
    assert f"torch.compile: {choice}" in caplog.text
    assert attention in caplog.text


def test_auto_compiles_long_blocks_whose_documents_are_too_short_to_attend_by_themselves():
    trainer = a_trainer()
    for length, by_document in ((16, False), (64, True)):
        ids_BT = (torch.arange(512) // length)[None]
        assert compiling.attends_by_document(trainer, {"document_ids": ids_BT}) is by_document
    assert not trainer.model.attends_by_document, "that is up to the run"


def test_what_cannot_be_compiled_is_an_error_when_asked_for_and_a_line_when_not(monkeypatch, caplog):
    caplog.set_level("INFO", "train")
    monkeypatch.setattr(compiling, "has_cpp_compiler", lambda: False)
    with pytest.raises(ValueError, match=r"compile: true was given, but no C\+\+ compiler was found"):
        compile_where_it_wins(a_trainer(), True)
    assert compile_where_it_wins(a_trainer(), "auto") is False
    assert "torch.compile: off, as no C++ compiler was found" in caplog.text
    sharded = a_trainer()
    sharded.engine = Engine.FSDP2
    with pytest.raises(ValueError, match=r"compile: true was given, but .* the engine is FSDP2"):
        compile_where_it_wins(sharded, True)


@pytest.mark.parametrize("engine", [Engine.ONE, Engine.FSDP2])
def test_a_resumed_run_that_was_compiled_goes_on_without_a_compiler_and_says_so(engine, monkeypatch, caplog):
    caplog.set_level("INFO", "train")
    monkeypatch.setattr(compiling, "has_cpp_compiler", lambda: False)
    monkeypatch.setattr(compiling, "compile_layers", lambda _: pytest.fail("nothing can be compiled here"))
    trainer = a_trainer()
    trainer.engine = engine
    assert compile_where_it_wins(trainer, True, resumed=True) is False
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    reason = "no C++ compiler was found" if engine is Engine.ONE else "the engine is FSDP2"
    assert "off, though decoder layers were compiled before, as" in record.getMessage()
    assert f"{reason}; from now on the run rounds differently" in record.getMessage()
    trainer.config.compile = True  # then it is the config that asks
    with pytest.raises(ValueError, match="compile: true was given, but"):
        compile_where_it_wins(trainer, True, resumed=True)


@pytest.mark.parametrize(("before", "said"), [(True, "compiled, as the run was"), (False, "off, as the run was not")])
def test_a_resumed_run_does_as_before(before, said, monkeypatch, caplog):
    caplog.set_level("INFO", "train")
    compiled = []
    monkeypatch.setattr(compiling, "has_cpp_compiler", lambda: True)
    monkeypatch.setattr(compiling, "compile_layers", compiled.append)
    trainer = a_trainer()
    assert compile_where_it_wins(trainer, before, resumed=True) is before
    assert compiled == [trainer.model] * before
    assert f"{said} compiled before" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("mine", ["", "no C++ compiler was found"])
def test_one_process_without_a_compiler_decides_for_all(mine, monkeypatch, caplog):
    caplog.set_level("INFO", "train")
    monkeypatch.setattr(compiling, "has_cpp_compiler", lambda: not mine)
    monkeypatch.setattr(compiling.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(compiling, "is_worth_it", lambda _: pytest.fail("some processes would wait for the others"))
    other = ("" if mine else "no C++ compiler was found", "there")
    monkeypatch.setattr(compiling, "gather_object", lambda reasons: [*reasons, other])
    assert compile_where_it_wins(a_trainer(), "auto") is False
    host = "here" if mine else "there"
    assert f"torch.compile: off, as no C++ compiler was found on {host}" in caplog.text
    with pytest.raises(ValueError, match=rf"compile: true was given, but no C\+\+ compiler was found on {host};"):
        compile_where_it_wins(a_trainer(), True)


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("true", True), ("false", False), ("on", True), ("off", False)]
)
def test_the_field_takes_auto_and_switches(tmp_path, text, value):
    (tmp_path / "c.yaml").write_text(
        f"output_dir: o\nbackbone: {{name_or_path: b}}\ndata: {{train: [{{path: p}}]}}\ncompile: {text}\n"
    )
    assert read_config(["--config", str(tmp_path / "c.yaml")]).compile == value
