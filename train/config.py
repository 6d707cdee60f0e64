"""One run as keyword-only dataclasses, read from YAML with command-line overrides; an unknown key is an error.

Fields stand where what they build stands: `backbone` in heads/backbone/loading.py, `data` in heads/data/documents.py,
`heads` in the family's file. `trainer` takes any field of transformers' TrainingArguments under its own name.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace
from transformers import TrainingArguments

from heads.backbone.loading import BackboneConfig
from heads.checkpoint.backbone import LoraSettings
from heads.data.documents import DataConfig
from heads.decoding.trees.static import MAX_NODES
from heads.families import build_config
from heads.validation import build
from train.objective.amounts import is_amount, is_positive
from train.objective.weights import LossConfig, SelfDistillationConfig, WarmInConfig

SET_BY_HEADWAY = {
    "output_dir",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "report_to",
    "resume_from_checkpoint",
    "save_strategy",
    "eval_strategy",
    "eval_steps",
    "seed",
    "data_seed",
    "remove_unused_columns",
}


NOT_HERE = {
    "optim": "the optimizer is AdamW with the fields of `optimizer`",
    "optim_args": "the optimizer is AdamW with the fields of `optimizer`",
    "label_smoothing_factor": "soft labels are the backbone's own: see loss",
    "label_names": "labels are made from tokens and masks",
    "gradient_checkpointing": "set backbone.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "set backbone.gradient_checkpointing",
    "fsdp": "engines are chosen by the launch file; see docs/engines.md",
    "fsdp_config": "engines are chosen by the launch file; see docs/engines.md",
    "deepspeed": "engines are chosen by the launch file; see docs/engines.md",
    "torch_compile": "set compile",
    "torch_compile_backend": "set compile",
    "torch_compile_mode": "set compile",
    "enable_jit_checkpoint": "a run that gets SIGTERM or SIGUSR1 is saved in any case",
    "logging_nan_inf_filter": "a step whose loss is not finite is skipped; see max_skipped_steps",
    "ignore_data_skip": "a resumed run goes on at its place in the data",
    "save_only_model": "checkpoints are there to resume from",
    "load_best_model_at_end": "the best heads are kept in best/ beside the last",
    "metric_for_best_model": "heads are judged by tokens per pass",
}


@dataclass(kw_only=True)
class RatesConfig:
    """Peak learning rates.

    Attributes:
        heads: of the heads (DynaMo's LR_M).
        base: of the backbone (LR_B), trained with the heads or, with `family: null`, alone; null keeps it frozen.
        heads_to_base: LR_MB: what flows from heads back into a trained backbone is weighted with heads_to_base / base.
            One optimizer trains all, so under AdamW this weights one gradient against the other. 0 lets nothing back;
            null is the same as base (all counts alike).
    """

    heads: float = 1e-4
    base: float | None = None
    heads_to_base: float | None = None

    @property
    def gradient_scale(self) -> float:
        """LR_MB / LR_B.

        >>> RatesConfig(base=0.5, heads_to_base=0.125).gradient_scale
        0.25
        """
        if self.base is None or self.heads_to_base is None:
            return 1.0
        return self.heads_to_base / self.base

    def check(self, *, with_heads: bool) -> None:
        if with_heads:
            check_rate("rates.heads", self.heads)
        if self.base is not None or not with_heads:
            check_rate("rates.base", self.base)
        if self.heads_to_base is None:
            return
        if self.base is None or not with_heads:
            raise ValueError(
                "rates.heads_to_base was given without heads on a trained backbone; give rates.base and a family too, "
                "or leave it null."
            )
        if not is_amount(self.heads_to_base):
            raise ValueError(f"rates.heads_to_base={self.heads_to_base} was given; allowed are 0 and more.")


@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW; the defaults are the grounded-heads paper's (section 4.1).

    Attributes:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: on matrices; biases and norms have none.
    """

    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0

    def check(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer.{name}={getattr(self, name)} was given; allowed are 0 up to 1 (1 excluded)."
                )
        for name in ("eps", "weight_decay"):
            if not is_amount(getattr(self, name)):
                raise ValueError(f"optimizer.{name}={getattr(self, name)} was given; allowed are 0 and more.")


@dataclass(kw_only=True)
class EvaluationConfig:
    """What is measured while training, on held-out data.

    Attributes:
        every_steps: optimizer steps between evaluations; the last step is always evaluated. 0: only the last step.
        num_prompts: held-out prompts that the shipped decoder decodes at every evaluation for tokens per pass.
        prompt_tokens: length of each prompt, in tokens.
        new_tokens: tokens decoded for each prompt.
        tree_nodes: nodes of the tree that it decodes with, the root included.
    """

    every_steps: int = 500
    num_prompts: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    tree_nodes: int = 16

    def check(self) -> None:
        least = {"every_steps": 0, "num_prompts": 1, "prompt_tokens": 1, "new_tokens": 1, "tree_nodes": 2}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"evaluation.{name}={getattr(self, name)} was given; allowed are {lowest} and more.")
        if self.tree_nodes > MAX_NODES:
            raise ValueError(f"evaluation.tree_nodes={self.tree_nodes} was given; allowed are up to {MAX_NODES}.")


