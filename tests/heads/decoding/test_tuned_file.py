"""tree.json: read back as it was written, used only where it was made for, and refused in a sentence when malformed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from throwaway_families import make_heads
from tiny import random_tokens, tiny_model

import heads
from heads.backbone.compiling import graph
from heads.backbone.compiling.compiled_backbone import CompiledBackbone
from heads.backbone.model import Backbone
from heads.decoding.proposers.prompt_lookup import DEFAULT_LOOKUP
from heads.decoding.tuned_file import TunedTree, read_tree_file
from heads.interface.token_heads import TokenHeads
from heads.products.packed import pack_weights

HERE = {"device_type": "cpu", "dtype": "float64"}
PATHS = ((0,), (0, 0), (1,))


@pytest.fixture
def saved(tmp_path: Path) -> TokenHeads:
    """Heads that were saved to and loaded from a folder."""
    model = tiny_model("llama")
    heads.save(make_heads("medusa", Backbone(model), num_heads=2), tmp_path)
    return heads.load(tmp_path, model)


@pytest.fixture
def tree_file(tmp_path: Path) -> Path:
    return tmp_path / "tree.json"


@pytest.fixture
def fitted(saved: TokenHeads, tree_file: Path) -> Callable[..., TokenHeads]:
    """Loads the saved heads anew, with a tree.json of these fields beside them."""

    def load(**fields: Any) -> TokenHeads:
        given: dict[str, Any] = {"kind": "static", "paths": PATHS, "measured_on": HERE, **fields}
        tree_file.write_text(TunedTree(**given).as_json(), encoding="utf-8")
        return heads.load(tree_file.parent, saved.backbone)

    return load


@pytest.mark.parametrize(
    "tuned",
    [
        TunedTree(kind="static", paths=PATHS, lookup=10, prediction={"tokens_per_pass": 2.0}, measured_on=HERE),
        TunedTree(kind="dynamic", paths=PATHS, dynamic=heads.DynamicTree(nodes=9, depth=2, width=2)),
        TunedTree(kind="plain", heads_sha256="abc"),
        TunedTree(kind="plain", compile=True),
        TunedTree(kind="plain", packed=True),
        TunedTree(
            kind="plain",
            measured_on={"batch": 16},
            other_batches=(TunedTree(kind="static", paths=PATHS, measured_on={**HERE, "batch": 4}),),
        ),
    ],
    ids=["static", "dynamic", "plain", "compiled", "packed", "two batch sizes"],
)
def test_what_is_written_reads_back(tuned, tmp_path):
    (tmp_path / "tree.json").write_text(tuned.as_json(), encoding="utf-8")
    assert read_tree_file(tmp_path / "tree.json") == tuned


def test_a_static_file_is_a_file_of_paths_too(tmp_path):
    (tmp_path / "tree.json").write_text(TunedTree(kind="static", paths=PATHS).as_json(), encoding="utf-8")
    assert json.loads((tmp_path / "tree.json").read_text())["paths"] == [[0], [0, 0], [1]]


def test_it_is_used_where_nothing_else_is_asked_for(saved, fitted):
    token_heads = fitted(heads_sha256=saved.checksum, lookup=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoding = heads.TreeDecoding(token_heads)
    assert (decoding.tree.paths[1:], decoding.lookup) == (PATHS, 3)
    assert heads.TreeDecoding(token_heads, lookup=0).lookup == 0
    other = heads.TreeDecoding(token_heads, [[1]])
    assert (other.tree.paths[1:], other.lookup) == (((1,),), DEFAULT_LOOKUP)


def is_compiled(decoding: heads.TreeDecoding) -> bool:
    return isinstance(decoding.backbone, CompiledBackbone) and decoding.drafting is not None


def test_passes_are_compiled_where_that_was_faster_unless_something_else_is_asked_for(fitted, monkeypatch):
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: True)
    token_heads = fitted(compile=True)
    assert is_compiled(heads.TreeDecoding(token_heads))
    assert is_compiled(heads.TreeDecoding(token_heads, token_heads.tuned_tree.path))
    assert not is_compiled(heads.TreeDecoding(token_heads, compile=False))
    assert not is_compiled(heads.TreeDecoding(token_heads, 3)), "another tree was asked for"
    token_heads = fitted(compile=False)
    assert not is_compiled(heads.TreeDecoding(token_heads))
    assert is_compiled(heads.TreeDecoding(token_heads, compile=True))


def test_where_nothing_compiles_a_warning_says_so(fitted, monkeypatch):
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: False)
    token_heads = fitted(compile=True)
    with pytest.warns(UserWarning, match=r"tree.json asks for compiled passes, but torch.compile found no C\+\+ comp"):
        decoding = heads.TreeDecoding(token_heads)
    assert not is_compiled(decoding)


@pytest.mark.parametrize("as_given", [str, Path])
def test_one_that_is_given_by_name_keeps_its_lookup(saved, fitted, as_given):
    token_heads = fitted(heads_sha256=saved.checksum, lookup=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoding = heads.TreeDecoding(token_heads, as_given(token_heads.tuned_tree.path))
        assert heads.TreeDecoding(token_heads, as_given(token_heads.tuned_tree.path), lookup=7).lookup == 7
    assert (decoding.tree.paths[1:], decoding.lookup) == (PATHS, 3)


def test_a_file_of_paths_alone_keeps_the_default_lookup_and_is_not_checked(saved, tmp_path):
    heads.Tree(PATHS).save(tmp_path / "paths.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoding = heads.TreeDecoding(saved, tmp_path / "paths.json")
    assert (decoding.tree.paths[1:], decoding.lookup) == (PATHS, DEFAULT_LOOKUP)
    assert heads.TreeDecoding(saved, tmp_path / "paths.json", lookup=0).lookup == 0


def test_a_dynamic_one_is_used_with_its_budget(fitted):
    wanted = heads.DynamicTree(nodes=9, depth=2, width=2)
    token_heads = fitted(kind="dynamic", dynamic=wanted)
    assert heads.TreeDecoding(token_heads).tree == wanted


def test_a_rule_that_draws_takes_the_static_tree_of_a_dynamic_file(fitted):
    dynamic = heads.DynamicTree(nodes=9, depth=2, width=2)
    token_heads = fitted(kind="dynamic", dynamic=dynamic, lookup=3)
    decoding = heads.TreeDecoding(token_heads, rule="rejection")
    assert (decoding.tree.paths[1:], decoding.lookup) == (PATHS, 3)
    token_heads = fitted(kind="dynamic", dynamic=dynamic, paths=(), lookup=3)
    default, sampling = heads.TreeDecoding(make_heads("medusa", token_heads.backbone, num_heads=2)), "rejection"
    assert heads.TreeDecoding(token_heads, rule=sampling).tree.paths == default.tree.paths
    assert heads.TreeDecoding(token_heads).tree == dynamic, "other rules use it"
    for asked in (dynamic, token_heads.tuned_tree.path):
        with pytest.raises(ValueError, match="rule='rejection' was given with a dynamic tree"):
            heads.TreeDecoding(token_heads, asked, rule=sampling)


def test_a_plain_one_decodes_plainly(fitted, monkeypatch):
    token_heads = fitted(kind="plain", paths=())
    monkeypatch.setattr(token_heads, "step", lambda *_: pytest.fail("the heads were asked"))
    prompt, model = random_tokens(1, 5), token_heads.backbone.model
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours = model.generate(
        prompt, custom_generate=heads.TreeDecoding(token_heads), return_dict_in_generate=True, **options
    )
    assert torch.equal(ours.sequences, model.generate(prompt, **options))
    assert ours.stats.tokens_per_pass == 1


FOR_SOMETHING_ELSE = pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"measured_on": {**HERE, "device_type": "cuda"}}, "device_type 'cuda' and this is 'cpu'"),
        ({"measured_on": {**HERE, "dtype": "bfloat16"}}, "dtype 'bfloat16' and this is 'float64'"),
        ({"heads_sha256": "of others"}, "other weights of the heads"),
    ],
    ids=["device", "dtype", "weights"],
)


@FOR_SOMETHING_ELSE
def test_one_that_was_made_for_something_else_is_not_used_and_one_warning_says_so(fitted, fields, said):
    token_heads = fitted(**fields)
    with pytest.warns(UserWarning, match="is not used") as caught:
        decoding = heads.TreeDecoding(token_heads)
    assert len(caught) == 1
    assert said in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points to the caller"
    assert decoding.tree.paths[1:] != PATHS
    assert decoding.lookup == DEFAULT_LOOKUP


@FOR_SOMETHING_ELSE
def test_one_that_was_made_for_something_else_is_used_where_it_is_given_and_one_warning_says_so(fitted, fields, said):
    token_heads = fitted(lookup=3, **fields)
    with pytest.warns(UserWarning, match="is used since it was asked for, but") as caught:
        decoding = heads.TreeDecoding(token_heads, token_heads.tuned_tree.path)
    assert len(caught) == 1
    assert said in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points to the caller"
    assert (decoding.tree.paths[1:], decoding.lookup) == (PATHS, 3)


def drafts_of(decoding: heads.TreeDecoding, rows: int) -> Any:
    """The tree that a call with so many rows decodes with, by what its text says; plain text is compared."""
    settings = decoding.settings.at(rows)
    return settings.tree.paths[1:], settings.lookup


AT_ONE = {**HERE, "batch": 1}
AT_FOUR = TunedTree(kind="static", paths=((0,),), lookup=0, measured_on={**HERE, "batch": 4})
ONE_AND_FOUR = {"measured_on": AT_ONE, "lookup": 3, "other_batches": (AT_FOUR,)}


def test_each_batch_size_has_its_own_tree_and_others_have_the_default(fitted):
    token_heads = fitted(**ONE_AND_FOUR)
    decoding = heads.TreeDecoding(token_heads)
    default = heads.TreeDecoding(make_heads("medusa", token_heads.backbone, num_heads=2))
    assert drafts_of(decoding, 1) == (PATHS, 3)
    assert drafts_of(decoding, 4) == (((0,),), 0)
    shared = default.settings.at(2).tree
    assert drafts_of(decoding, 2) == drafts_of(default, 2) == (shared.paths[1:], DEFAULT_LOOKUP)
    assert shared.num_nodes == 4, "two rows share the 8 nodes of one"
    assert (decoding.tree.paths[1:], decoding.lookup) == (PATHS, 3), "of one row"
    assert drafts_of(heads.TreeDecoding(token_heads, lookup=7), 4) == (((0,),), 7)
    assert drafts_of(heads.TreeDecoding(token_heads, [[1]]), 4) == (((1,),), DEFAULT_LOOKUP)


def test_a_batch_decodes_with_its_own_tree_and_the_text_is_plain(fitted):
    """The heads draft for one row and for four, and never where the size's tree is the root alone."""
    token_heads = fitted(
        **{**ONE_AND_FOUR, "other_batches": (TunedTree(kind="plain", measured_on={**HERE, "batch": 4}),)}
    )
    model, decoding = token_heads.backbone.model, heads.TreeDecoding(token_heads)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    accepted = {}
    for rows in (1, 4):
        prompt = random_tokens(rows, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = model.generate(prompt, custom_generate=decoding, return_dict_in_generate=True, **options)
        assert torch.equal(ours.sequences, model.generate(prompt, **options))
        accepted[rows] = len(ours.stats.accepted_per_depth)
    assert accepted == {1: 12, 4: 0}, "the chain of three may grow fourfold; four rows draft nothing"


def test_a_batch_size_that_was_not_measured_is_said_once(fitted):
    token_heads = fitted(**ONE_AND_FOUR)
    model, decoding = token_heads.backbone.model, heads.TreeDecoding(token_heads)
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.generate(random_tokens(2, 5), custom_generate=decoding, **options)
    (said,) = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    assert "at batch size 1, 4, and this is a batch of 2: the default tree is used" in said


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_weights_in_another_form_than_was_measured_are_said_once(saved, tree_file, packed, recorded):
    model = tiny_model("llama").float()
    measured_on = {**HERE, "dtype": "float32"}
    written = TunedTree(kind="static", paths=PATHS, packed=recorded, measured_on=measured_on).as_dict()
    if not recorded:
        del written["packed"]  # as in files of before
    tree_file.write_text(json.dumps(written), encoding="utf-8")
    if packed:
        pack_weights(model)
    decoding = heads.TreeDecoding(heads.load(tree_file.parent, model))
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.generate(random_tokens(1, 5), custom_generate=decoding, **options)
    said = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    wrong = {(True, False): "on packed weights, and the backbone's are plain here", (False, True): "on plain weights"}
    assert [wrong[recorded, packed] in one for one in said] == [True] * (recorded != packed)
    assert decoding.settings.at(1).tree.paths[1:] == PATHS


@pytest.mark.parametrize(
    ("packed", "compile", "said"),
    [
        (False, None, []),
        (True, None, ["use plain weights: packing them has no effect"]),
        (True, False, ["was measured on plain weights, and the backbone's are packed"]),
    ],
)
def test_packed_weights_that_compiled_passes_do_not_use_are_said_once(
    saved, tree_file, monkeypatch, packed, compile, said
):
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: True)
    model = tiny_model("llama").float()
    tuned = TunedTree(kind="static", paths=PATHS, compile=True, measured_on={**HERE, "dtype": "float32"})
    tree_file.write_text(tuned.as_json(), encoding="utf-8")
    if packed:
        pack_weights(model)
    decoding = heads.TreeDecoding(heads.load(tree_file.parent, model), compile=compile)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            decoding.settings.of_call(1)
    assert len(caught) == len(said)
    assert all(words in str(one.message) for words, one in zip(said, caught, strict=True))


