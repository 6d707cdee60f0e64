"""Compiled passes against plain ones: logits, taps, text, buckets, and what is refused.

Most tests capture the graphs and run them as they are: what Inductor makes of them is tested once, and its own concern.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from matrices import covering, wide
from throwaway_families import fitted_heads, make_heads
from tiny import PAD, left_padded, random_tokens, tiny_model
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

import heads
from heads.backbone.compiling import buffers, graph
from heads.backbone.compiling.compiled_backbone import OPEN, CompiledBackbone
from heads.backbone.compiling.graph import has_cpp_compiler
from heads.backbone.model import Backbone, CommitPlan
from heads.decoding.trees.static import Shape

SHAPE = Shape((-1, 0, 1, 0, 3, 3))
# Of each matrix the other rows are wide: tracing a graph takes seconds of a core.
whole_and_open = pytest.mark.parametrize("whole", [True, False], ids=["whole buckets", "open"])
ROOM: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


def shallow(name: str, layers: int = 2, **options: Any) -> Any:
    """Tracing takes as long as there are layers; two show what one hands to the next, and both of Gemma 3's kinds."""
    if name == "gemma3":
        options["layer_types"] = ["sliding_attention", "full_attention"]
    return tiny_model(name, attn="sdpa", num_hidden_layers=layers, **options)


@torch.no_grad()
def walk(backbone: Backbone, prompt: torch.Tensor, taps: tuple[Any, ...], rounds: int) -> list[torch.Tensor]:
    """Logits and taps of passes that keep a path which has to move."""
    state, _ = backbone.prefill(prompt, torch.ones_like(prompt).bool(), taps)
    found = []
    for seed in range(rounds):
        tokens = random_tokens(prompt.shape[0], SHAPE.num_nodes, seed=seed)
        output = backbone.verify(state, tokens, SHAPE.depth_tensor("cpu"), SHAPE.sees_NN(), taps)
        found += [backbone.logits(output.final_BND), *(output.taps[tap] for tap in taps)]
        paths = [[0, 3, 5], [0, 1]] if seed % 2 else [[0, 1, 2], [0]]
        state = backbone.commit(state, output, CommitPlan.from_paths(paths[: prompt.shape[0]], "cpu"))
    return found


def check_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for fast, plain in zip(found, expected, strict=True):
        # float64: 1e-10 of values up to some tens is a thousand roundings; float32: 2e-5 as between kernels.
        tolerance = 1e-10 if plain.dtype == torch.float64 else 2e-5
        assert float((fast - plain).abs().max()) <= tolerance * max(1.0, float(plain.abs().max()))


@covering(backbone=[("llama", 2), ("mistral_windowed", 1), ("gemma3", 2)], whole=[True, False])
def test_logits_and_taps_over_a_buckets_border(backbone, whole, captured, monkeypatch):
    name, rows = backbone
    monkeypatch.setattr(buffers, "FIRST_BUCKET", 16)
    model = shallow(name)
    plain = Backbone(model)
    fast = CompiledBackbone(plain, whole_buckets=whole)
    taps = ("final", 0, 1, plain.num_layers)
    prompt = random_tokens(rows, 6)
    check_close(walk(fast, prompt, taps, 6), walk(plain, prompt, taps, 6))
    slots = [key[3] for key in fast.compile_seconds]
    assert slots == ([16, 32] if whole else [OPEN]), "six passes stand in two buckets"
    assert all(not hooks for layer in plain.layers for hooks in (layer._forward_hooks, layer._forward_pre_hooks))


@whole_and_open
def test_one_graph_for_each_shape_and_no_recompilation_behind_it(whole, captured):
    fast = CompiledBackbone(Backbone(shallow("llama", 1)), whole_buckets=whole)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (3, 9, 40):
            walk(fast, random_tokens(1, length), ("final", 1), 4)
    assert len(fast.compile_seconds) == 1
    assert all(seconds > 0 for seconds in fast.compile_seconds.values())


@pytest.mark.parametrize(
    ("family", "name", "rows"),
    [
        wide("grounded", "llama", 1),
        ("kv", "mistral_windowed", 2),
        wide("grounded, prefix", "llama", 2),  # test_layers_of_heads_run_in_the_graph has its passes
    ],
)
def test_text_is_generates(family, name, rows, captured, monkeypatch):
    monkeypatch.setattr(buffers, "FIRST_BUCKET", 32)
    token_heads = fitted_heads(family, name)
    model = token_heads.backbone.model
    decoding = heads.TreeDecoding(token_heads, 6, compile=True)
    prompt = random_tokens(rows, 5, seed=50)
    for penalty in (1.0, 1.1):  # the second text meets the graphs of the first
        asked = {"max_new_tokens": 24, "repetition_penalty": penalty, **ROOM}
        plain = model.generate(prompt, **asked)
        assert torch.equal(model.generate(prompt, custom_generate=decoding, **asked), plain)
    assert decoding.backbone.compile_seconds, "no compiled pass was made"
    assert heads.TreeDecoding(token_heads, 4, compile=True).backbone is decoding.backbone


