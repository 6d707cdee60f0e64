"""`MXLinear`: a linear layer whose weight stays packed in microscaling blocks, in memory and on disk.

Its weight is frozen; what lies below and above it can be trained, since gradients pass through it. Neither forward nor
backward keeps an unpacked weight: each unpacks it for its own product and drops it.

On disk `weight` holds the codes as (outputs, blocks, bytes of a block): a program that does not know the format finds
another shape than a linear layer's and stops, where two dimensions could be read as numbers.
"""
# O outputs, I inputs, G = I / 32 blocks of a row, Y bytes of a block; … any leading axes

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.quantization.codec import Packed, pack, unpack
from heads.quantization.formats import BLOCK, Format
from heads.quantization.multiply import multiply


class MXLinear(nn.Module):
    """`nn.Linear` over a packed weight.

    Attributes:
        weight: (O, G, Y) uint8, the codes.
        weight_scale: (O, G) uint8, the exponents of the scales.

    >>> from heads.quantization.formats import find_format
    >>> layer = MXLinear.of(nn.Linear(64, 8), find_format("mxfp6_e2m3"))
    >>> layer(torch.ones(2, 64)).shape, layer.weight.nbytes + layer.weight_scale.nbytes
    (torch.Size([2, 8]), 400)
    """

    def __init__(
        self, inputs: int, outputs: int, format: Format, *, bias: bool = True, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.format = inputs, outputs, format
        blocks = inputs // BLOCK
        codes = torch.zeros(outputs, blocks, format.block_bytes, dtype=torch.uint8, device=device)
        scales = torch.zeros(outputs, blocks, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype, device=device)) if bias else None

    @classmethod
    def like(cls, linear: nn.Linear, format: Format) -> MXLinear:
        """Of the same shape, dtype and device, with zeros."""
        return cls(
            linear.in_features,
            linear.out_features,
            format,
            bias=linear.bias is not None,
            dtype=linear.weight.dtype,
            device=linear.weight.device,
        )

    @classmethod
    def of(cls, linear: nn.Linear, format: Format, scale_rule: str = "floor") -> MXLinear:
        """The layer with its weight packed; it shares the bias.

        Raises:
            ValueError: a weight that `pack` refuses.
        """
        packed, layer = pack(linear.weight, format, scale_rule), cls.like(linear, format)
        layer.weight.data, layer.weight_scale.data = in_blocks(packed), packed.scales
        layer.bias = linear.bias
        return layer.train(linear.training)

    @property
    def packed(self) -> Packed:
        return Packed(self.weight.data.flatten(1), self.weight_scale.data)

    def unpacked(self, dtype: torch.dtype) -> nn.Linear:
        """A plain linear layer with the numbers that the codes stand for; it shares the bias."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta", dtype=dtype)
        layer.weight = nn.Parameter(unpack(self.packed, self.format, dtype))
        layer.bias = None if self.bias is None else nn.Parameter(self.bias.detach().to(dtype))  # type: ignore[assignment]
        return layer.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """(…, I) to (…, O), in the dtype of x, or of autocast where that is on."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.is_grad_enabled() and (x.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            product: Tensor = FrozenProduct.apply(x, self.bias, self.packed, self.format)  # type: ignore[no-untyped-call]
            return product
        return product_of(x, self.packed, self.format, self.bias)

    def extra_repr(self) -> str:
        """
        >>> from heads.quantization.formats import find_format
        >>> MXLinear(32, 4, find_format("mxint8"), bias=False)
        MXLinear(in_features=32, out_features=4, bias=False, mxint8)
        """
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, {self.format.name}"
        )


class FrozenProduct(torch.autograd.Function):
    """A product through which gradients pass, without an unpacked weight being kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_O: Tensor | None, packed: Packed, format: Format) -> Tensor:
        ctx.packed, ctx.format, ctx.dtype = packed, format, x.dtype
        return product_of(x, packed, format, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (gradient,) = gradients
        for_x, for_bias, _, _ = ctx.needs_input_grad
        through = (gradient @ unpack(ctx.packed, ctx.format, gradient.dtype)).to(ctx.dtype) if for_x else None
        return through, gradient.flatten(0, -2).sum(0) if for_bias else None, None, None


def product_of(x: Tensor, packed: Packed, format: Format, bias_O: Tensor | None) -> Tensor:
    """(…, I) to (…, O), by the fastest way there is."""
    product_NO = multiply(x.reshape(-1, x.shape[-1]), packed.codes, packed.scales, format, bias_O)
    return product_NO.reshape(*x.shape[:-1], product_NO.shape[-1])


def in_blocks(packed: Packed) -> Tensor:
    """(O, G, Y): the codes as `MXLinear` holds them."""
    return torch.unflatten(packed.codes, -1, (packed.scales.shape[1], -1))
