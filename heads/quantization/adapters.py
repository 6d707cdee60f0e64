"""LoRA adapters on packed layers: peft's own layer for linear ones, which only calls the layer below and adds to it.

peft adapts the kinds of layers that it knows; `_register_custom_module` is its way to name another (its guide "Custom
models"). An adapter is trained and saved apart from the packed weights, which stay as they are; it is not folded into
them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from heads.extras import needs_extra
from heads.quantization.linear import MXLinear


@contextlib.contextmanager
def packed_layers_adapted(config: Any) -> Iterator[Any]:
    """The LoraConfig, which finds packed layers too while the context lasts.

    >>> from peft import LoraConfig, inject_adapter_in_model
    >>> from torch import nn
    >>> from heads.quantization.formats import find_format
    >>> model = nn.Sequential(MXLinear(32, 8, find_format("mxint8")))
    >>> with packed_layers_adapted(LoraConfig(r=2, target_modules=["0"])) as config:
    ...     adapted = inject_adapter_in_model(config, model)
    >>> adapted[0].lora_A["default"].weight.shape, adapted[0].base_layer.weight.dtype
    (torch.Size([2, 32]), torch.uint8)
    """
    with needs_extra("lora", "a LoRA adapter is put on packed layers"):
        from peft.tuners.lora.layer import Linear
    config._register_custom_module({MXLinear: Linear})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type.*MXLinear")
        yield config