def test_a_hook_that_came_later_is_not_ignored(captured):
    model = shallow("llama")
    plain = Backbone(model)
    fast = CompiledBackbone(plain)
    prompt = random_tokens(1, 6)
    walk(fast, prompt, (0,), 1)
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: -output)
    changed = walk(plain, prompt, (0,), 1)
    check_close(walk(fast, prompt, (0,), 1), changed)
    hook.remove()
    again = walk(plain, prompt, (0,), 1)
    assert not torch.equal(again[0], changed[0])
    check_close(walk(fast, prompt, (0,), 1), again)


def test_prompts_compile_nothing(captured):
    """Padded, windowed or behind kept caches, a prompt is read by plain passes; a second turn meets known graphs."""
    token_heads = fitted_heads("grounded", "mistral_windowed")
    model = token_heads.backbone.model
    decoding = heads.TreeDecoding(token_heads, 6, lookup=0, compile=True, keep_caches=True)
    text = random_tokens(1, 6, seed=51)
    for turn in range(3):
        asked = {"attention_mask": torch.ones_like(text), "max_new_tokens": 8, **ROOM}
        plain = model.generate(text, **asked)
        assert torch.equal(model.generate(text, custom_generate=decoding, **asked), plain)
        if turn == 0:
            known = set(decoding.backbone.compile_seconds)
        text = torch.cat([plain, random_tokens(1, 3 + turn, seed=turn)], dim=1)
    assert set(decoding.backbone.compile_seconds) == known
    tokens, mask = left_padded([random_tokens(n, seed=70 + n).tolist() for n in (3, 6)])
    asked = {"attention_mask": mask, "max_new_tokens": 8, **ROOM}
    once = heads.TreeDecoding(token_heads, 6, lookup=0, compile=True)
    assert torch.equal(model.generate(tokens, custom_generate=once, **asked), model.generate(tokens, **asked))


@pytest.mark.parametrize("variant", ["grounded, prefix", wide("dynamo"), "dynamo, lora"])
def test_layers_of_heads_run_in_the_graph(variant, captured):
    """What a pass makes of the taps; heads without layers share no buffers with them; graphs go when the heads go."""
    plain = Backbone(shallow("llama"))
    fast = CompiledBackbone(plain)
    token_heads = make_heads(variant, plain, num_heads=2)
    prompt = random_tokens(2, 6)
    for taps in (token_heads.taps, ("final",)):
        check_close(walk(fast, prompt, taps, 3), walk(plain, prompt, taps, 3))
    assert len(fast.compile_seconds) == 2
    of_heads = [weakref.ref(graph) for graph in fast.graphs_of(token_heads.taps).values()]
    assert len(of_heads) == 1
    del token_heads, taps
    gc.collect()
    assert [graph() for graph in of_heads] == [None]
    assert [names for names, *_ in fast.graphs_of(("final",))] == [("final",)]


def test_graphs_of_different_heads_are_counted_apart(captured):
    """Both record the first stack over the final states, in passes of one shape."""
    plain = Backbone(shallow("llama"))
    fast = CompiledBackbone(plain)
    for token_heads in (make_heads("grounded, prefix", plain, seed=seed) for seed in (1, 2)):
        walk(fast, random_tokens(1, 6), token_heads.taps, 1)
    one, other = fast.compile_seconds
    assert one[:4] == other[:4]


@torch.no_grad()
@pytest.mark.parametrize(("name", "whole"), [wide("llama", True), ("llama", False), ("gemma3", True)])
def test_dead_rows_change_nothing_in_those_that_are_left(name, whole, captured, monkeypatch):
    """Rows leave one by one, over a bucket's border: one graph a bucket, and the plain backbone's states."""
    monkeypatch.setattr(buffers, "FIRST_BUCKET", 16)
    plain = Backbone(shallow(name))
    fast = CompiledBackbone(plain, whole_buckets=whole)
    prompt, taps = random_tokens(4, 6), ("final", 1)
    states = [backbone.prefill(prompt, torch.ones_like(prompt).bool(), taps)[0] for backbone in (fast, plain)]
    for stays in ([0, 1, 2, 3], [0, 2, 3], [1, 2], [1], [0]):
        tokens = random_tokens(len(stays), SHAPE.num_nodes, seed=len(stays))
        paths = [[[0, 3, 5], [0, 1], [0], [0, 3]][row] for row in range(len(stays))]
        found = []
        for i, backbone in enumerate((fast, plain)):
            if len(stays) < len(states[i].next_position_B):
                states[i] = states[i].keep_rows(torch.tensor(stays))
            output = backbone.verify(states[i], tokens, SHAPE.depth_tensor("cpu"), SHAPE.sees_NN(), taps)
            found.append([backbone.logits(output.final_BND), *(output.taps[tap] for tap in taps)])
            states[i] = backbone.commit(states[i], output, CommitPlan.from_paths(paths, "cpu"))
        check_close(*found)
    assert sorted(key[1:4] for key in fast.compile_seconds) == ([(4, 8, 16), (4, 8, 32)] if whole else [(4, 8, OPEN)])


