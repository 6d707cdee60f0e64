"""Hidden states from a server: the same taps, runs and resume as computed here, and servers that cannot be believed."""

import fcntl
import json
import threading
import time
from itertools import count

import pytest
import torch
from byte_tokenizer import NUM_TOKENS, byte_tokenizer
from safetensors.torch import save_file
from served import RefusedError, served
from tiny import tiny_model

from heads.backbone.model import Backbone
from heads.families import create
from train.config import read_config
from train.config.states_server import StatesServerConfig
from train.data import served_states
from train.data.served_states import ServedStates
from train.objective.model import TrainedModel
from train.objective.weights import LossConfig
from train.run import run

FAMILIES = {
    "medusa": {},
    "grounded": {"hidden_offset": 2},
    "gru": {"hidden_offset": 3, "prefix_layers": 1},
    "dynamo": {},
    "eagle": {},
}
DOCUMENTS_BT = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 5, 5]])


class Vllm:
    """What vLLM does: a file for each prompt, written under a lock, a while after the answer."""

    def __init__(self, model, folder, ids, pause=0.02):
        self.model, self.folder, self.ids, self.pause = model, folder, ids, pause
        self.asked, self.names = [], count()
        self.path = lambda name: str(self.folder / name)
        self.spoil = lambda content: content
        self.lock = threading.Lock()

    def __call__(self, request):
        assert (request["path"], request["max_tokens"]) == ("/v1/completions", 1)
        with self.lock:
            name = f"cmpl-{next(self.names)}.safetensors"
            self.asked.append(request["prompt"])
        locked = (self.folder / f"{name}.lock").open("w")
        fcntl.flock(locked, fcntl.LOCK_EX)
        threading.Thread(target=self.write, args=(name, request["prompt"], locked)).start()
        return {"text": "", "response": {"kv_transfer_params": {"hidden_states_path": self.path(name)}}}

    def write(self, name, prompt, locked):
        time.sleep(self.pause)
        content = {"token_ids": torch.tensor(prompt), "hidden_states": self.states(prompt)}
        save_file(self.spoil(content), self.folder / name)
        locked.close()

    @torch.no_grad()
    def states(self, prompt):
        """(T, K, D): transformers' hidden states, but the last one before the final norm."""
        with self.lock:
            last = []
            hook = self.model.model.layers[-1].register_forward_hook(lambda _, __, out: last.append(out))
            found = self.model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
            hook.remove()
        streams = [*found[:-1], last[0][0] if isinstance(last[0], tuple) else last[0]]
        return torch.stack([streams[k][0] for k in self.ids], dim=1).contiguous()


def build(family="grounded", **settings):
    backbone = Backbone(tiny_model("llama", attn="sdpa", dtype=torch.float32))
    torch.manual_seed(1)
    return TrainedModel(backbone, create(family, backbone, num_heads=2, **FAMILIES[family]).float(), **settings)


def ids_of(model):
    return served_states.layer_ids(model.stored_taps, model.backbone.num_layers)


def config_of(url, folder, **changes):
    return StatesServerConfig(url=url, folder=str(folder), model="base", **changes)


def some_tokens(seed=0):
    return torch.randint(3, 20, DOCUMENTS_BT.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("across", [False, True], ids=["within documents", "across"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_are_those_of_the_backbone_here(family, across, tmp_path):
    model = build(family, attend_across_documents=across, loss=LossConfig(hard=0.5, soft=0.5))
    server, tokens_BT = Vllm(build(family).model, tmp_path, ids_of(model)), some_tokens()
    with served(server) as url:
        found_BNTD = ServedStates(config_of(url, tmp_path), model)(tokens_BT, DOCUMENTS_BT)
    with torch.no_grad():
        here_BNTD = model.hidden_states(tokens_BT, DOCUMENTS_BT)
    torch.testing.assert_close(found_BNTD, here_BNTD, rtol=1e-5, atol=1e-5)  # float32, other lengths of sums
    assert len(server.asked) == 1 + (2 if across else 4)  # the first is asked for twice: compared, then stored
    assert not list(tmp_path.iterdir())


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("train.run.use_all_cores", lambda: None)
    tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"abc{i} " * 9}) + "\n" for i in range(20)))
    (tmp_path / "states").mkdir()
    return tmp_path


def flags(folder, name, *more):
    content = {
        "output_dir": str(folder / name),
        "backbone": {"name_or_path": str(folder / "base")},
        "data": {"train": [{"path": str(folder / "text.jsonl")}], "block_size": 16},
        "heads": {"num_heads": 2},
        "trainer": {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 1, "use_cpu": True},
        "cache_hidden_states": True,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content))
    return ["--config", str(path), *more]


