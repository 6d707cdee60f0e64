"""What families are built from: residual blocks, unembeddings of heads, and decoder layers over the context.

Layers over the context (DynaMo's heads, Hydra++'s prefix layer) run inside each pass over all its slots, like further
layers of the backbone: under the pass's masks and positions, with keys and values in the backbone's cache, which one
commit plan compacts (`Backbone.run_stacks`).

decoder ─ tap ──┬ stack 0 ─ StackTap(index=0)      a stack is a list of layers; each layer of each stack has a cache
                ├ stack 1 ─ StackTap(index=1)      index of its own, after those of the backbone's layers
                └ stack 2 ─ StackTap(index=2)
"""
# B batch, T position, R row, D model width, V vocabulary, S scored token

from __future__ import annotations

import copy
from typing import Literal

import torch
from accelerate.hooks import remove_hook_from_module
from torch import Tensor, nn

from heads.backbone.masks import causal
from heads.backbone.model import Backbone
from heads.backbone.projection import Projection, is_packed, unpacked
from heads.backbone.rounding import same_numbers
from heads.backbone.support import adapted_layers
from heads.interface.draft_vocabulary import StartedRows
from heads.quantization.linear import MXLinear
from heads.quantization.quantizer import put_plain_layers

Unembedding = Literal["own", "shared"]
MAX_RANK = 4096
RANK_ADVICE = "beyond, a LoRA has as many weights as the matrix it is added to"

RESIDUAL_WRITERS = frozenset(
    (
        "o_proj",
        "out_proj",
        "c_proj",
        "dense",
        "wo",
        "down_proj",
        "dense_4h_to_h",
        "fc_out",
        "fc2",
        "w2",
        "output_linear",
    )
)
"""What the last linear layer of an attention or MLP block is called in Hugging Face's models."""


def embed(backbone: Backbone, tokens: Tensor, dtype: torch.dtype, *, normalize: bool) -> Tensor:
    """(…,) token ids to (…, D): the backbone's embeddings, scaled to a root mean square of 1 if `normalize`."""
    embedded = backbone.embed(tokens).to(dtype)
    return nn.functional.rms_norm(embedded, embedded.shape[-1:]) if normalize else embedded


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b). W is zero at the start (Medusa, section 2.1), and b too, so that the block is the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x_RD: Tensor) -> Tensor:
        return x_RD + nn.functional.silu(self.linear(x_RD))


