"""`pack_heads`: heads whose linear layers stay packed in microscaling blocks, in memory and in their folder.

Rounded heads draft other tokens now and then, so tokens per pass may fall; verified text is the same in any case.
What heads.json records is each layer's format (`packed_layers`), and `heads.load` puts packed layers there before it
reads their tensors. Unembeddings, embeddings and recurrent cells are no linear layers and stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from heads.quantization.formats import BLOCK, find_format
from heads.quantization.linear import MXLinear
from heads.quantization.quantizer import MXConfig, linear_layers, refuse_names_of_nothing

M = TypeVar("M", bound=nn.Module)


def pack_heads(token_heads: M, config: MXConfig) -> M:
    """Pack the linear layers of heads, in place; returns the heads, in eval mode.

    Args:
        token_heads: heads in floating point, on the CPU or a GPU.
        config: format, rule of scales, and names of layers that are left as they are.

    Raises:
        ValueError: no linear layer to pack, inputs that do not fill blocks of 32, weights that are not finite, or a
            name in `skip` that no layer has; nothing is packed then.

    >>> body = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 32))
    >>> packed_layers(pack_heads(body, MXConfig("mxfp4_e2m1", skip=["2"])))
    {'0': 'mxfp4_e2m1'}
    """
    kind = type(token_heads).__module__.rpartition(".")[2]
    if packed_layers(token_heads):
        raise ValueError(f"These {kind} heads are packed already; pack the ones that they were made from.")
    refuse_names_of_nothing(token_heads, config.skip)
    layers = dict(linear_layers(token_heads, config.skip))
    if not layers:
        raise ValueError(f"These {kind} heads have no linear layers to pack; use them as they are.")
    for name, layer in layers.items():
        if layer.in_features % BLOCK:
            raise ValueError(
                f"{name} has {layer.in_features} inputs, and blocks hold {BLOCK}; leave it out with skip=[{name!r}]."
            )
    format = find_format(config.format)
    for name, packed in {name: MXLinear.of(one, format, config.scale_rule) for name, one in layers.items()}.items():
        token_heads.set_submodule(name, packed)
    return token_heads.eval()


def packed_layers(module: nn.Module) -> dict[str, str]:
    """The format of each packed layer, by name; empty for heads in floating point."""
    return {name: layer.format.name for name, layer in module.named_modules() if isinstance(layer, MXLinear)}


def put_packed_heads(module: nn.Module, layers: Mapping[str, str]) -> None:
    """Put empty packed layers in the place of the named linear ones.

    Raises:
        ValueError: a name that no linear layer has, a format that does not exist, or inputs that do not fill blocks.
    """
    plain = dict(linear_layers(module))
    for name, format in layers.items():
        if name not in plain or plain[name].in_features % BLOCK:
            raise ValueError(
                f"packed_layers names {name!r}, which is no linear layer of these heads that fills blocks of {BLOCK}; "
                f"save or copy the heads again."
            )
        module.set_submodule(name, MXLinear.like(plain[name], find_format(format)))


def refuse_packed_heads(module: nn.Module, doing: str) -> None:
    """
    Raises:
        ValueError: heads with packed layers, where only floating point will do.
    """
    if packed := packed_layers(module):
        raise ValueError(
            f"{doing} needs heads in floating point, and {len(packed)} layers of these are packed as "
            f"{', '.join(sorted(set(packed.values())))}; give the heads that they were packed from."
        )
