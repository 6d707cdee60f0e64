"""Load a backbone and its tokenizer by name or path, or start one from random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from heads.validation import validated

Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]


@validated
@dataclass(kw_only=True)
class BackboneConfig:
    """Which causal LM, and how it is loaded.

    Attributes:
        name_or_path: a folder with a Hugging Face model, or a name on the hub.
        revision: branch, tag or commit on the hub, of the backbone and of its own tokenizer.
        dtype: of the weights once loaded; "auto" is the checkpoint's on an accelerator and float32 on a CPU.
        attn_implementation: "sdpa" or "eager"; others cannot take the mask of a token tree. None lets the model choose.
        trust_remote_code: run modelling code that lies beside the weights. Off unless you know whose code it is.
        quantization: fields of a transformers quantization config, such as {quant_method: bitsandbytes,
            load_in_4bit: true}; passed to the model loader as it is.
        gradient_checkpointing: recompute activations in backward, of a trained backbone and of heads' layers of its
            kind; a run that trains neither refuses it.
        random_weights: start from random weights in the shape of the config, to train a backbone from nothing.
        tokenizer: folder or hub name of the tokenizer; the backbone's own where it is not given.
    """

    name_or_path: str
    revision: str | None = None
    dtype: Dtype = "auto"
    attn_implementation: Literal["sdpa", "eager"] | None = None
    trust_remote_code: bool = False
    quantization: dict[str, Any] | None = None
    gradient_checkpointing: bool = False
    random_weights: bool = False
    tokenizer: str | None = None


def load_backbone(config: BackboneConfig, device: torch.device | str | None = None) -> Any:
    """The causal LM, in eval mode, on `device`.

    Raises:
        ValueError: the folder or name holds no causal LM, or a setting does not fit it; says which.
    """
    refuse_names(config)
    if config.random_weights and config.quantization:
        raise ValueError(
            "random_weights and quantization were both given; quantization is of weights that exist: give one of them."
        )
    kwargs: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    dtype = resolve_dtype(config.dtype, device)
    if config.attn_implementation:
        kwargs["attn_implementation"] = config.attn_implementation
    if config.quantization:
        kwargs["quantization_config"] = AutoQuantizationConfig.from_dict(dict(config.quantization))
    model_config = read_model_config(config) if config.random_weights else None
    with explained(config.name_or_path):
        if model_config is not None:
            kwargs.pop("revision")  # it was the config's, which is read by now
            if dtype == "auto":
                dtype = model_config.get_text_config().dtype or torch.float32
            model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, **kwargs)
        else:
            model = AutoModelForCausalLM.from_pretrained(config.name_or_path, dtype=dtype, **kwargs)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(device).eval() if device is not None and not config.quantization else model.eval()


def check_backbone(name: str) -> None:
    """Read a model's config and tokenizer, which takes no time, so that a wrong name is found before long work.

    Raises:
        ValueError: the folder or name holds no model, or no tokenizer.
    """
    with explained(name):
        AutoConfig.from_pretrained(name)
    load_tokenizer(BackboneConfig(name_or_path=name))


def load_tokenizer(config: BackboneConfig) -> Any:
    """The backbone's tokenizer, padding on the left as decoding needs it."""
    refuse_names(config)
    source = config.tokenizer or config.name_or_path
    revision = config.revision if source == config.name_or_path else None
    with explained(source):
        return AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=config.trust_remote_code, padding_side="left"
        )


def refuse_names(config: Any) -> None:
    """
    Raises:
        ValueError: a name or anything else in place of a config.
    """
    if not isinstance(config, BackboneConfig):
        raise ValueError(f"{config!r:.200} was given; give heads.BackboneConfig(name_or_path=…) with that name.")


def read_vocab_size(config: BackboneConfig) -> int:
    return int(read_model_config(config).get_text_config().vocab_size)


def read_model_config(config: BackboneConfig) -> Any:
    with explained(config.name_or_path, needs="config.json"):
        return AutoConfig.from_pretrained(
            config.name_or_path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )


def read_own_ends(config: BackboneConfig, model_config: Any) -> int | list[int] | None:
    """The end-of-text tokens in a backbone's generation settings, or in its config where the settings name none."""
    try:
        own = GenerationConfig.from_pretrained(config.name_or_path, revision=config.revision).eos_token_id
    except OSError:
        own = None
    return model_config.get_text_config().eos_token_id if own is None else own


def max_positions(model: Any) -> int | None:
    """The longest text that a model takes, in tokens; None where its config does not say."""
    return read_max_positions(model.config)


def read_max_positions(model_config: Any) -> int | None:
    """The same, from a config alone."""
    config = model_config.get_text_config()
    return getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))  # the latter: MPT


def resolve_dtype(dtype: Dtype, device: torch.device | str | None) -> Any:
    if dtype != "auto":
        return getattr(torch, dtype)
    on_accelerator = torch.cuda.is_available() if device is None else torch.device(device).type != "cpu"
    return "auto" if on_accelerator else torch.float32


class explained:  # noqa: N801 - reads as a phrase: `with explained(name): load(name)`
    """Turn what transformers raises for a wrong name into one sentence."""

    def __init__(self, name: str, needs: str = "config.json and weights") -> None:
        self.name = name
        self.needs = needs

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if not isinstance(error, OSError | ValueError | ImportError | KeyError | SafetensorError):
            return
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        kind = "folder" if Path(self.name).is_dir() else "folder or hub name"
        raise ValueError(
            f"The {kind} {self.name!r} could not be loaded as a causal LM with its tokenizer ({first_line}); give a "
            f"folder that holds {self.needs}, or a name that the hub knows."
        ) from error
