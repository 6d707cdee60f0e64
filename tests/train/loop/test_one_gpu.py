"""A process that sees several GPUs trains on one: nn.DataParallel would scatter the label counts."""

import logging

import torch
from transformers import TrainingArguments

from train.loop.trainer import use_one_gpu


def arguments_of(tmp_path, monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    return TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3)


def test_several_gpus_become_one_with_a_warning(tmp_path, monkeypatch, caplog):
    arguments = arguments_of(tmp_path, monkeypatch, gpus=4)
    assert arguments.train_batch_size == 12, "the Trainer would split batches over 4 GPUs"
    with caplog.at_level(logging.WARNING):
        use_one_gpu(arguments)
    assert (arguments.n_gpu, arguments.train_batch_size) == (1, 3)
    assert "one of the 4 GPUs; see launch/ddp.yaml" in caplog.text


def test_one_gpu_stays_without_a_warning(tmp_path, monkeypatch, caplog):
    arguments = arguments_of(tmp_path, monkeypatch, gpus=1)
    use_one_gpu(arguments)
    assert arguments.n_gpu == 1
    assert not caplog.text