class Unembeddings(StartedRows):
    """One unembedding a head, started from the backbone's; or none, where heads share the backbone's.

    Args:
        draft_vocabulary: number of rows of each, zeros until `start_from` fills them; None: a row for every token.
        biases: give own unembeddings a bias, zero at the start, even if the backbone's has none.
    """

    def __init__(
        self,
        kind: Unembedding,
        num_heads: int,
        backbone: Backbone,
        draft_vocabulary: int | None = None,
        *,
        biases: bool = False,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        if kind == "own":
            start = backbone.projection
            self.weights.extend(_copy(start.weight, draft_vocabulary) for _ in range(num_heads))
            if start.bias is not None:
                self.biases.extend(_copy(start.bias, draft_vocabulary) for _ in range(num_heads))
            elif biases:
                rows = draft_vocabulary or len(start.weight)
                zeros = torch.zeros(rows, device=start.weight.device)
                self.biases.extend(nn.Parameter(zeros.clone()) for _ in range(num_heads))

    @torch.no_grad()
    def start_from(self, tokens_S: Tensor, backbone: Backbone) -> None:
        start = backbone.projection
        for weight_SD in self.weights:
            weight_SD.copy_(unpacked(start.weight)[tokens_S.to(start.weight.device)])
        if start.bias is not None:
            for bias_S in self.biases:
                bias_S.copy_(start.bias[tokens_S.to(start.bias.device)])

    def projection(self, k: int, backbone: Backbone) -> Projection:
        """Head k's projection record, for hidden states that are normed already."""
        start = backbone.projection
        if not self.weights:
            return start.without_norm()
        return start.with_weight(self.weights[k - 1], self.biases[k - 1] if self.biases else None)


class OneUnembedding(StartedRows):
    """One unembedding for all heads, without bias, started from the backbone's.

    Args:
        draft_vocabulary: as `Unembeddings` has it.
    """

    def __init__(self, backbone: Backbone, draft_vocabulary: int | None = None) -> None:
        super().__init__()
        self.weight = _copy(backbone.projection.weight, draft_vocabulary)

    @torch.no_grad()
    def start_from(self, tokens_S: Tensor, backbone: Backbone) -> None:
        weight_VD = unpacked(backbone.projection.weight)
        self.weight.copy_(weight_VD[tokens_S.to(weight_VD.device)])


def _copy(parameter: Tensor, rows: int | None) -> nn.Parameter:
    if rows is not None:
        return nn.Parameter(torch.zeros(rows, *parameter.shape[1:], dtype=torch.float32, device=parameter.device))
    return nn.Parameter(unpacked(parameter).detach().to(torch.float32).clone())


def new_layer(backbone: Backbone, start: str, slot: int, like: nn.Module | None = None) -> nn.Module:
    """A trainable decoder layer of the backbone's class, whose cache index comes after the backbone's layers.

    Args:
        start: "random" or "copied" weights.
        slot: index of the layer among the heads' own, from 0.
        like: the backbone's layer to follow; by default the last one with attention.
    """
    layer = without_adapter(in_slot(backbone, copy.deepcopy(like or backbone.attention_layer), slot))
    put_plain_layers(layer, backbone.dtype)  # the backbone may be packed, and heads train plain weights
    layer.requires_grad_(True)
    if start == "random":
        draw_weights(backbone, layer)
    return layer


def draw_weights(backbone: Backbone, module: nn.Module) -> None:
    """Draw new weights as the backbone's text decoder does; the class of an image-text model may not know how."""
    module.apply(getattr(backbone.decoder, "_init_weights", backbone.model._init_weights))


@torch.no_grad()
def identity_layer(backbone: Backbone, slot: int) -> nn.Module:
    """A random layer that starts as the identity: its blocks write zeros to the residual stream at first.

    Raises:
        ValueError: a layer of this class is not the identity then.
    """
    layer = new_layer(backbone, "random", slot)
    for name, parameter in layer.named_parameters():
        if not RESIDUAL_WRITERS.isdisjoint(part.removesuffix("_bias") for part in name.split(".")):
            parameter.zero_()
    parameter = next(layer.parameters())
    if not parameter.is_meta and not is_identity(backbone, layer, parameter):
        raise ValueError(
            f"A {type(layer).__name__} does not become the identity by zeroing {', '.join(sorted(RESIDUAL_WRITERS))}, "
            f"so heads that read one would not start as the backbone; give prefix_layers=0."
        )
    return layer


def is_identity(backbone: Backbone, layer: nn.Module, like: Tensor) -> bool:
    hidden_BTD = torch.linspace(-1, 1, 2 * backbone.hidden_size, dtype=like.dtype, device=like.device).view(1, 2, -1)
    positions_BT = torch.arange(2, device=like.device)[None]
    may_attend_BTT = causal(torch.ones_like(positions_BT, dtype=torch.bool))
    mask = backbone.mask_style.finish(may_attend_BTT, positions_BT, positions_BT, like.dtype)
    return torch.equal(backbone.run_layer(layer, hidden_BTD, positions_BT, mask), hidden_BTD)


def without_adapter(layer: nn.Module) -> nn.Module:
    """The layer with the backbone's LoRA, if it has one, merged into its weights: heads train all of their own."""
    for name, adapted in adapted_layers(layer).items():
        if isinstance(packed := adapted.get_base_layer(), MXLinear):
            adapted.base_layer = packed.unpacked(torch.float32)
        adapted.merge()
        layer.set_submodule(name, adapted.get_base_layer())
    return layer


def in_slot(backbone: Backbone, layer: nn.Module, slot: int) -> nn.Module:
    """The layer, writing keys and values to the backbone's cache, `slot` places after the backbone's own layers."""
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = backbone.num_layers + slot
    # A device_map's hooks, copied along, would move tensors to where the backbone's own layer is.
    return remove_hook_from_module(layer, recurse=True)


@torch.no_grad()
def check_last_layer(backbone: Backbone, what: str) -> None:
    """Raise ValueError if a copy of the last attention layer could not be trained or run on a hidden state alone."""
    others = [p for m in backbone.attention_layer.modules() if not isinstance(m, MXLinear) for p in m.parameters(False)]
    if not all(p.is_floating_point() and not is_packed(p) for p in others):
        raise ValueError(
            f"The last layer of {backbone.name} is quantised, and {what} of its kind; load the backbone without "
            f"quantization."
        )
    if backbone.device.type != "meta" and not runs_alone(backbone):
        raise ValueError(
            f"A {type(backbone.attention_layer).__name__} needs more than a hidden state, positions and a mask (it may "
            f"read tokens or other layers), and {what} of its kind; give heads without layers, as medusa has none."
        )


def runs_alone(backbone: Backbone) -> bool:
    """Whether the last attention layer, run by itself on four tokens, gives what it gives inside a pass."""
    tokens_BT = torch.arange(4, device=backbone.device)[None] % backbone.vocab_size
    positions_BT = torch.arange(4, device=backbone.heads_device)[None]
    may_attend_BTT = causal(torch.ones_like(positions_BT, dtype=torch.bool))
    mask = backbone.mask_style.finish(may_attend_BTT, positions_BT, positions_BT, backbone.dtype)
    was_training, tap = backbone.model.training, backbone.attention_tap
    backbone.model.eval()
    try:
        _, taps = backbone.forward(
            tokens_BT, taps=[tap, tap + 1], attention_mask=mask, position_ids=positions_BT, use_cache=False
        )
        return same_numbers(backbone.run_layer(backbone.attention_layer, taps[tap + 1], positions_BT, mask), taps[tap])
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError):  # the layer needs other inputs
        return False
    finally:
        backbone.model.train(was_training)
