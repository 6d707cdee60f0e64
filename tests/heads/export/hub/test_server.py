"""The real `transformers serve` on an exported folder, over its OpenAI-compatible API.

One server for all tests, in a process of its own, in float32. What it says in its log, tokens and passes of each
request, is read to see that heads decoded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from tokenizers.decoders import DecodeStream

import heads
from heads.export.hub.folder import export_to_hub_folder

MISSING = [name for name in ("fastapi", "uvicorn", "openai", "pydantic") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} of headway[dev] are not installed")

DEMO = ROOT / "checkpoints" / "demo"
SERVE = "from transformers.cli.transformers import main; main()"
PROMPT = "import os\n\ndef main("
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)
COUNTED = re.compile(r"(\d+) tokens in (\d+) passes, [\d.]+ tokens per pass, with grounded heads")
START_SECONDS, SECONDS = 150, 60


class Server:
    """Its address and its log."""

    def __init__(self, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.log, self.process = log, process
        address = self.wait_for(re.compile(r"running on (http://[\d.]+:\d+)"), START_SECONDS)
        self.address = address[1]

    def wait_for(self, pattern: re.Pattern[str], seconds: float = SECONDS, after: int = 0) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if found := pattern.search(self.text()[after:]):
                return found
            time.sleep(0.05)
        raise AssertionError(f"{pattern.pattern!r} did not come up in:\n{self.text()[-3000:]}")

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def counted(self, after: int) -> tuple[int, int]:
        """Tokens and passes of the request that was counted first after a place in the log."""
        found = self.wait_for(COUNTED, after=after)
        return int(found[1]), int(found[2])

    def open(self, path: str, **asked: Any) -> Any:
        body = json.dumps({"temperature": 0, **asked}).encode()
        request = urllib.request.Request(f"{self.address}/v1/{path}", body, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=SECONDS)

    def complete(self, **asked: Any) -> tuple[str, str, int]:
        """Text, finish reason, number of tokens."""
        with self.open("completions", **asked) as response:
            found = json.load(response)
        choice = found["choices"][0]
        return choice["text"], choice["finish_reason"], found["usage"]["completion_tokens"]

    def stream(self, path: str, **asked: Any) -> list[dict[str, Any]]:
        with self.open(path, stream=True, **asked) as response:
            lines = response.read().decode().split("\n\n")
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    out = export_to_hub_folder(DEMO / "grounded", folder / "demo")
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    command = [sys.executable, "-c", SERVE, "serve", str(out), "--trust-remote-code", "--dtype", "float32"]
    command += ["--device", "cpu", "--host", "127.0.0.1", "--port", "0", "--log-level", "info"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        yield Server(folder / "log", process)
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def plain():
    """Plain greedy generation of the same backbone in this process: the new ids."""
    config = heads.BackboneConfig(name_or_path=str(DEMO / "base"), dtype="float32")
    model, tokenizer = heads.load_backbone(config), heads.load_tokenizer(config)

    def run(prompt: str, max_new_tokens: int, **more: Any) -> list[int]:
        inputs = tokenizer(prompt, return_tensors="pt")
        asked = {"max_new_tokens": max_new_tokens, "do_sample": False, "tokenizer": tokenizer}
        output = model.generate(**inputs, **asked, **more)
        return output[0, inputs["input_ids"].shape[1] :].tolist()

    run.tokenizer = tokenizer
    return run


def test_a_whole_answer_is_plain_greedy_text_in_fewer_passes(server, plain):
    after = len(server.text())
    wanted = plain(PROMPT, 48)
    assert server.complete(prompt=PROMPT, max_tokens=48) == (plain.tokenizer.decode(wanted), "length", 48)
    tokens, passes = server.counted(after)
    assert tokens == 48
    assert passes < 0.7 * tokens


def test_a_streamed_answer_is_the_same_token_by_token(server, plain):
    wanted, pieces = plain(PROMPT, 48), DecodeStream([], skip_special_tokens=True)
    expected = [pieces.step(plain.tokenizer._tokenizer, token) for token in wanted]
    *chunks, last = server.stream("completions", prompt=PROMPT, max_tokens=48)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [piece for piece in expected if piece is not None]
    assert (last["choices"][0]["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 48)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_is_plain_greedy_text_after_its_template(server, plain, streamed):
    messages = [{"role": "user", "content": "import re"}]
    prompt = plain.tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    wanted = plain.tokenizer.decode(plain(prompt, 24))
    if streamed:
        deltas = [
            chunk["choices"][0]["delta"]
            for chunk in server.stream("chat/completions", messages=messages, max_tokens=24)
        ]
        assert "".join(delta.get("content") or "" for delta in deltas) == wanted
        return
    with server.open("chat/completions", messages=messages, max_tokens=24) as response:
        assert json.load(response)["choices"][0]["message"]["content"] == wanted


def test_a_stop_string_ends_the_answer(server, plain):
    wanted = plain(PROMPT, 48, stop_strings=["module"])
    assert len(wanted) < 48, "the demo writes that word"
    expected = (plain.tokenizer.decode(wanted), "stop", len(wanted))
    assert server.complete(prompt=PROMPT, max_tokens=48, stop=["module"]) == expected


def test_a_penalty_is_obeyed(server, plain):
    wanted = plain(PROMPT, 32, repetition_penalty=1.2)
    assert server.complete(prompt=PROMPT, max_tokens=32, frequency_penalty=0.2)[0] == plain.tokenizer.decode(wanted)


def test_what_heads_cannot_do_is_a_bad_request_and_the_server_lives_on(server, plain):
    asked = {"prompt": PROMPT, "max_tokens": 8, "generation_config": json.dumps({"num_beams": 3})}
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.complete(**asked)
    assert caught.value.code == 400
    assert json.load(caught.value)["detail"].startswith("num_beams=3 was given; multi-token decoding keeps one")
    (chunk,) = server.stream("completions", **asked)
    assert "num_beams=3 was given" in chunk["error"]
    assert server.complete(prompt=PROMPT, max_tokens=8)[0] == plain.tokenizer.decode(plain(PROMPT, 8))


def test_a_client_that_leaves_frees_the_server(server, plain):
    after = len(server.text())
    response = server.open("completions", prompt=PROMPT, max_tokens=1900, stream=True)
    assert response.readline().startswith(b"data: ")
    response.close()
    began = time.monotonic()
    assert server.complete(prompt=PROMPT, max_tokens=8)[0] == plain.tokenizer.decode(plain(PROMPT, 8))
    assert server.counted(after) == (8, pytest.approx(5, abs=4)), "the answer before was not written to its end"
    assert time.monotonic() - began < SECONDS / 2


def test_ten_clients_at_once_get_each_their_text(server, plain):
    prompts = [f"def f{i}(a, b" for i in range(10)]
    with ThreadPoolExecutor(10) as clients:
        found = list(clients.map(lambda prompt: server.complete(prompt=prompt, max_tokens=24)[0], prompts))
    assert found == [plain.tokenizer.decode(plain(prompt, 24)) for prompt in prompts]


def test_the_process_served_all_this_with_heads(server):
    counts = [(int(tokens), int(passes)) for tokens, passes in COUNTED.findall(server.text())]
    assert len(counts) >= 10
    assert sum(passes for _, passes in counts) < 0.8 * sum(tokens for tokens, _ in counts)
    assert torch.get_num_threads() == 1
