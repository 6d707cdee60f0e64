"""`python -m train regenerate-data --server` with vLLM's own API server must write the same bytes as without a server.

First greedy texts in float32 are compared, then a sampled run that is killed and resumed with one that is not. The demo
backbone does not end an answer within some dozens of tokens, so conversations are left to the tests.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.outside.environment import Environment
from benchmarks.shared import ROOT

BASE, NAME, PORT, LONGEST = ROOT / "checkpoints/demo/base", "demo-base", 8127, 1024
MODULES = (
    "argparse",
    "ast",
    "calendar",
    "csv",
    "difflib",
    "heapq",
    "json",
    "pdb",
    "shlex",
    "textwrap",
    "typing",
    "zipfile",
)
STARTS = 900.0  # seconds; half a minute where nothing else runs


def check_regenerated(engine: Environment, place: Path) -> str:
    """Compare the runs; returns a sentence on what was compared.

    Raises:
        ValueError: vLLM did not start, or wrote other bytes than this process.
    """
    write_data(place)
    with api_server(engine, place) as url:
        texts, own = run(place, url), run(place)
        if texts != own:
            raise ValueError("regenerate-data wrote other lines by vLLM than by itself; both are greedy in float32.")
        whole = run(place, url, "--temperature", "0.8", name="whole")
        kept = kill(place, url)
        resumed = run(place, url, "--temperature", "0.8", name="killed")
        if resumed != whole:
            raise ValueError(f"A sampled run that was killed after {kept} lines resumed to other bytes.")
    return (
        f"regenerate-data --server wrote the bytes that this process writes alone: {len(texts.splitlines())} texts, "
        f"greedy. Sampled, a run that was killed after {kept} of {len(whole.splitlines())} lines resumed to the bytes "
        f"of one that was not."
    )


def write_data(place: Path) -> None:
    texts = [inspect.getsource(__import__(name))[:2500] for name in MODULES] * 4
    lines = [json.dumps({"text": text}) for text in texts]
    (place / "text.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def api_server(engine: Environment, place: Path, *more: str) -> Iterator[str]:
    """vLLM with the demo backbone and further options; its URL once it answers."""
    module = ["-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE), "--served-model-name", NAME]
    options = ["--dtype", "float32", "--max-model-len", str(LONGEST), "--enforce-eager", "--port", str(PORT)]
    with (place / "server.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(engine.interpreter), *module, *options, *more],
            stdout=log,
            stderr=log,
            env=engine.all_variables() | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parent)},
        )
        try:
            wait_for(f"http://127.0.0.1:{PORT}/v1/models", process, place / "server.log")
            yield f"http://127.0.0.1:{PORT}/v1"
        finally:
            process.terminate()
            process.wait(60)


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() < begun + STARTS:
        with contextlib.suppress(URLError, OSError), urlopen(address, timeout=5):
            return
        time.sleep(1)
    raise ValueError(f"vLLM's server did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")


def command(place: Path, url: str | None, *more: str, name: str) -> list[str]:
    data = ["--data.train", json.dumps([{"path": str(place / "text.jsonl")}]), "--data.eval", "[]"]
    data += ["--data.heldout_list", "null", "--backbone.dtype", "float32"]
    asked = ["--prompt-tokens", "48", "--max-new-tokens", "32", "--out", str(place / f"{name}.out.jsonl")]
    served = [] if url is None else ["--server", url, "--model", NAME, "--concurrency", "8"]
    config = ["--config", str(ROOT / "configs/demo/grounded_soft.yaml")]
    temperature = more or ("--temperature", "0")
    return [sys.executable, "-m", "train", "regenerate-data", *config, *data, *asked, *served, *temperature]


def run(place: Path, url: str | None = None, *more: str, name: str | None = None) -> bytes:
    name = name or ("own" if url is None else "served")
    done = subprocess.run(command(place, url, *more, name=name), capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise ValueError(f"regenerate-data failed on {name}:\n{done.stderr[-2000:]}")
    return (place / f"{name}.out.jsonl").read_bytes()


def kill(place: Path, url: str) -> int:
    """Start the sampled run and kill it once it has written something; returns the number of lines that it wrote."""
    out = place / "killed.out.jsonl"
    process = subprocess.Popen(
        command(place, url, "--temperature", "0.8", name="killed"), stderr=subprocess.DEVNULL, cwd=ROOT
    )
    while process.poll() is None and not (out.is_file() and out.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(out.read_bytes().splitlines())