def test_a_batch_whose_rows_end_one_by_one_keeps_its_graphs(captured):
    """Texts of four rows that end at four places; then a smaller batch gets graphs of its own, which the first uses."""
    token_heads = fitted_heads("grounded", "llama")
    model = token_heads.backbone.model
    decoding = heads.TreeDecoding(token_heads, 6, lookup=0, compile=True)
    decoding.backbone = CompiledBackbone(token_heads.backbone)  # without the graphs that other tests left
    prompt = random_tokens(4, 5, seed=23)
    free = model.generate(prompt, max_new_tokens=30, **ROOM)[:, 5:].tolist()
    ends = [row[place] for row, place in zip(free, (3, 9, 15, 29), strict=True)]
    asked = {**ROOM, "max_new_tokens": 30, "eos_token_id": ends}
    plain = model.generate(prompt, **asked)
    assert len({(row == PAD).sum().item() for row in plain}) > 2, "rows are to end at different places"
    for rows, graphs in ((4, {4}), (2, {2, 4}), (4, {2, 4})):
        ours = model.generate(prompt[:rows], custom_generate=decoding, **asked)
        assert torch.equal(ours, model.generate(prompt[:rows], **asked))
        assert {key[1] for key in decoding.backbone.compile_seconds} == graphs


@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler is here for torch.compile")
@whole_and_open
def test_inductor_gives_the_same_logits(whole, monkeypatch):
    """From one graph, though the first of the passes over open slots would just fill a bucket of 16."""
    monkeypatch.setattr(buffers, "FIRST_BUCKET", 64 if whole else 16)
    model = shallow("mistral_windowed", 1, dtype=torch.float32)
    plain, fast = Backbone(model), CompiledBackbone(Backbone(model), whole_buckets=whole)
    prompt = random_tokens(1, 8)
    with torch._dynamo.config.patch(error_on_recompile=True):
        check_close(walk(fast, prompt, ("final", 1), 3), walk(plain, prompt, ("final", 1), 3))


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_pass_over_whole_buckets_writes_to_stays_where_it_is(whole, monkeypatch):
    """Inductor skips CUDA graphs for passes that write to other inputs; AOT autograd says the same on any device."""
    found = []

    def note(graph, _):
        facts = TracingContext.try_get().fw_metadata
        written = {i for i, info in enumerate(facts.input_info) if info.mutates_data}
        found.append((len(written), written <= set(facts.static_input_indices)))
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **_: real(f, dynamic=False, fullgraph=True, backend=aot_autograd(fw_compiler=note))
    )
    fast = CompiledBackbone(Backbone(shallow("llama")), whole_buckets=whole)
    with torch.no_grad():
        walk(fast, random_tokens(1, 6), ("final",), 3)
    assert found == [(2 * fast.num_layers, whole)], "keys and values of each layer; slices of open slots may move"


@pytest.mark.cuda
def test_cuda_graphs_give_the_same_text():
    model = tiny_model("llama", attn="sdpa", dtype=torch.float32).cuda()
    token_heads = heads.create("grounded", model, num_heads=3).cuda()
    prompt = random_tokens(1, 5).cuda()
    plain = model.generate(prompt, max_new_tokens=300, **ROOM)
    decoding = heads.TreeDecoding(token_heads, 6, compile=True)
    for _ in range(2):  # the second call takes up the buffers of the first
        assert torch.equal(model.generate(prompt, max_new_tokens=300, custom_generate=decoding, **ROOM), plain)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_without_a_compiler_it_is_refused(monkeypatch):
    token_heads = heads.create("medusa", tiny_model("llama"), num_heads=2)
    monkeypatch.setattr(graph, "has_cpp_compiler", lambda: False)
    with pytest.raises(ValueError, match=r"compile=True was given, but torch.compile found no C\+\+ compiler"):
        heads.TreeDecoding(token_heads, compile=True)


def test_a_spread_or_quantised_backbone_is_refused():
    backbone = Backbone(tiny_model("llama"))
    backbone.model.hf_device_map = {"a": 0, "b": "cpu"}
    with pytest.raises(ValueError, match="spread over several devices"):
        CompiledBackbone(backbone)
    del backbone.model.hf_device_map
    backbone.model.is_quantized = True
    with pytest.raises(ValueError, match="quantised"):
        CompiledBackbone(backbone)
