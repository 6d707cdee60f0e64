"""The generation tests of transformers, decoded by Headway: trees or a draft model in place of assisted decoding.

    HEADWAY_TRANSFORMERS=../transformers python -m benchmarks.outside.transformers_tests [--models llama gemma3]

The files are those of a checkout of github.com/huggingface/transformers at the version that is installed (its folders
tests, src and utils); the tests need the package `parameterized`. Neither is a part of this project. Each of some 150
architectures builds a tiny random model and compares greedy text with and without a drafter, processors and scores
included. This module is the pytest plugin too: it replaces `generate` where an `assistant_model` was given.

The tests' requests are changed in two ways: masks are all ones, and token types, attentions, hidden states and the
cache are not requested, since decoding refuses these. The tests skip models with a recurrent state (`_is_stateful`),
which transformers' assisted decoding refuses; here that mark is removed from their classes, so that they run too.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from transformers import GenerationMixin, PreTrainedModel

import heads

FILES, METHOD = "HEADWAY_TRANSFORMERS", "HEADWAY_METHOD"
METHODS = ("draft", "medusa", "grounded", "gru", "eagle", "dynamo")
ROOT = Path(__file__).resolve().parent.parent.parent
LEFT_OUT = ("output_hidden_states", "output_attentions", "cache_implementation", "token_type_ids")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", default=os.environ.get(FILES), help=f"the checkout; by default ${FILES}")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--models", nargs="+", default=[], help="folders of tests/models; by default all")
    options = parser.parse_args()
    if not options.files or not Path(options.files, "tests/generation/test_utils.py").is_file():
        sys.exit(
            f"{options.files!r} holds no tests/generation/test_utils.py; set {FILES} or --files to a checkout of "
            f"huggingface/transformers at the version that is installed."
        )
    if importlib.util.find_spec("parameterized") is None:
        sys.exit("The tests of transformers need the package parameterized: pip install parameterized.")
    print("| decoded by | passed | refused in a sentence | failed | skipped by the tests |\n|---|---|---|---|---|")
    unequal, ran, unread = [], 0, set()
    for method in options.methods:
        found = outcomes(run(Path(options.files).resolve(), method, options.models))
        count = Counter(kind for kind, _, _ in found)
        print(f"|{method}|{count['passed']}|{count['refused']}|{count['failed']}|{count['skipped']}|", flush=True)
        ran += len(found) - count["skipped"] - count["unread"]
        unread |= {test.rpartition(".")[2] for kind, test, _ in found if kind == "unread"}
        unequal += [(method, *rest) for kind, *rest in found if kind in ("failed", "refused")]
    names = ", ".join(sorted(unread)) or "none"
    print(f"{ran} tests ran; {len(unread)} files of tests could not be imported here: {names}")
    for method, test, said in unequal:
        print(f"- {method}, {test}: {said}")
    if not ran:
        sys.exit(
            "No test ran: the checkout does not fit the installed transformers, or packages of its tests are missing."
        )


def run(files: Path, method: str, models: list[str]) -> ElementTree.Element:
    """The report of one run of pytest over the tests, in JUnit's form."""
    folders = [f"tests/models/{model}" for model in models] or ["tests/models"]
    asked = ["--noconftest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-q"]
    asked += ["--continue-on-collection-errors", "-k", "assisted_decoding_matches"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        path = os.pathsep.join([str(ROOT), str(files), str(files / "utils"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-m", "pytest", "-p", __spec__.name, *asked, f"--junitxml={report}", *folders],
            cwd=files,
            env={**os.environ, "PYTHONPATH": path, METHOD: method, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        return ElementTree.parse(report).getroot()


def outcomes(report: ElementTree.Element) -> list[tuple[str, str, str]]:
    """For each test how it ended, its name and its message; a ValueError counts as refused: so decoding refuses.

    A file that could not be imported, for a package that is not installed, holds no test: it is "unread".

    >>> case = '<testcase classname="x.LlamaTest" name="test_0"><failure message="ValueError: No."/></testcase>'
    >>> outcomes(ElementTree.fromstring(f"<testsuite>{case}</testsuite>"))
    [('refused', 'LlamaTest.test_0', 'ValueError: No.')]
    """
    found = []
    for case in report.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"
        ending = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        said = "" if ending is None else ending.get("message", "").split("\n")[0]
        if ending is None:
            kind = "passed"
        elif ending.tag == "skipped":
            kind = "skipped"
        elif said == "collection failure":
            kind = "unread"
        else:
            kind = "refused" if said.startswith("ValueError: ") else "failed"
        found.append((kind, name, said))
    return found


# --- the plugin ------------------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Decode with Headway wherever a test gives an assistant model."""
    torch.set_num_threads(1)
    plain = GenerationMixin.generate

    def generate(model: Any, *args: Any, assistant_model: Any = None, **asked: Any) -> Any:
        asked.pop("token_type_ids", None)
        if asked.get("cache_implementation") == "dynamic_full":  # made for assisted decoding alone
            asked.pop("cache_implementation")
        if assistant_model is None:
            return plain(model, *args, **asked)
        asked = {name: value for name, value in asked.items() if name not in LEFT_OUT}
        return plain(model, *args, custom_generate=decoding_for(model, assistant_model), **asked)

    GenerationMixin.generate = generate  # type: ignore[method-assign]


def decoding_for(model: Any, assistant: Any) -> Any:
    """The draft model of the test, or random heads in its place."""
    method = os.environ[METHOD]
    if method == "draft":
        return heads.DraftModelDecoding(assistant, k=2)
    return heads.TreeDecoding(heads.create(method, model, num_heads=3))


def pytest_collection_modifyitems() -> None:
    """Give the tests masks of ones, and drop their checks of outputs that are not requested."""
    mixin: Any = importlib.import_module("tests.generation.test_utils").GenerationTesterMixin
    prepare = mixin.prepare_config_and_inputs_for_generate

    def prepare_unmasked(self: Any, *args: Any, **asked: Any) -> Any:
        config, inputs = prepare(self, *args, **asked)
        if "attention_mask" in inputs:
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        return config, inputs

    mixin.prepare_config_and_inputs_for_generate = prepare_unmasked
    take_mark(PreTrainedModel)
    mixin._check_generate_outputs = lambda *_, **__: None


def take_mark(model_class: Any) -> None:
    """Remove `_is_stateful`, which tests and assisted decoding read, from a class and its subclasses."""
    if vars(model_class).get("_is_stateful"):
        model_class._is_stateful = False
    for below in model_class.__subclasses__():
        take_mark(below)


if __name__ == "__main__":
    main()
