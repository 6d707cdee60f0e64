"""The comparison with servers' own code, without it: what is imported goes again, and what is missing is named."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from throwaway_families import make_heads
from tiny import shared_model

import heads
from benchmarks.outside.servers import CHECKOUTS, found_in, imported, ours


def test_a_package_is_imported_without_its_init_and_forgotten(tmp_path):
    inner = tmp_path / "engine_x" / "layers"
    inner.mkdir(parents=True)
    (tmp_path / "engine_x" / "__init__.py").write_text("raise ImportError")
    (inner / "medusa.py").write_text("from engine_x.kernels import SYSTEM\nfrom engine_x.layers import given\n")
    given = {"engine_x.kernels": {"SYSTEM": "cpu"}, "engine_x.layers": {"given": 3}}
    with imported(tmp_path, "engine_x", ("layers",), given):
        module = importlib.import_module("engine_x.layers.medusa")
        assert (module.SYSTEM, module.given) == ("cpu", 3)
    assert not [name for name in sys.modules if name.startswith("engine_x")]


def test_missing_checkouts_are_named(tmp_path):
    (tmp_path / CHECKOUTS[0]).mkdir()
    with pytest.raises(ValueError, match=f"has no {CHECKOUTS[1]}, {CHECKOUTS[2]};"):
        found_in(tmp_path)


def test_our_logits_are_those_of_the_heads_along_their_own_drafts():
    token_heads = make_heads("mlp_speculator", heads.Backbone(shared_model("llama", "sdpa", torch.float64)))
    states_BD = torch.randn(2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        found_BKV = ours(token_heads, states_BD)
    torch.testing.assert_close(found_BKV.sum(dim=-1), torch.ones(2, token_heads.num_heads, dtype=torch.float64))
    assert found_BKV.shape[-1] == token_heads.backbone.vocab_size
