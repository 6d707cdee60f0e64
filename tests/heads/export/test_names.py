"""Tables of names: both directions, and no tensor without a place."""

import pytest
import torch

from heads.export.names import Names

NAMES = Names({"bodies.{k}.{l}.weight": "head.{k}.{l}.w", "out.{k}": "{k}.2.weight"}, not_read=("embed.{k}",))


def test_names_go_there_and_back():
    ours = {"bodies.10.0.weight": torch.ones(1), "out.3": torch.zeros(2)}
    theirs = NAMES.to_foreign(ours, "f")
    assert list(theirs) == ["head.10.0.w", "3.2.weight"]
    back = NAMES.to_native({**theirs, "embed.0": torch.ones(9)}, "a folder")
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.items())
    assert len(back) == len(ours)


def test_a_repeated_word_is_the_same_number():
    twice = Names({"a.{k}": "b.{k}.c.{k}"})
    assert twice.native("b.1.c.1") == "a.1"
    assert twice.native("b.1.c.2") is None


def test_a_tensor_without_a_place_is_an_error_with_its_name():
    with pytest.raises(ValueError, match=r"No place in the format f for other\.0"):
        NAMES.to_foreign({"other.0": torch.ones(1)}, "f")
    with pytest.raises(ValueError, match=r"read from there for head\.0\.1\.bias"):
        NAMES.to_native({"head.0.1.bias": torch.ones(1)}, "there")
    both = Names({"a.{k}": "b.{k}"}, not_read=())
    both.pairs["a.0"] = "c.0"
    with pytest.raises(ValueError, match="twice"):
        both.to_native({"b.0": torch.ones(1), "c.0": torch.ones(1)}, "there")