def test_a_file_that_is_given_by_name_lends_its_nearest_size(fitted):
    path = fitted(**ONE_AND_FOUR).tuned_tree.path
    decoding = heads.TreeDecoding(fitted(**ONE_AND_FOUR), path)
    assert [drafts_of(decoding, rows)[1] for rows in (1, 2, 3, 4, 64)] == [3, 3, 0, 0, 0]
    with pytest.warns(UserWarning, match="what it says about 4 is used"):
        decoding.settings.of_call(64)


def test_passes_are_compiled_for_the_batch_sizes_where_that_was_faster(fitted, monkeypatch):
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: True)
    decoding = heads.TreeDecoding(fitted(**{**ONE_AND_FOUR, "compile": True}))
    assert [decoding.settings.at(rows).compile for rows in (1, 2, 4)] == [True, False, False]
    assert is_compiled(decoding)


def test_copies_in_another_dtype_keep_it(fitted):
    token_heads = fitted()
    copy = token_heads.in_dtype(torch.float32)
    assert copy is not token_heads
    assert (copy.tuned_tree, copy.checksum) == (token_heads.tuned_tree, token_heads.checksum)


def test_new_heads_have_none():
    assert make_heads("medusa", Backbone(tiny_model("llama"))).tuned_tree is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"kind": "other"}, "kind='other' was given; allowed are 'static', 'dynamic' and 'plain'"),
        ({"kind": "static"}, "paths"),
        ({"kind": "dynamic", "paths": [[0]]}, "dynamic"),
        ({"kind": "dynamic", "paths": [[0]], "dynamic": {"nodes": 1}}, r"nodes=1\) was given"),
        ({"kind": "dynamic", "paths": [[0]], "dynamic": {"leaves": 1}}, "leaves"),
        *(
            (
                {"kind": "dynamic", "paths": [[0]], "dynamic": {name: value}},
                rf"{name}={value!r}\) was given; .* integers",
            )
            for name in ("nodes", "depth", "width")
            for value in ("9", 4.5, True)
        ),
        ({"kind": "plain", "lookup": 900}, "lookup=900 was given"),
        *(
            ({"kind": "plain", "lookup": value}, f"lookup={value!r} was given; .* integers")
            for value in ("10", 4.5, True)
        ),
        ({"kind": "plain", "heads_sha256": 5}, "heads_sha256=5 was given; allowed are texts, or null"),
        ({"kind": "plain", "compile": 1}, "compile=1 was given; allowed are true and false"),
        ({"kind": "plain", "packed": "yes"}, "packed='yes' was given; allowed are true and false"),
        ({"kind": "plain", "measured_on": 3}, "measured_on=3 was given; allowed are mappings"),
        ({"kind": "plain", "measured_on": {"batch": 0}}, "measured_on.batch=0 was given; allowed are integers of at"),
        ({"kind": "plain", "other_batches": [{"kind": "plain"}]}, "each stands there once"),
        (
            {
                "kind": "plain",
                "measured_on": {"batch": 4},
                "other_batches": [{"kind": "plain", "measured_on": AT_ONE}] * 2,
            },
            "the batch sizes .1, 1. beside 4; each stands there once",
        ),
        ({"kind": "plain", "lookpu": 3}, "'lookpu' is no field of tree.json; .* Did you mean 'lookup'"),
    ],
    ids=str,
)
def test_a_malformed_one_is_refused_in_a_sentence(saved, tree_file, content, said):
    tree_file.write_text(json.dumps(content), encoding="utf-8")
    token_heads = heads.load(tree_file.parent, saved.backbone)
    with pytest.raises(ValueError, match=said) as caught:
        heads.TreeDecoding(token_heads)
    assert str(tree_file) in str(caught.value)
    assert heads.TreeDecoding(token_heads, 4).tree.num_nodes == 4, "an explicit tree does not read it"


def test_a_folder_given_as_a_tree_is_refused_in_a_sentence(saved, tmp_path):
    with pytest.raises(ValueError, match=r"The tree file .* cannot be read .*; give a JSON file of paths"):
        heads.TreeDecoding(saved, tmp_path)


@pytest.mark.parametrize("lookup", [4.5, True, "10"])
def test_a_lookup_that_is_no_integer_is_refused(saved, lookup):
    with pytest.raises(ValueError, match=f"lookup={lookup!r} was given; allowed are integers"):
        heads.TreeDecoding(saved, lookup=lookup)
