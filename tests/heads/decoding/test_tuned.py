"""tree.json: read back as it was written, used only where it was made for, and refused in a sentence when malformed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from throwaway_families import make_heads
from tiny import random_tokens, tiny_model

import heads
from heads.backbone import Backbone
from heads.decoding.lookup import DEFAULT_LOOKUP
from heads.decoding.tuned import TunedTree, read_tree_file
from heads.interface import TokenHeads

HERE = {"device_type": "cpu", "dtype": "float64"}
PATHS = ((0,), (0, 0), (1,))


@pytest.fixture
def saved(tmp_path: Path) -> TokenHeads:
    """Heads that were saved to and loaded from a folder."""
    model = tiny_model("llama")
    heads.save(make_heads("medusa", Backbone(model), num_heads=2), tmp_path)
    return heads.load(tmp_path, model)


def write(token_heads: TokenHeads, **fields: Any) -> None:
    assert token_heads.tuned_tree is not None
    given: dict[str, Any] = {"kind": "static", "paths": PATHS, "measured_on": HERE, **fields}
    token_heads.tuned_tree.write_text(TunedTree(**given).as_json(), encoding="utf-8")


@pytest.mark.parametrize(
    "tuned",
    [
        TunedTree(kind="static", paths=PATHS, lookup=10, prediction={"tokens_per_pass": 2.0}, measured_on=HERE),
        TunedTree(kind="dynamic", paths=PATHS, dynamic=heads.DynamicTree(nodes=9, depth=2, width=2)),
        TunedTree(kind="plain", heads_sha256="abc"),
    ],
    ids=lambda tuned: tuned.kind,
)
def test_what_is_written_reads_back(tuned, tmp_path):
    (tmp_path / "tree.json").write_text(tuned.as_json(), encoding="utf-8")
    assert read_tree_file(tmp_path / "tree.json") == tuned


def test_a_static_file_is_a_file_of_paths_too(tmp_path):
    (tmp_path / "tree.json").write_text(TunedTree(kind="static", paths=PATHS).as_json(), encoding="utf-8")
    assert json.loads((tmp_path / "tree.json").read_text())["paths"] == [[0], [0, 0], [1]]


def test_it_is_used_where_nothing_else_is_asked_for(saved):
    write(saved, heads_sha256=saved.checksum, lookup=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoding = heads.TreeDecoding(saved)
    assert (decoding.tree.paths[1:], decoding.lookup) == (PATHS, 3)
    assert heads.TreeDecoding(saved, lookup=0).lookup == 0
    other = heads.TreeDecoding(saved, [[1]])
    assert (other.tree.paths[1:], other.lookup) == (((1,),), DEFAULT_LOOKUP)


def test_a_dynamic_one_is_used_with_its_budget(saved):
    wanted = heads.DynamicTree(nodes=9, depth=2, width=2)
    write(saved, kind="dynamic", dynamic=wanted)
    assert heads.TreeDecoding(saved).tree == wanted


def test_a_plain_one_decodes_plainly(saved, monkeypatch):
    write(saved, kind="plain", paths=())
    monkeypatch.setattr(saved, "step", lambda *_: pytest.fail("the heads were asked"))
    prompt, model = random_tokens(1, 5), saved.backbone.model
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours = model.generate(prompt, custom_generate=heads.TreeDecoding(saved), return_dict_in_generate=True, **options)
    assert torch.equal(ours.sequences, model.generate(prompt, **options))
    assert ours.stats.tokens_per_pass == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"measured_on": {**HERE, "device_type": "cuda"}}, "device_type 'cuda' and this is 'cpu'"),
        ({"measured_on": {**HERE, "dtype": "bfloat16"}}, "dtype 'bfloat16' and this is 'float64'"),
        ({"heads_sha256": "of others"}, "other weights of the heads"),
    ],
    ids=["device", "dtype", "weights"],
)
def test_one_that_was_made_for_something_else_is_not_used_and_one_warning_says_so(saved, fields, said):
    write(saved, **fields)
    with pytest.warns(UserWarning, match="is not used") as caught:
        decoding = heads.TreeDecoding(saved)
    assert len(caught) == 1
    assert said in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points to the caller"
    assert decoding.tree.paths[1:] != PATHS
    assert decoding.lookup == DEFAULT_LOOKUP


def test_copies_in_another_dtype_keep_it(saved):
    write(saved)
    copy = saved.in_dtype(torch.float32)
    assert copy is not saved
    assert (copy.tuned_tree, copy.checksum) == (saved.tuned_tree, saved.checksum)


def test_new_heads_have_none():
    assert make_heads("medusa", Backbone(tiny_model("llama"))).tuned_tree is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kind": "other"}, "kind is 'other', allowed are static, dynamic, plain"),
        ({"kind": "static"}, "paths"),
        ({"kind": "dynamic", "paths": [[0]]}, "dynamic"),
        ({"kind": "dynamic", "paths": [[0]], "dynamic": {"nodes": 1}}, r"nodes=1\) was given"),
        ({"kind": "dynamic", "paths": [[0]], "dynamic": {"leaves": 1}}, "leaves"),
        ({"kind": "dynamic", "paths": [[0]], "dynamic": {"nodes": "9"}}, "not supported"),
        ({"kind": "plain", "lookup": 900}, "lookup=900 was given"),
        ({"kind": "plain", "lookup": "10"}, "integer"),
        ({"kind": "plain", "measured_on": 3}, "must be objects"),
    ],
    ids=str,
)
def test_a_malformed_one_is_refused_in_a_sentence(saved, content, said):
    saved.tuned_tree.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=said) as caught:
        heads.TreeDecoding(saved)
    assert str(saved.tuned_tree) in str(caught.value)
    assert heads.TreeDecoding(saved, 4).tree.num_nodes == 4, "an explicit tree does not read it"
