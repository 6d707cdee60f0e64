"""Small runs to be planned: a config of one, and the sizes of its tiny Llama by hand."""

from tiny import CONFIGS

from heads.backbone.loading import BackboneConfig
from heads.data.documents import DataConfig, SourceConfig
from train.config import TrainConfig

V, D, W, L = 40, 32, 48, 3  # vocabulary, width, inner width and layers of the tiny Llama below
BACKBONE_NUMEL = 2 * V * D + L * (2 * D * D + 2 * D * D // 2 + 3 * D * W + 2 * D) + D  # two key-value heads of four
HEAD_NUMEL = D * D + D + V * D


def write_backbone(folder):
    """Its config.json alone: a plan reads no weights."""
    config = CONFIGS["llama"]()
    config.vocab_size = V
    config.save_pretrained(folder / "base")


def config(folder, **changes):
    fields = {
        "output_dir": str(folder / "run"),
        "backbone": BackboneConfig(name_or_path=str(folder / "base"), dtype="float32"),
        "data": DataConfig(train=[SourceConfig(path="nowhere")], block_size=16),
        "family": "medusa",
        "heads": {"num_heads": 2},
        "trainer": {"per_device_train_batch_size": 2},
    }
    return TrainConfig(**(fields | changes))
