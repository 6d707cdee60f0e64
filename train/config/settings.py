"""One run as keyword-only dataclasses. Ranges are beside the fields; `check` refuses combinations that cannot train.

Each part has its fields in the module that builds it: `backbone` in heads/backbone/loading.py, `data` in
heads/data/documents.py, `heads` in the family's file, `loss`, `warm_in` and `self_distillation` in
train/objective/weights.py. `trainer` takes fields of transformers' TrainingArguments under their own names; those that
would have no effect here are refused (train/config/trainer_fields.py).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any, Literal

from heads.backbone.loading import BackboneConfig
from heads.checkpoint.adapter import LoraSettings
from heads.data.documents import DataConfig
from heads.decoding.trees.static import MAX_NODES
from heads.families import build_config
from heads.validation import nearest, validated, within
from train.config.states_server import StatesServerConfig
from train.config.trainer_fields import check_trainer_fields
from train.objective.weights import LossConfig, SelfDistillationConfig, WarmInConfig

TRACKERS = ("jsonl", "tensorboard", "wandb")
NOTHING_LEARNED = "at 0 nothing would be learned: give a rate such as 1e-4"


@validated
@dataclass(kw_only=True)
class RatesConfig:
    """Peak learning rates.

    Attributes:
        heads: rate of the heads (DynaMo's LR_M).
        base: rate of the backbone (LR_B), trained with the heads or, with `family: null`, alone; null leaves it frozen.
        heads_to_base: LR_MB. Gradients from heads into a trained backbone are weighted with heads_to_base / base. One
            optimizer trains both, so under AdamW this weights one gradient against the other. At 0 the heads do not
            change the backbone; null is the same as base, which weights both equally.
    """

    heads: float = within(above=0, default=1e-4, advice=NOTHING_LEARNED)
    base: float | None = within(above=0, default=None, advice=NOTHING_LEARNED)
    heads_to_base: float | None = within(0, default=None)

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
        if self.base is None and not with_heads:
            raise ValueError(f"rates.base=None was given with family: null; {NOTHING_LEARNED}.")
        if self.heads_to_base is not None and (self.base is None or not with_heads):
            raise ValueError(
                "rates.heads_to_base was given without heads on a trained backbone; give rates.base and a family too, "
                "or leave it null."
            )


@validated
@dataclass(kw_only=True)
class OptimizerConfig:
    """AdamW; the defaults are the grounded-heads paper's (section 4.1).

    Attributes:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the root of the second moment.
        weight_decay: on matrices; biases and norms have none.
    """

    beta1: float = within(0, below=1, default=0.9)
    beta2: float = within(0, below=1, default=0.99)
    eps: float = within(0, default=1e-8)
    weight_decay: float = within(0, default=0.0)


@validated
@dataclass(kw_only=True)
class EvaluationConfig:
    """What is measured while training, on held-out data.

    Attributes:
        every_steps: optimizer steps between evaluations; the last step is always evaluated. 0: only the last step.
        num_prompts: held-out prompts that heads decode at every evaluation, for tokens per pass.
        prompt_tokens: length of each prompt, in tokens; the prompt of a chat ends where its first reply begins.
        new_tokens: tokens decoded for each prompt.
        tree_nodes: nodes of the tree for this decoding, the root included.
    """

    every_steps: int = within(0, default=500)
    num_prompts: int = within(1, default=8)
    prompt_tokens: int = within(1, default=64)
    new_tokens: int = within(1, default=64)
    tree_nodes: int = within(2, MAX_NODES, default=16)


def check_block_size(num_heads: int, block_size: int) -> None:
    """Raise ValueError where no block has a label for every head."""
    if num_heads + 2 > block_size:
        raise ValueError(
            f"{num_heads} heads need blocks of at least {num_heads + 2} tokens and data.block_size is {block_size}; "
            "raise it or train fewer heads."
        )


@validated
@dataclass(kw_only=True)
class TrainConfig:
    """One run of the trainer.

    Attributes:
        output_dir: folder of the run: `last/` and `best/` heads, metrics.jsonl, checkpoints for --resume.
        backbone: the causal LM.
        data: training and held-out rows.
        family: the kind of heads (`medusa`, `grounded`, `gru`, `eagle`, `mtp`, `mlp_speculator`, `dynamo`); null trains
            the backbone alone.
        heads: fields of the family's Config, such as num_heads. Each family's file explains its own.
        init_from: folder of heads to continue from, with a new optimizer and schedule.
        rates: peak learning rates; rates.base trains the backbone together with the heads.
        lora: train a LoRA adapter instead of all weights of the backbone; lora.rank 0 trains all weights.
        warm_in: weight of the heads' loss relative to the own loss of a backbone that is trained with them.
        self_distillation: distil the backbone from before training into the one that is trained with heads.
        label_shift: with `family: null`, the label at t is x_{t+label_shift} (DynaMo's T1-L2 has 2).
        lookahead: with `family: null`, share of positions whose first layer sees one token ahead (T1-L2-M(-1)R).
        head_decay: the loss of head k is weighted with head_decay ** (k - 1).
        loss: the heads' losses; by default the cross-entropy with the true tokens.
        compile: torch.compile for decoder layers; auto turns it on if the run is long enough to repay it, except where
            blocks of 512 tokens and more attend by document, which compiled layers cannot.
        cache_hidden_states: run a frozen backbone once over all blocks and read its hidden states from disk in every
            epoch; for runs of several epochs, or several runs on the same blocks.
        hidden_states_dtype: dtype of the stored hidden states; null is the backbone's.
        states_server: an inference server that computes the hidden states which cache_hidden_states stores.
        optimizer: AdamW's settings.
        evaluation: what is measured while training.
        trainer: fields of transformers.TrainingArguments, such as num_train_epochs,
            per_device_train_batch_size (blocks), gradient_accumulation_steps, warmup_steps (steps, or a share of all
            steps below 1), lr_scheduler_type, bf16.
        report_to: where metrics go: any of jsonl, tensorboard, wandb.
        save_every_steps: optimizer steps between checkpoints that --resume continues from; 0 saves none.
            A run that gets SIGTERM or SIGUSR1 is saved in any case (docs/engines.md).
        save_dtype: dtype of the saved heads.
        resume: continue from the last whole checkpoint in output_dir; from the start if the run was killed before one.
        overwrite: let a new run remove the checkpoints, last/, best/ and metrics.jsonl of an earlier run in output_dir,
            just before its first step; without it such a folder is refused. A resumed run removes nothing.
        max_skipped_steps: largest number of steps that may be skipped because their loss or gradient is not finite;
            one more ends the run. They count as steps for the data and the schedule.
        seed: seed of initial weights and of the order of blocks; data.seed orders and mixes the documents in them.
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
    head_decay: float = within(above=0, default=1.0, advice="1 weights all heads alike")
    loss: LossConfig = field(default_factory=LossConfig)
    compile: Literal["auto"] | bool = "auto"
    cache_hidden_states: bool = False
    hidden_states_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    states_server: StatesServerConfig = field(default_factory=StatesServerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    trainer: dict[str, Any] = field(default_factory=dict)
    report_to: list[str] = field(default_factory=lambda: ["jsonl"])
    save_every_steps: int = within(0, default=0, advice="0 saves no checkpoints")
    save_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    resume: bool = False
    overwrite: bool = False
    max_skipped_steps: int = within(0, default=10)
    seed: int = within(0, 2**32 - 1, default=0)

    @property
    def num_heads(self) -> int:
        return 0 if self.family is None else build_config(self.family, **self.heads).num_heads

    @property
    def heads_change_backbone(self) -> bool:
        """Heads and backbone are trained together, and the heads' gradient reaches it."""
        return self.family is not None and self.rates.base is not None and self.rates.gradient_scale > 0

    def check(self) -> None:
        """Raise ValueError on what cannot train, before anything is loaded."""
        if not self.output_dir.strip():
            raise ValueError(
                f"output_dir={self.output_dir!r} was given; give the name of a folder for the run's heads and metrics."
            )
        if self.family is not None:
            build_config(self.family, **self.heads)
        elif self.heads or self.init_from:
            raise ValueError("heads or init_from were given with family: null; remove them or name a family.")
        self.rates.check(with_heads=self.family is not None)
        self.check_backbone_training()
        self.warm_in.check(heads_change_backbone=self.heads_change_backbone)
        self.self_distillation.check(joint=self.family is not None and self.rates.base is not None)
        self.check_hidden_states()
        check_block_size(self.num_heads, self.data.block_size)
        self.check_stream()
        self.loss.check(num_heads=self.num_heads, head_decay=self.head_decay)
        self.check_trackers()
        check_trainer_fields(self.trainer)

    def check_stream(self) -> None:
        """Raise ValueError on processes that a stream could not use."""
        if not self.data.streaming:
            return
        if self.data.num_proc is not None:
            raise ValueError(
                "data.num_proc was given with data.streaming, whose rows are tokenised where they are read; leave one "
                "of them out."
            )
        workers = self.trainer.get("dataloader_num_workers", 0)
        if isinstance(workers, int) and workers > 1:
            raise ValueError(
                f"trainer.dataloader_num_workers={workers} was given with data.streaming, whose blocks one worker "
                "reads and packs, in one order; give 1, or leave it out."
            )

    def check_trackers(self) -> None:
        """Raise ValueError on a tracker that does not exist, or is not installed."""
        for name in self.report_to:
            if name not in TRACKERS:
                raise ValueError(f"report_to has {name!r}; allowed are {', '.join(TRACKERS)}.{nearest(name, TRACKERS)}")
            if name != "jsonl" and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"report_to has {name!r}, which is not installed; pip install {name}, or leave it out."
                )

    def check_hidden_states(self) -> None:
        """Raise ValueError on stored hidden states that would be useless."""
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
        self.states_server.check(stores=self.cache_hidden_states)

    def check_backbone_training(self) -> None:
        """Raise ValueError on settings of a trained backbone that do not fit the run."""
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