def losses(where):
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_trains_as_with_states_that_it_computed_and_asks_once(base):
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32, vocab_size=NUM_TOKENS)
    server = Vllm(model, base / "states", [model.config.num_hidden_layers])
    with served(server) as url:
        where = ["--states_server.url", url, "--states_server.folder", str(base / "states")]
        first = run(read_config(flags(base, "served", *where)))
        asked = len(server.asked)
        again = run(read_config(flags(base, "again", *where)))
    assert asked > 20
    assert len(server.asked) == asked
    assert losses(first) == losses(again)
    assert losses(first) == pytest.approx(losses(run(read_config(flags(base, "here")))), rel=1e-3)  # four digits


def spoiled(**changes):
    return lambda content: {name: changes.get(name, lambda x: x)(value) for name, value in content.items()}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoiled(hidden_states=lambda x: x.repeat(1, 2, 1)), r"hidden_states of \(4, 2, 32\)"),
        (spoiled(token_ids=lambda x: x + 1), "give it a folder of its own"),
        (spoiled(hidden_states=lambda x: x * torch.nan), "not finite"),
        (lambda content: {"other": content["token_ids"]}, "has no hidden_states"),
        (spoiled(hidden_states=lambda x: x.roll(1, 0)), "differ by .* Serve the same model"),
    ],
)
def test_files_that_are_not_the_states_are_refused(spoil, message, tmp_path):
    model = build()
    server = Vllm(build().model, tmp_path, ids_of(model))
    server.spoil = lambda content: {name: x.contiguous() for name, x in spoil(content).items()}
    with served(server) as url, pytest.raises(ValueError, match=message):
        ServedStates(config_of(url, tmp_path), model)(some_tokens(), DOCUMENTS_BT)


def test_a_neighbouring_layer_and_other_weights_are_seen(tmp_path):
    model = build()
    (right,) = ids_of(model)
    other = tiny_model("llama", attn="sdpa", dtype=torch.float32, seed=9)
    for server in (Vllm(build().model, tmp_path, [right - 1]), Vllm(other, tmp_path, [right])):
        with served(server) as url, pytest.raises(ValueError, match=r"gave other hidden states .* after layer"):
            ServedStates(config_of(url, tmp_path), model)(some_tokens(), DOCUMENTS_BT)


def test_a_server_in_half_precision_is_believed(tmp_path):
    model = build()
    server = Vllm(build().model.bfloat16(), tmp_path, ids_of(model))
    with served(server) as url:
        states = ServedStates(config_of(url, tmp_path), model)(some_tokens(), DOCUMENTS_BT)
    assert states.dtype == torch.float32


def test_only_the_name_of_a_file_is_believed(tmp_path):
    (tmp_path / "states").mkdir()
    victim = tmp_path / "cmpl-0.safetensors"
    victim.write_text("mine")
    model = build()
    server = Vllm(build().model, tmp_path / "states", ids_of(model))
    server.path = lambda name: f"{tmp_path}/states/../{name}"
    with served(server) as url:
        ServedStates(config_of(url, tmp_path / "states"), model)(some_tokens(), DOCUMENTS_BT)
    assert victim.read_text() == "mine"


def refusing(_):
    raise RefusedError(400, "maximum context length is 8 tokens")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: {"text": ""}, "answers without hidden states; start it with .* extract_hidden_states"),
        (refusing, "refuses a document of 4 tokens: .*maximum context length"),
        (
            lambda _: {"text": "", "response": {"kv_transfer_params": {"hidden_states_path": "/states/a.safetensors"}}},
            "no finished file of that name",
        ),
    ],
)
def test_a_server_without_states_ends_in_a_sentence(answer, message, tmp_path, monkeypatch):
    monkeypatch.setattr(served_states, "FILE_TIMEOUT", 0.05)
    with served(answer) as url, pytest.raises(ValueError, match=message):
        ServedStates(config_of(url, tmp_path), build())(some_tokens(), DOCUMENTS_BT)


def test_a_server_that_is_down_ends_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(served_states, "TRIES", 1)
    config = config_of("http://127.0.0.1:9/v1", tmp_path)
    with pytest.raises(ValueError, match=r"does not answer; start the server, with .*_layer_ids \[\d+\]\. The same"):
        ServedStates(config, build())(some_tokens(), DOCUMENTS_BT)


@pytest.mark.parametrize(
    ("settings", "stores", "message"),
    [
        ({"folder": "."}, True, "has settings and no url"),
        ({"url": "localhost:8000"}, True, "give a URL such as"),
        ({"url": "http://a/v1", "folder": "."}, False, "without cache_hidden_states"),
        ({"url": "http://a/v1"}, True, "shared_storage_path"),
        ({"url": "http://a/v1", "folder": "/no/such"}, True, "shared_storage_path"),
        ({"url": "http://a/v1", "folder": ".", "key_variable": "NO_SUCH_KEY"}, True, "is not set"),
    ],
)
def test_settings_that_name_no_server_are_refused(settings, stores, message):
    with pytest.raises(ValueError, match=message):
        StatesServerConfig(**settings).check(stores=stores)
