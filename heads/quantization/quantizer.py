"""`MXConfig`, and the Hugging Face quantizer that `from_pretrained` finds by it.

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=heads.MXConfig("mxfp6_e2m3"))
    model.save_pretrained(folder)                            # packed
    model = AutoModelForCausalLM.from_pretrained(folder)     # without the original; heads has to be imported

Its name among transformers' quantization methods is `headway_mx`, since `mxfp4` and `mxfp8` there are others. Without
`import heads` transformers warns of an unknown method and reads on; the packed weights have another shape than linear
layers (heads/quantization/linear.py), so it then stops with an error instead of running on random weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from heads.quantization.codec import pack, refuse_rule
from heads.quantization.formats import BLOCK, find_format
from heads.quantization.linear import MXLinear, in_blocks

METHOD = "headway_mx"
VERSION = 1  # of how packed weights lie in a file

logger = logging.getLogger(__name__)


class MXConfig(QuantizationConfigMixin):
    """How the linear layers of a model are packed.

    Args:
        format: mxfp4_e2m1, mxfp6_e2m3, mxfp6_e3m2, mxfp8_e4m3, mxfp8_e5m2 or mxint8.
        scale_rule: "floor" (the specification's) or "compressed-tensors".
        skip: names of further modules to leave as they are, from the beginning or end of the full name or as regular
            expressions, such as "down_proj". The unembedding and what is tied to it are always left: heads project with
            it. Embeddings are no linear layers.
        block_size: 32.

    Raises:
        ValueError: an unknown format, rule, block size, version or field.

    >>> MXConfig("mxfp6_e2m3", skip=["down_proj"]).to_dict()["format"]
    'mxfp6_e2m3'
    >>> MXConfig("mxfp6_e2m3", block_size=16)
    Traceback (most recent call last):
    ValueError: block_size=16 was given; microscaling weights are read and written in blocks of 32.
    """

    def __init__(
        self,
        format: str = "mxfp6_e2m3",
        *,
        scale_rule: str = "floor",
        skip: Sequence[str] = (),
        block_size: int = BLOCK,
        version: int = VERSION,
        quant_method: str = METHOD,
        **others: Any,
    ) -> None:
        if others:
            raise ValueError(
                f"{', '.join(map(repr, others))} is no field of MXConfig; allowed are format, scale_rule and skip."
            )
        if block_size != BLOCK:
            raise ValueError(
                f"block_size={block_size!r} was given; microscaling weights are read and written in blocks of {BLOCK}."
            )
        if version != VERSION:
            raise ValueError(
                f"Packed weights have version {version!r}; this Headway reads version {VERSION}: update it."
            )
        if isinstance(skip, str) or not all(isinstance(name, str) for name in skip or ()):
            raise ValueError(f"skip={skip!r} was given; allowed are lists of names of modules.")
        for name in skip or ():
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"skip={name!r} was given, which is no regular expression: {error}.") from None
        refuse_rule(find_format(format), scale_rule)
        self.quant_method: Any = quant_method
        self.version, self.block_size = version, block_size
        self.format, self.scale_rule, self.skip = format, scale_rule, list(skip or ())

    @property
    def bits_per_weight(self) -> float:
        """With the scales."""
        return find_format(self.format).bits_per_weight


class MXQuantizer(HfQuantizer):
    """Packs weights as they are read, or reads packed ones."""

    requires_calibration = False
    quantization_config: Any

    def __init__(self, quantization_config: MXConfig, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.refused: list[str] = []

    @property
    def quantized_element_size(self) -> float:
        return float(self.quantization_config.bits_per_weight) / 8

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        module, _, name = param_name.rpartition(".")
        return not self.pre_quantized and name == "weight" and isinstance(model.get_submodule(module), MXLinear)

    def get_quantize_ops(self) -> PackWeight:
        return PackWeight(self.quantization_config, self.refused)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        if self.refused:
            raise ValueError("; ".join(self.refused))
        return model

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        config = self.quantization_config
        left = self.get_modules_to_not_convert(model, config.skip, model._keep_in_fp32_modules, add_default_skips=True)
        names = [name for name, _ in linear_layers(model, left)]
        refuse_names_of_nothing(model, config.skip)
        if not names:
            raise ValueError(
                f"{type(model).__name__} has no linear layers to pack but those that are left out ({', '.join(left)}); "
                f"load it without quantization_config, or with a shorter skip."
            )
        warn_of_other_matrices(model)
        put_packed_layers(model, names, config)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters and heads above and below; the packed weights are frozen

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        put_plain_layers(model, dtype)
        return model


class PackWeight(ConversionOps):
    """One weight as it is read from a file of plain weights.

    transformers catches what is raised here and reports a table, so what is refused is kept and raised after loading.
    """

    def __init__(self, config: MXConfig, refused: list[str]) -> None:
        self.config, self.refused = config, refused

    def convert(self, input_dict: dict[str, Any], *_: Any, **names: Any) -> dict[str, Tensor]:
        ((name, value),) = input_dict.items()
        weight_OI = value[0] if isinstance(value, list) else value
        try:
            packed = pack(weight_OI, find_format(self.config.format), self.config.scale_rule)
        except ValueError as error:
            self.refused.append(f"{name}: {error}")
            packed = pack(torch.zeros_like(weight_OI), find_format(self.config.format))
        missing = names.get("missing_keys")
        if missing is not None:
            missing.discard(f"{name}_scale")
        return {name: in_blocks(packed), f"{name}_scale": packed.scales}


def linear_layers(model: nn.Module, left: Sequence[str] = ()) -> Iterator[tuple[str, nn.Linear]]:
    """The plain linear layers by name, but for those that are left as they are."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and should_convert_module(name, list(left)):
            yield name, module


def refuse_names_of_nothing(model: nn.Module, skip: Sequence[str]) -> None:
    """
    Raises:
        ValueError: a name in `skip` that no module has.
    """
    modules = [name for name, _ in model.named_modules() if name]
    for given in skip:
        if all(should_convert_module(name, [given]) for name in modules):
            raise ValueError(
                f"skip={given!r} was given, which names no module of {type(model).__name__}; its linear layers are "
                f"{', '.join(sorted({name.rpartition('.')[2] for name, _ in linear_layers(model)}))}."
            )


def put_packed_layers(model: nn.Module, names: Sequence[str], config: MXConfig) -> None:
    """Put empty packed layers in the place of linear ones.

    Raises:
        ValueError: a layer's inputs do not fill blocks.
    """
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        if linear.in_features % BLOCK:
            raise ValueError(
                f"{name} has {linear.in_features} inputs, and blocks hold {BLOCK}; leave it out with "
                f"skip=[{name.rpartition('.')[2]!r}]."
            )
        model.set_submodule(name, MXLinear.like(linear, find_format(config.format)))


def put_plain_layers(model: nn.Module, dtype: Any) -> None:
    """Put linear layers with the unpacked weights in the place of packed ones; all weights in one dtype, if given."""
    for name, module in list(model.named_modules()):
        if isinstance(module, MXLinear):
            model.set_submodule(name, module.unpacked(dtype))
    for parameter in model.parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype)


def warn_of_other_matrices(model: nn.Module) -> None:
    """Matrices outside linear layers and embeddings, such as fused experts, are left as they are."""
    kinds = {
        type(module).__name__
        for module in model.modules()
        if type(module) is not nn.Linear and not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1
    }
    if kinds:
        logger.warning("Weights of %s are no linear layers and stay as they are.", ", ".join(sorted(kinds)))


register_quantization_config(METHOD)(MXConfig)
register_quantizer(METHOD)(MXQuantizer)