@dataclass(kw_only=True)
class TrainConfig:
    """One run of the trainer.

    Attributes:
        output_dir: folder of the run: `last/` and `best/` heads, metrics.jsonl, checkpoints for --resume.
        backbone: the causal LM.
        data: training and held-out rows.
        family: the kind of heads (`medusa`, `grounded`, `gru`, `dynamo`); null trains the backbone alone.
        heads: fields of the family's Config, such as num_heads. Each family's file explains its own.
        init_from: folder of heads to continue from, with a new optimizer and schedule.
        rates: peak learning rates; rates.base trains the backbone together with the heads.
        lora: train the backbone through a LoRA adapter in place of all its weights; lora.rank 0 for all.
        warm_in: how much the heads' loss counts beside the own one of a backbone that is trained with them.
        self_distillation: the backbone as it was teaches the one that is trained with heads.
        label_shift: with `family: null`, the label at t is x_{t+label_shift} (DynaMo's T1-L2 has 2).
        lookahead: with `family: null`, share of positions whose first layer sees one token ahead (T1-L2-M(-1)R).
        head_decay: the loss of head k is weighted with head_decay ** (k - 1).
        loss: what heads are trained on; true tokens where it is not given.
        compile: torch.compile for decoder layers: auto turns it on where the run is long enough to repay it.
        cache_hidden_states: run a frozen backbone once over all blocks and read its hidden states from disk from then
            on; for runs of several epochs, or several runs on the same blocks.
        hidden_states_dtype: they are stored in; the backbone's where it is null.
        optimizer: AdamW's settings.
        evaluation: what is measured while training.
        trainer: fields of transformers.TrainingArguments, such as num_train_epochs,
            per_device_train_batch_size (blocks), gradient_accumulation_steps, warmup_steps (steps, or a share of all
            steps below 1), lr_scheduler_type, bf16.
        report_to: where metrics go: any of jsonl, tensorboard, wandb.
        save_every_steps: optimizer steps between checkpoints that --resume continues from; 0 keeps none.
            A run that gets SIGTERM or SIGUSR1 is saved in any case (docs/nothing_lost.md).
        save_dtype: of the saved heads.
        resume: continue from the last whole checkpoint in output_dir; from the start if the run was killed before one.
        max_skipped_steps: steps of the whole run whose loss or gradient is not finite and that are skipped; one more
            ends the run. They count as steps for the data and the schedule.
        seed: of initial weights and the order of blocks; data.seed orders and mixes the documents in them.
    """

    output_dir: str
    backbone: BackboneConfig
    data: DataConfig
    family: str | None = "grounded"
    heads: dict[str, Any] = field(default_factory=dict)
    init_from: str | None = None
    rates: RatesConfig = field(default_factory=RatesConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    warm_in: WarmInConfig = field(default_factory=WarmInConfig)
    self_distillation: SelfDistillationConfig = field(default_factory=SelfDistillationConfig)
    label_shift: int = 1
    lookahead: float = 0.0
    head_decay: float = 1.0
    loss: LossConfig = field(default_factory=LossConfig)
    compile: Literal["auto"] | bool = "auto"
    cache_hidden_states: bool = False
    hidden_states_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    trainer: dict[str, Any] = field(default_factory=dict)
    report_to: list[str] = field(default_factory=lambda: ["jsonl"])
    save_every_steps: int = 0
    save_dtype: str = "float32"
    resume: bool = False
    max_skipped_steps: int = 10
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return 0 if self.family is None else build_config(self.family, **self.heads).num_heads

    @property
    def heads_change_backbone(self) -> bool:
        """Heads and backbone are trained together, and the heads' gradient reaches it."""
        return self.family is not None and self.rates.base is not None and self.rates.gradient_scale > 0

    def check(self) -> None:
        """Raise ValueError on what cannot train, before anything is loaded."""
        if self.family is not None:
            build_config(self.family, **self.heads)
        elif self.heads or self.init_from:
            raise ValueError("heads or init_from were given with family: null; remove them or name a family.")
        self.rates.check(with_heads=self.family is not None)
        self.check_backbone_training()
        self.warm_in.check(heads_change_backbone=self.heads_change_backbone)
        self.self_distillation.check(joint=self.family is not None and self.rates.base is not None)
        self.check_hidden_states()
        if self.num_heads + 2 > self.data.block_size:
            raise ValueError(
                f"{self.num_heads} heads need blocks of at least {self.num_heads + 2} tokens; data.block_size is "
                f"{self.data.block_size}."
            )
        if not is_positive(self.head_decay):
            raise ValueError(f"head_decay={self.head_decay} was given; it must be above 0 (1 weights all heads alike).")
        self.loss.check(num_heads=self.num_heads, head_decay=self.head_decay)
        for name in self.report_to:
            known = ("jsonl", "tensorboard", "wandb")
            if name not in known:
                raise ValueError(f"report_to has {name!r}; allowed are {', '.join(known)}.{nearest(name, known)}")
            if name != "jsonl" and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"report_to has {name!r}, which is not installed; pip install {name}, or leave it out."
                )
        if self.save_dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"save_dtype={self.save_dtype!r} was given; allowed are float32, bfloat16, float16.")
        self.optimizer.check()
        self.evaluation.check()
        if self.save_every_steps < 0:
            raise ValueError(
                f"save_every_steps={self.save_every_steps} was given; give steps, or 0 for no checkpoints."
            )
        if self.max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps={self.max_skipped_steps} was given; allowed are 0 and more.")
        check_trainer_fields(self.trainer)

    def check_hidden_states(self) -> None:
        """Raise ValueError on stored hidden states that nobody could read."""
        if self.cache_hidden_states and (self.rates.base is not None or self.family is None):
            raise ValueError(
                "cache_hidden_states was given for a backbone that is trained, whose hidden states change with every "
                "step; leave it out, or set rates.base to null and name a family."
            )
        if self.cache_hidden_states and self.data.streaming:
            raise ValueError(
                "cache_hidden_states was given with data.streaming; states are stored for blocks that are stored: set "
                "one of them to false."
            )
        if self.hidden_states_dtype is not None and not self.cache_hidden_states:
            raise ValueError("hidden_states_dtype was given without cache_hidden_states; give both, or neither.")

    def check_backbone_training(self) -> None:
        """Raise ValueError on settings of a trained backbone where none is trained, or not in this way."""
        if self.lora.rank and self.rates.base is None:
            raise ValueError(
                "lora.rank was given but rates.base is null, which keeps the backbone frozen; give a rate."
            )
        if self.rates.base is not None and self.backbone.quantization and not self.lora.rank:
            raise ValueError(
                "rates.base trains the backbone, but backbone.quantization leaves it no weights that can be trained; "
                "give lora, or load it without quantization."
            )
        if self.family is not None and (self.label_shift, self.lookahead) != (1, 0.0):
            raise ValueError("label_shift and lookahead are for family: null; heads have their own label shifts.")
        if not 1 <= self.label_shift < self.data.block_size:
            raise ValueError(f"label_shift={self.label_shift} was given; allowed are 1 up to data.block_size - 1.")
        if not 0 <= self.lookahead <= 1 or (self.lookahead and self.label_shift == 1):
            raise ValueError(
                f"lookahead={self.lookahead} was given with label_shift={self.label_shift}; allowed are 0 to 1, and "
                f"more than 0 only with a label_shift of 2 and more, or a position would see its own label."
            )


