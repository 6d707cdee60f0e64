"""The kernel for 16-bit weights equals the product in float64, rounded once; packed models write the plain text."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from tiny import random_tokens, tiny_model
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from tree_runs import texts_with_packed_heads

import heads
from heads.backbone.model import Backbone
from heads.backbone.support import fastest_mode
from heads.products import half, kernels, packed
from heads.products.packed import (
    HalfProduct,
    pack_weights,
    takes_half_products,
    what_stops_packing,
)

why = kernels.why_unavailable(half.SOURCE)
compiled = pytest.mark.skipif(bool(why), reason=why or "there is a kernel")
both_dtypes = pytest.mark.parametrize("dtype", half.DTYPES, ids=half.DTYPES.values())
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 31, half.FUSED_ROWS, half.FUSED_ROWS + 1)


@pytest.fixture
def no_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor whose oneDNN multiplies no 16-bit weights, whatever this one's does."""
    monkeypatch.setattr(packed, "onednn_multiplies", lambda dtype: dtype == torch.float32)


def tolerance(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Float32 sums of I products and a bias in any order, to first order, and one rounding to 16 bits."""
    magnitudes_NO = x_NI.double().abs() @ weight_OI.double().abs().T + (0 if bias_O is None else bias_O.double().abs())
    sums = (x_NI.shape[1] + 1) * 2**-24
    return magnitudes_NO * (sums + torch.finfo(x_NI.dtype).eps / 2) + torch.finfo(x_NI.dtype).tiny


@compiled
@both_dtypes
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (16, 8), (50, 7), (1, 1), (15, 3), (300, 513)])
def test_products_equal_float64_s(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    """Widths that the kernel's 16 weights and 3 or 8 outputs divide, and others."""
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(outputs, inputs, generator=generator).to(dtype)
    bias_O = torch.randn(outputs, generator=generator).to(dtype)
    for rows in ROWS:
        x_NI = torch.randn(rows, inputs, generator=generator).to(dtype)
        for bias in (None, bias_O):
            exact_NO = nn.functional.linear(x_NI.double(), weight_OI.double(), None if bias is None else bias.double())
            found_NO = half.multiply(x_NI, weight_OI, bias)
            assert found_NO.dtype == dtype
            assert ((found_NO.double() - exact_NO).abs() <= tolerance(x_NI, weight_OI, bias)).all()


@compiled
@both_dtypes
def test_each_number_there_is_comes_through_the_identity(dtype: torch.dtype) -> None:
    """All 65,536 patterns as numbers of x, and all finite ones as weights at all places; a product with 1 is exact."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    columns_N1 = patterns[:, None].contiguous()
    torch.testing.assert_close(half.few_rows(columns_N1, one, None), columns_N1, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(half.few_rows(one, columns_N1, None).T, columns_N1, rtol=0, atol=0, equal_nan=True)
    finite_OI = torch.where(patterns.isfinite(), patterns, 0).roll(5).view(-1, 32)
    for rows in (1, 4, 32):
        found = [half.few_rows(part, finite_OI, None) for part in torch.eye(32, dtype=dtype).split(rows)]
        assert torch.equal(torch.cat(found).T, finite_OI)


@compiled
def test_sums_are_rounded_to_the_nearest_and_to_even() -> None:
    """1 + 2**-8 lies between two bfloat16 numbers, 1 + 3 * 2**-8 too; each goes to the even one."""
    weight_12 = torch.ones(1, 2, dtype=torch.bfloat16)
    x_32 = torch.tensor([[1, 2**-8], [1, 3 * 2**-8], [1, 2**-8 + 2**-14]], dtype=torch.bfloat16)
    assert half.multiply(x_32, weight_12).flatten().tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


@compiled
@both_dtypes
def test_leading_axes_are_kept_and_strides_followed(dtype: torch.dtype) -> None:
    weight_OI = torch.randn(12, 20).to(dtype)
    x_BTI = torch.randn(2, 20, 3).to(dtype).transpose(1, 2)
    found = half.multiply(x_BTI, weight_OI)
    assert found.shape == (2, 3, 12)
    assert torch.equal(found, half.multiply(x_BTI.contiguous(), weight_OI))


@compiled
@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(2, 4), torch.ones(3, 5), None),
        (torch.ones(2, 5), torch.ones(3, 5), torch.ones(2)),
        (torch.ones(2, 5), torch.ones(5), None),
    ],
)
def test_shapes_that_do_not_belong_together_never_reach_the_kernel(x: Tensor, weight: Tensor, bias: Any) -> None:
    with pytest.raises(ValueError, match="were given; x is"):
        half.multiply(x.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16())


class Wrapped(Tensor):
    """As quantised and sharded weights are: a dtype, a shape, and no memory of its own."""


NARROW = torch.ones(3, 5).bfloat16()


@pytest.mark.parametrize(
    ("x", "weight", "bias"),
    [
        (torch.ones(2, 5), NARROW, None),
        (torch.ones(2, 5).half(), NARROW, None),
        (torch.ones(2, 5).bfloat16(), NARROW.double(), None),
        (torch.ones(2, 5).bfloat16(), NARROW, torch.ones(3)),
        (torch.ones(2, 3).bfloat16(), NARROW.T, None),
        (torch.ones(0, 5).bfloat16(), NARROW, None),
        (torch.ones(2, 5).bfloat16(), NARROW.to("meta"), None),
        (torch.ones(2, 5).bfloat16(), NARROW.as_subclass(Wrapped), None),
        (torch.ones(2, 5).bfloat16().requires_grad_(), NARROW, None),
        (torch.ones(2, 5).bfloat16(), nn.Parameter(NARROW), None),
    ],
)
def test_other_tensors_and_gradients_are_pytorch_s(x: Tensor, weight: Tensor, bias: Any) -> None:
    assert half.multiplies_here(torch.ones(2, 5).bfloat16(), NARROW, None)
    assert not half.multiplies_here(x, weight, bias)


@compiled
def test_a_tracer_and_a_counter_of_operations_see_pytorch_s_product() -> None:
    """The kernel is no operator: a trace would keep its empty output and lose what is written there."""
    x_NI, weight_OI = torch.ones(2, 5).bfloat16(), NARROW
    with FlopCounterMode(display=False) as counter:
        half.linear(x_NI, weight_OI)
    assert counter.get_total_flops() == 2 * 2 * 3 * 5
    traced = torch.jit.trace(lambda x: half.linear(x, weight_OI), (x_NI,), check_trace=False)
    graph = make_fx(lambda x: half.linear(x, weight_OI))(x_NI)
    for again in (traced, graph):
        assert torch.equal(again(3 * x_NI), torch.full((2, 3), 15.0).bfloat16())


@compiled
def test_autocast_narrows_nothing_that_was_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "FUSED_ROWS", 1)
    x_NI, weight_OI, bias_O = torch.randn(4, 300).bfloat16(), torch.randn(8, 300).bfloat16(), torch.randn(8).bfloat16()
    expected = half.multiply(x_NI, weight_OI, bias_O)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(half.multiply(x_NI, weight_OI, bias_O), expected)


@compiled
def test_trees_over_weights_that_are_multiplied_row_by_row_are_warned_of_once(no_instructions: None) -> None:
    def warned(dtype: torch.dtype, *, pack: bool) -> list[str]:
        model = tiny_model("llama").to(dtype)
        decoding = heads.TreeDecoding(heads.create("medusa", Backbone(model)))
        if pack:
            pack_weights(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                decoding.settings.of_call(1)
        return [str(one.message) for one in caught]

    (said,) = warned(torch.bfloat16, pack=False)
    assert said.startswith("This processor has no instructions for bfloat16, so a pass over eight tokens takes about")
    assert warned(torch.bfloat16, pack=True) == warned(torch.float32, pack=False) == []


@compiled
@both_dtypes
@torch.no_grad()
def test_a_packed_model_has_the_plain_one_s_logits(no_instructions: None, dtype: torch.dtype) -> None:
    plain = tiny_model("llama").to(dtype)
    other = copy.deepcopy(plain)
    assert pack_weights(other) == len([one for one in other.modules() if isinstance(one, nn.Linear)])
    assert isinstance(other.get_output_embeddings().forward.func, HalfProduct)
    for rows in (1, 8):
        tokens_BT = random_tokens(1, rows)
        expected, found = plain(tokens_BT).logits.float(), other(tokens_BT).logits.float()
        # some dozens of rounded layers follow one another
        assert (expected - found).abs().max() <= 16 * torch.finfo(dtype).eps * expected.abs().max()


@compiled
@torch.no_grad()
def test_every_layer_of_a_packed_model_and_its_heads_reaches_the_kernel(
    no_instructions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads' own unembeddings too, which are no layers."""
    read: list[int] = []
    kernel = half.few_rows
    monkeypatch.setattr(half, "few_rows", lambda x, weight, bias: read.append(id(weight)) or kernel(x, weight, bias))
    model = tiny_model("llama").to(torch.bfloat16)
    token_heads = heads.create("medusa", model, num_heads=2).to(torch.bfloat16)
    pack_weights(model), pack_weights(token_heads)
    model.generate(random_tokens(1, 6), max_new_tokens=8, custom_generate=heads.TreeDecoding(token_heads, 4))
    layers = [one for whole in (model, token_heads) for one in whole.modules() if isinstance(one, nn.Linear)]
    assert {id(layer.weight) for layer in layers} <= set(read)
    assert {id(token_heads.projection(k).weight) for k in (1, 2)} <= set(read)


@compiled
@pytest.mark.skipif(bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="attention here takes other products")
@pytest.mark.parametrize("family", heads.families())
def test_trees_over_packed_weights_write_the_text_of_plain_generation_on_them(
    no_instructions: None, family: str
) -> None:
    """A row's sums do not depend on how many rows there are, so tokens are equal even in bfloat16."""
    model = tiny_model("llama").to(torch.bfloat16).requires_grad_(False)
    pack_weights(model)
    expected, found = texts_with_packed_heads(family, model, model)
    assert torch.equal(found, expected)


@compiled
@both_dtypes
def test_a_row_s_sums_depend_neither_on_other_rows_nor_on_threads(dtype: torch.dtype) -> None:
    weight_OI, x_NI = torch.randn(513, 300).to(dtype), torch.randn(9, 300).to(dtype)
    together = half.multiply(x_NI, weight_OI)
    assert torch.equal(together, torch.cat([half.multiply(row[None], weight_OI) for row in x_NI]))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(together, half.multiply(x_NI, weight_OI))
    finally:
        torch.set_num_threads(before)


@compiled
@torch.no_grad()
def test_a_packed_model_is_read_as_the_plain_one_is(no_instructions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In inference mode, and without a product that compares the output layer with its record."""
    model = tiny_model("llama").to(torch.bfloat16)
    pack_weights(model)
    assert fastest_mode(model) is torch.inference_mode
    backbone = Backbone(model)
    monkeypatch.setattr(Backbone, "logits", None)
    assert backbone.output_layer_is_its_record()


@compiled
def test_copies_keep_the_kernel_and_tied_weights_stay_tied(no_instructions: None) -> None:
    model = tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    pack_weights(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layer = other.get_output_embeddings()
        assert takes_half_products(layer)
        assert layer.forward.args[0] is layer
        assert layer.weight is other.get_input_embeddings().weight


def test_weights_of_other_types_are_refused() -> None:
    layer = nn.Linear(5, 3).bfloat16().requires_grad_(False)
    layer.weight = nn.Parameter(NARROW.as_subclass(Wrapped), requires_grad=False)
    with pytest.raises(ValueError, match="with weights of type Wrapped, which are quantised or sharded"):
        pack_weights(layer)


def test_an_unembedding_alone_is_not_packed(no_instructions: None) -> None:
    """As in a model whose other layers hold microscaling codes."""
    model = tiny_model("llama").to(torch.bfloat16)
    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, nn.Identity())
    assert pack_weights(model) == 0


@compiled
def test_gradients_are_those_of_the_plain_layer(no_instructions: None) -> None:
    def gradient(layer: nn.Linear) -> Tensor:
        (found,) = torch.autograd.grad(layer(torch.ones(4, 16).bfloat16()).square().sum(), [layer.weight])
        return found

    layer = nn.Linear(16, 8).bfloat16()
    expected = gradient(layer)
    pack_weights(layer)
    assert torch.equal(gradient(layer), expected)


@compiled
@torch.no_grad()
def test_an_edited_weight_counts_at_once(no_instructions: None) -> None:
    layer, x_RI = nn.Linear(16, 8, bias=False).bfloat16(), torch.ones(4, 16).bfloat16()
    pack_weights(layer)
    before = layer(x_RI)
    layer.weight.data.mul_(2)
    assert torch.equal(layer(x_RI), 2 * before)


def test_without_a_compiler_the_reason_is_in_the_sentence(
    no_instructions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "why_unavailable", lambda source: "no C++ compiler (c++, g++, clang++) was found")
    assert what_stops_packing(torch.ones(2, 2).bfloat16()) == (
        "weights in bfloat16, which oneDNN does not multiply on this processor, nor does our own kernel (no C++ "
        "compiler (c++, g++, clang++) was found); load them in float32 or leave them unpacked"
    )


@compiled
def test_its_threads_are_pytorch_s() -> None:
    """One OpenMP in the process: two would fight for the cores."""
    script = (
        "import torch; from heads.products import half; x = torch.ones(4, 512).bfloat16();"
        "half.multiply(x, torch.ones(512, 512).bfloat16());"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line}))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"
