"""An exported model folder: its `generate` decodes with heads as plain `generate` would, and obeys or refuses."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from image_models import image_model, image_prompt
from repository import ROOT
from safetensors.torch import load_file, save_file
from streamers import Puts
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner

import heads
from heads.checkpoint.adapter import LoraSettings, add_adapter
from heads.cli.main import app
from heads.export.hub import entry, folder
from heads.export.hub.entry import KEPT_AS
from heads.export.hub.folder import export_to_hub_folder
from heads.quantization.quantizer import METHOD

DEMO = ROOT / "checkpoints" / "demo"
PROMPT = "import os\n\ndef main("
GREEDY = {"max_new_tokens": 32, "do_sample": False}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return export_to_hub_folder(DEMO / "grounded", tmp_path_factory.mktemp("exported") / "demo")


@pytest.fixture(scope="module")
def model(exported):
    return AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype=torch.float64)


@pytest.fixture(scope="module")
def tokenizer(exported):
    return AutoTokenizer.from_pretrained(exported)


@pytest.fixture
def inputs(tokenizer):
    return tokenizer(PROMPT, return_tensors="pt")


def plain(model, **asked):
    return type(model).generate(model, **asked)


def test_what_is_written(exported):
    names = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    weights = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    ours = {"heads/heads.json", "heads/heads.safetensors", "custom_generate/generate.py"}
    assert names == weights | ours | {"custom_generate/requirements.txt", "README.md"}
    for name in weights:
        assert (exported / name).read_bytes() == (DEMO / "base" / name).read_bytes()


def test_generate_writes_the_plain_text_in_fewer_passes(model, inputs):
    wanted = plain(model, **inputs, **GREEDY)
    found = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found.sequences, wanted)
    assert found.stats.passes < 0.7 * found.stats.tokens == 0.7 * GREEDY["max_new_tokens"]
    assert torch.equal(model.generate(inputs["input_ids"], **GREEDY), wanted), "tokens by position"


def test_the_heads_are_loaded_once_and_go_with_the_model(exported, inputs, monkeypatch):
    loaded = []
    load = entry.load
    monkeypatch.setattr(entry, "load", lambda *given: loaded.append(given) or load(*given))
    one = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype=torch.float32)
    for _ in range(3):
        one.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert len(loaded) == 1
    assert not any("headway" in name for name in one.state_dict())


def test_a_model_that_was_cast_after_a_call_decodes_on(exported, inputs):
    """The heads of the first call have the dtype that the model had then."""
    one = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True, dtype=torch.float32)
    one.generate(**inputs, max_new_tokens=2, do_sample=False)
    one.double()
    assert one.generate(**inputs, **GREEDY).tolist() == plain(one, **inputs, **GREEDY).tolist()


def test_without_trust_it_is_the_plain_model(exported):
    assert "generate" not in vars(AutoModelForCausalLM.from_pretrained(exported))


def test_the_streamer_gets_the_prompt_and_every_token_and_the_end(model, inputs):
    streamer = Puts()
    wanted = plain(model, **inputs, **GREEDY)[0].tolist()
    model.generate(**inputs, **GREEDY, streamer=streamer)
    prompt, *rest = streamer.puts
    assert prompt == inputs["input_ids"][0].tolist()
    assert [token for put in streamer.puts for token in put] == wanted
    assert len(rest) < GREEDY["max_new_tokens"], "several tokens at once"
    assert streamer.ended == 1


def test_what_the_streamer_raises_ends_the_call(model, inputs):
    class Gone(Exception):  # noqa: N818 - as the server has it
        """The client has."""

    class Leaving(Puts):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 4:
                raise Gone

    streamer = Leaving()
    with pytest.raises(Gone):
        model.generate(**inputs, **GREEDY, streamer=streamer)
    assert len(streamer.puts) == 4
    assert torch.equal(model.generate(**inputs, **GREEDY), plain(model, **inputs, **GREEDY)), "the next one is whole"


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_strings": ["thread"]},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"sequence_bias": {(5,): 20.0}},
        {"suppress_tokens": [200, 201, 202]},
        {"min_new_tokens": 32, "eos_token_id": 14},
        {"eos_token_id": 14},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_options_are_obeyed(model, inputs, tokenizer, asked):
    wanted = plain(model, **inputs, **GREEDY, **asked, tokenizer=tokenizer)
    assert torch.equal(model.generate(**inputs, **GREEDY, **asked, tokenizer=tokenizer), wanted)


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 5}])
def test_sampling_follows_the_seed_of_plain_sampling(model, inputs, asked):
    texts = []
    vars(model).pop(KEPT_AS, None)  # the first call loads the heads, and draws no random numbers for it
    for generate in (model.generate, lambda **given: plain(model, **given)):
        torch.manual_seed(3)
        texts.append(generate(**inputs, max_new_tokens=24, do_sample=True, **asked).tolist())
    assert texts[0] == texts[1]


def test_settings_may_come_as_a_config(model, inputs):
    asked = {"generation_config": GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0)}
    assert torch.equal(model.generate(**inputs, **asked), plain(model, **inputs, **asked))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"num_beams": 3}, "num_beams=3 was given"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 was given"),
        ({"guidance_scale": 2.0}, "guidance runs the backbone a second time"),
        ({"synced_gpus": True}, "synced_gpus was given, .* numbers of passes"),
        ({"cache_implementation": "paged"}, "leaves heads aside"),
        ({"prefix_allowed_tokens_fn": lambda batch, tokens: [1]}, "prefix_allowed_tokens_fn"),
        ({"negative_prompt_ids": torch.ones(1, 2).long()}, "negative_prompt_ids was given"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_heads_cannot_do_is_refused(model, inputs, asked, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        model.generate(**inputs, **GREEDY, **asked)
    assert type(caught.value) is ValueError


def test_an_assistant_model_is_refused(model, inputs):
    with pytest.raises(ValueError, match=r"assistant_model was given, .* drafts come from the heads"):
        model.generate(**inputs, **GREEDY, assistant_model=model)


def test_a_server_gets_a_refusal_as_a_bad_request(model, inputs, monkeypatch):
    class HTTPException(Exception):  # noqa: N818 - as starlette has it
        def __init__(self, status_code, detail):
            self.status_code, self.detail = status_code, detail

    starlette = types.ModuleType("starlette.exceptions")
    starlette.HTTPException = HTTPException
    monkeypatch.setitem(sys.modules, "starlette.exceptions", starlette)
    monkeypatch.setitem(sys.modules, "transformers.cli.serving.server", types.ModuleType("server"))
    with pytest.raises(HTTPException) as caught:
        model.generate(**inputs, **GREEDY, num_beams=2)
    assert caught.value.status_code == 400
    assert caught.value.detail.startswith("num_beams=2 was given")


def test_another_decoding_of_the_caller_s_comes_first(model, inputs):
    asked = {"max_new_tokens": 4, "do_sample": False, "custom_generate": heads.SuperposedDecoding(k=2)}
    assert len(model.generate(inputs["input_ids"], **asked)) == 2, "drafts"


def test_heads_generate_does_not_recurse(model, inputs):
    token_heads = heads.load(model.name_or_path, model)
    wanted = plain(model, **inputs, **GREEDY)
    assert torch.equal(heads.generate(model, heads.TreeDecoding(token_heads), **inputs, **GREEDY), wanted)
    puts = Puts()
    assert torch.equal(heads.generate(model, None, **inputs, **GREEDY, streamer=puts), wanted)
    assert {len(put) for put in puts.puts[1:]} == {1}, "plain generation"


def test_the_folder_opens_as_heads_with_their_backbone(exported):
    model, token_heads = heads.load_with_backbone(exported)
    assert (token_heads.family, Path(model.name_or_path)) == ("grounded", exported)
    model, token_heads = heads.load_with_backbone(exported / "heads")
    assert Path(model.name_or_path) == exported


def test_a_backbone_that_was_trained_with_heads_is_the_folder_s(tmp_path):
    out = export_to_hub_folder(DEMO / "dynamo", tmp_path / "out")
    (trained,) = (DEMO / "dynamo").glob("backbone-*")
    assert (out / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert "trained together with the heads" in (out / "README.md").read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float64)
    inputs = AutoTokenizer.from_pretrained(out)(PROMPT, return_tensors="pt")
    found = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain(model, **inputs, **GREEDY))
    assert found.stats.passes < GREEDY["max_new_tokens"]
    assert heads.load_with_backbone(out)[1].backbone_was_trained


def tiny_heads(where, adapter=False, family="medusa"):
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(where / "base")
    byte_tokenizer().save_pretrained(where / "base")
    (where / "base" / "README.md").write_text("---\nlicense: mit\n---\n# A backbone\n", encoding="utf-8")
    model = heads.load_backbone(heads.BackboneConfig(name_or_path=str(where / "base")))
    if adapter:
        add_adapter(model, LoraSettings(rank=4))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(0.1 * float("lora_" in name))
    heads.save(heads.create(family, model, num_heads=2), where / "heads")
    return where / "heads"


@pytest.mark.parametrize("family", heads.families())
def test_every_family_is_served(tmp_path, family):
    out = export_to_hub_folder(tiny_heads(tmp_path, family=family), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float64)
    tokens = torch.arange(5, 15)[None]
    found = model.generate(tokens, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain(model, inputs=tokens, **GREEDY))
    assert found.stats.passes > 0


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_text_after_an_image_is_decoded_with_heads(tmp_path, name):
    for made in (image_model(name), byte_tokenizer()):
        made.save_pretrained(tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float64)
    heads.save(heads.create("grounded", model, num_heads=2), tmp_path / "heads")
    out = export_to_hub_folder(tmp_path / "heads", tmp_path / "out")
    model = AutoModelForImageTextToText.from_pretrained(out, trust_remote_code=True, dtype=torch.float64)
    asked = image_prompt(name) | GREEDY
    found = model.generate(**asked, return_dict_in_generate=True)
    assert torch.equal(found.sequences, plain(model, **asked))
    assert found.stats.passes > 0


def test_an_adapter_is_merged(tmp_path):
    out = export_to_hub_folder(tiny_heads(tmp_path, adapter=True), tmp_path / "out")
    adapted, _ = heads.load_with_backbone(tmp_path / "heads")
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    tokens = torch.arange(5, 15)[None]
    torch.testing.assert_close(model(tokens).logits, adapted(tokens).logits, rtol=1e-4, atol=1e-4)
    assert model.generate(tokens, **GREEDY).shape[1] > 10
    assert "license: mit" in (out / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_weights_that_were_quantised_on_loading_are_told(tmp_path, caplog):
    found = tiny_heads(tmp_path)
    content = json.loads((found / "heads.json").read_text(encoding="utf-8"))
    content["recipe"] = {
        "config": {"backbone": {"quantization": {"quant_method": "bitsandbytes", "load_in_4bit": True}}}
    }
    (found / "heads.json").write_text(json.dumps(content), encoding="utf-8")
    export_to_hub_folder(found, tmp_path / "out")
    assert "with bitsandbytes weights, and this folder has them as they are on the disk" in caplog.text


def change_config(base, **more):
    content = json.loads((base / "config.json").read_text(encoding="utf-8")) | more
    (base / "config.json").write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda base: change_config(base, auto_map={"AutoModel": "code.Model"}), "needs code that lies beside"),
        (lambda base: change_config(base, architectures=None), "names no class of transformers"),
        (lambda base: change_config(base, quantization_config={"quant_method": METHOD}), "the unpacked backbone"),
        (lambda base: (base / "model.safetensors").rename(base / "pytorch_model.bin"), r"no pickle is copied"),
        (shutil.rmtree, "is no folder here, and could not be fetched"),
    ],
    ids=["code", "class", "packed", "pickle", "gone"],
)
def test_a_backbone_that_cannot_be_served_is_refused(tmp_path, spoil, reason):
    found = tiny_heads(tmp_path)
    spoil(tmp_path / "base")
    with pytest.raises(ValueError, match=reason):
        export_to_hub_folder(found, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_with_content_is_not_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"exists; give another folder, or --overwrite"):
        export_to_hub_folder(DEMO / "medusa", tmp_path / "out")
    with pytest.raises(ValueError, match="--overwrite replaces nothing else"):
        export_to_hub_folder(DEMO / "medusa", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    (tmp_path / "out" / "config.json").write_text("{}", encoding="utf-8")  # as an earlier export has one
    export_to_hub_folder(DEMO / "medusa", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command_writes_a_folder(tmp_path):
    rows = {
        "name": "gru, heads alone",
        "tokens_per_pass": 1.8,
        "ratio": 1.2,
        "interval": [1.1, 1.3],
        "same_text": "yes",
    }
    machine = {"device": "cpu", "cpu": "one", "threads": 2}
    measured = {"blocks": {"greedy": [{**rows, "name": "gru", "tokens_per_pass": 2.5}, rows]}, "machine": machine}
    (tmp_path / "rows.json").write_text(json.dumps(measured), encoding="utf-8")
    asked = ["export", DEMO / "gru", "--to", "hub", "--out", tmp_path / "out", "--license", "mit"]
    ran = CliRunner().invoke(app, [str(word) for word in [*asked, "--measured", tmp_path / "rows.json"]])
    assert ran.exit_code == 0, ran.output
    assert f"transformers serve {tmp_path / 'out'} --trust-remote-code" in ran.stdout
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    alone = "| gru, heads alone | 1.80 | 1.20 | 1.10–1.30 | yes | greedy; cpu, one, threads: 2 |"
    assert 0 < card.index(alone) < card.index("| gru | 2.50 |"), "heads alone come first"
    assert "license: mit" in card
    again = CliRunner().invoke(app, [str(word) for word in asked])
    assert (again.exit_code, again.stderr) == (
        1,
        f"error: {tmp_path / 'out'} exists; give another folder, or --overwrite to replace it.\n",
    )
    (tmp_path / "other.json").write_text("[1]", encoding="utf-8")
    asked[5] = tmp_path / "new"
    ran = CliRunner().invoke(app, [str(word) for word in [*asked, "--measured", tmp_path / "other.json"]])
    assert "other.json cannot be read as measurements" in ran.stderr
    assert not (tmp_path / "new").exists()


def test_nothing_is_left_where_it_fails(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "copy_heads", full)
    with pytest.raises(OSError, match=r"No space left on device.; nothing was left there"):
        export_to_hub_folder(DEMO / "medusa", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["backbone", "heads"])
def test_a_copy_that_gives_other_logits_is_not_left(what, tmp_path, monkeypatch):
    copy = getattr(folder, f"copy_{what}")

    def damaged(*given):
        copy(*given)
        (file,) = (given[-1] / ("heads" if what == "heads" else "")).glob("*.safetensors")
        tensors = load_file(file)
        name = next(name for name in tensors if what == "heads" or "down_proj" in name)
        save_file({**tensors, name: tensors[name] * 1.01}, file, metadata={"format": "pt"})

    monkeypatch.setattr(folder, f"copy_{what}", damaged)
    with pytest.raises(
        ValueError,
        match="gives other logits than the backbone" if what == "backbone" else "is not the file that heads.json",
    ):
        export_to_hub_folder(DEMO / "medusa", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_headway_the_folder_says_what_is_missing(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "heads.export.hub.entry", None)
    code = (exported / "custom_generate" / "generate.py").read_text(encoding="utf-8")
    with pytest.raises(ImportError, match="decodes with Headway, which is not installed here"):
        exec(compile(code, "generate.py", "exec"), {})