def check_rate(name: str, rate: float | None) -> None:
    if not is_positive(rate):
        raise ValueError(f"{name}={rate} was given; nothing would be learned: give a rate above 0, such as 1e-4.")


def check_trainer_fields(fields: dict[str, Any]) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    known = list(defaults)
    for name in fields:
        if name in SET_BY_HEADWAY:
            raise ValueError(f"trainer.{name} has a field of its own in the run's config; remove it from `trainer`.")
        if name not in known:
            raise ValueError(f"trainer.{name} is no field of transformers.TrainingArguments.{nearest(name, known)}")
        if name in NOT_HERE:
            raise ValueError(f"trainer.{name} has no effect here and is refused: {NOT_HERE[name]}.")
        check_type(name, fields[name], defaults[name])


def check_type(name: str, value: Any, default: Any) -> None:
    """A field whose default is a number or a switch takes the same kind."""
    wanted = "true or false" if isinstance(default, bool) else "a number" if isinstance(default, int | float) else None
    is_number = isinstance(value, int | float) and not math.isnan(value)
    right = isinstance(value, bool) if wanted == "true or false" else is_number
    if wanted is not None and not right:
        raise ValueError(f"trainer.{name} takes {wanted}; {value!r} was given.")


def nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


class Parser(ArgumentParser):
    """An argument parser whose errors are one sentence that names the nearest real key."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
        text = re.sub(r"\s+", " ", str(message)).strip()
        unknown = re.search(r"(?:[Uu]nrecognized arguments:|Key)\s*'?-*([\w.]+)", text)
        hint = nearest(unknown.group(1), known_keys(TrainConfig)) if unknown else ""
        sys.stderr.write(f"{self.prog}: error: {text}{hint}\n")
        sys.exit(2)


def build_parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Train multi-token prediction heads, or a backbone, from one YAML file.")
    parser.add_argument("--config", action="config", help="YAML file of the run; later flags override its keys.")
    parser.add_class_arguments(TrainConfig, fail_untyped=False)
    return parser


def read_config(arguments: Sequence[str] | None = None, prog: str = "train.py") -> TrainConfig:
    """The run's config from `--config FILE` and overrides such as `--rates.heads 3e-4`, checked.

    Raises:
        SystemExit: on what cannot be parsed, after one sentence on stderr.
        ValueError: on values that cannot train.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for path in config_files(arguments):
        check_yaml_keys(path)
    parser = build_parser(prog)
    namespace: Namespace = parser.parse_args(arguments)
    check_blocks(namespace.as_dict(), TrainConfig)
    values = namespace.as_dict()
    values.pop("config", None)
    config = build(TrainConfig, values, of="a run's config")
    config.check()
    return config


