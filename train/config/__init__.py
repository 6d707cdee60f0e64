"""One run as keyword-only dataclasses, read from YAML with command-line overrides; an unknown key is an error."""

from train.config.parsing import Parser, add_run_flags, build_config_of, empty_lists_first, read_config
from train.config.settings import EvaluationConfig, OptimizerConfig, RatesConfig, TrainConfig, check_block_size
from train.config.yaml_files import check_config_files, known_keys

__all__ = [
    "EvaluationConfig",
    "OptimizerConfig",
    "Parser",
    "RatesConfig",
    "TrainConfig",
    "add_run_flags",
    "build_config_of",
    "check_block_size",
    "check_config_files",
    "empty_lists_first",
    "known_keys",
    "read_config",
]