def config_files(arguments: Sequence[str]) -> list[Path]:
    """The YAML files named on the command line.

    Raises:
        ValueError: one does not exist.
    """
    paths = [Path(after) for flag, after in pairwise(arguments) if flag == "--config"]
    paths += [Path(argument.partition("=")[2]) for argument in arguments if argument.startswith("--config=")]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"--config {path} does not exist; runs are described in configs/*.yaml.")
    return paths


def check_yaml_keys(path: Path) -> None:
    """Every key of a YAML file must be a field; names the nearest real one.

    Raises:
        ValueError: an unknown key, or a file that is no YAML mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values at its top, such as `family: grounded`.")
    known = known_keys(TrainConfig)
    for key in yaml_keys(content):
        if key not in known and not key.startswith(("heads.", "trainer.", "backbone.quantization.")):
            raise ValueError(f"{path} has the unknown key {key!r}.{nearest(key, known)}")


def check_blocks(values: dict[str, Any], config_class: Any, prefix: str = "") -> None:
    """A key that has fields below it holds names and values; null only where it stands for none.

    Raises:
        ValueError: nothing stands below such a key, or something else than names and values does.
    """
    for name, hint in get_type_hints(config_class).items():
        value, key, kinds = values.get(name), f"{prefix}{name}", (hint, *get_args(hint))
        is_block = dataclasses.is_dataclass(hint) or any(get_origin(kind) is dict for kind in kinds)
        if not is_block or name not in values or (value is None and NoneType in kinds):
            continue
        if not isinstance(value, dict) or not all(isinstance(field, str) for field in value):
            given = "nothing below it" if value is None else repr(value)
            raise ValueError(
                f"{key} was given with {given}; it takes names and values{such_as(hint)}: give some, or leave it out."
            )
        if dataclasses.is_dataclass(hint):
            check_blocks(value, hint, f"{key}.")


def such_as(hint: Any) -> str:
    """
    >>> such_as(RatesConfig)
    ' (heads, base, heads_to_base)'
    """
    return f" ({', '.join(f.name for f in dataclasses.fields(hint))})" if dataclasses.is_dataclass(hint) else ""


def known_keys(config_class: Any, prefix: str = "") -> list[str]:
    """All dotted keys of a config dataclass; the entries of lists go without an index."""
    keys: list[str] = []
    for name, hint in get_type_hints(config_class).items():
        keys.append(prefix + name)
        for inner in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(inner):
                keys += known_keys(inner, f"{prefix}{name}.")
    return keys


def yaml_keys(content: Any, prefix: str = "") -> list[str]:
    if isinstance(content, list):
        return [key for item in content for key in yaml_keys(item, prefix)]
    if not isinstance(content, dict):
        return []
    found: list[str] = []
    for name, value in content.items():
        found.append(f"{prefix}{name}")
        found += yaml_keys(value, f"{prefix}{name}.")
    return found
