"""Every engine trains what one process trains: over gloo, the same blocks in other splits.

ZeRO-3 runs by the user's own command, the other runs are forks with the environment that accelerate makes; by
the command too: tests that are `wide`. All cases, four processes, moves between engines and bytes: `python -m
benchmarks.training.engines`.
"""

import fcntl
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from forked import Forked, environments, launch_forked
from matrices import wide

from benchmarks.training.engines import (
    CASES,
    HALFWAY,
    ONE,
    TOLERANCE,
    TWO,
    Comparison,
    launch,
    prepare,
    write_config,
)
from train.engine.engine import (
    Engine,
    announce_compiling,
    check_active,
    device_fields,
    refuse_lost_processes,
    requested_engine,
    start_engine,
)
from train.engine.notices import ACCUMULATION, DEPRECATED
from train.loop.evaluation import shares

with_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this PyTorch was built without gloo, the backend of processes on CPUs",
)
with_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed",
)


in_ten_minutes = pytest.mark.timeout(600)  # up to three runs of up to two processes, on cores that others use too


class Shared(Comparison):
    """A run that another worker of the tests has begun is waited for."""

    def train(self, case, engine, split, **more):
        with (self.folder / f"{case}-{engine}-{split}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return super().train(case, engine, split, **more)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, request):
    """Its runs are forks; one folder for all workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if hasattr(request.config, "workerinput") else own) / "engines"
    folder.mkdir(exist_ok=True)
    with (folder / "base.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(folder, tied=False)
    return Shared(folder, launch=launch_forked)


@with_gloo
@in_ten_minutes
@pytest.mark.parametrize(
    ("engine", "case", "named", "start"),
    [
        ("ddp", "dynamo, three rates", "DDP", launch_forked),
        wide("ddp", "dynamo, three rates", "DDP", launch),
        ("fsdp2", "dynamo, three rates", "FSDP2", launch_forked),
        wide("fsdp2", "dynamo, three rates", "FSDP2", launch),
        ("fsdp2", "medusa, LoRA on bfloat16, self-distillation", "FSDP2", launch_forked),
        pytest.param("zero1", "grounded, frozen", "DeepSpeed ZeRO-1", launch_forked, marks=with_deepspeed),
        pytest.param("zero1", "grounded, frozen", "DeepSpeed ZeRO-1", launch, marks=(with_deepspeed, pytest.mark.wide)),
        pytest.param("zero3", "dynamo, three rates", "DeepSpeed ZeRO-3", launch, marks=with_deepspeed),
    ],
)
def test_two_processes_train_what_one_trains(comparison, engine, case, named, start, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    comparison.train(case, "single", ONE, **HALFWAY)
    row = Shared(comparison.folder, launch=start).compare(case, engine, TWO)  # with what was trained there
    assert row.equal, row
    run = comparison.train(case, engine, TWO, **HALFWAY)  # the same: it is not run again
    said = (run.parent / f"{run.name}.finished").read_text().splitlines()
    assert [line for line in said if line.startswith("engine:")] == [
        f"engine: {named} on 2 processes, cpu with 1 threads"
    ]
    assert not [line for line in said if any(notice in line for notice in ("gcc ", ACCUMULATION, DEPRECATED))]
    assert not list(tmp_path.iterdir()), "an operator was compiled that no training on CPUs calls"


SPOILED = """
import os
import torch
import train.run
from deepspeed.utils import safe_get_local_fp32_param, safe_set_local_fp32_param

finish = train.run.finish

def spoil_and_finish(trainer):
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)
    if os.environ["RANK"] == "1":
        safe_set_local_fp32_param(weight, torch.full_like(safe_get_local_fp32_param(weight), float("nan")))
    finish(trainer)

train.run.finish = spoil_and_finish
train.run.main()
"""


@with_gloo
@with_deepspeed
@in_ten_minutes
def test_a_shard_that_is_not_finite_is_seen_by_all_processes(tmp_path):
    """ZeRO-3's own parameters are empty tensors, which are finite whatever the shards hold."""
    config, run = write_config(tmp_path, "spoiled", CASES["grounded, frozen"], TWO, trainer={"max_steps": 1})
    (tmp_path / "spoiled.py").write_text(SPOILED)
    common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    ranks = environments(common, "zero3", TWO.processes)
    processes = [Forked(tmp_path / "spoiled.py", ["--config", config], rank) for rank in ranks]
    for process in processes:
        said, _ = process.communicate(timeout=300)
        assert "The trained weights are not finite and are not saved" in said, said[-3000:]
        assert process.returncode == 1
    assert not (run / "last").exists()


@with_gloo
@in_ten_minutes
@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("dynamo, three rates", ("fsdp2", TWO), ("single", ONE)),
        pytest.param("grounded, frozen", ("zero1", TWO), ("single", ONE), marks=with_deepspeed),
        pytest.param("dynamo, three rates", ("single", ONE), ("zero3", TWO), marks=with_deepspeed),
    ],
    ids=["fsdp2-single", "zero1-single", "single-zero3"],
)
def test_a_run_that_another_engine_goes_on_with_ends_the_same(comparison, case, before, after):
    assert comparison.resume_under(case, *before, *after) <= TOLERANCE


def test_fsdp_on_one_process_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    PartialState()
    with pytest.raises(ValueError, match="FSDP2 on one process, where nothing can be sharded"):
        start_engine()


def accelerator(kind, stage=None):
    plugin = SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(distributed_type=kind, is_fsdp2=True, state=SimpleNamespace(deepspeed_plugin=plugin))


def test_an_engine_that_is_not_active_is_an_error():
    check_active(Engine.FSDP2, accelerator(DistributedType.FSDP))
    check_active(Engine.ZERO3, accelerator(DistributedType.DEEPSPEED, 3))
    with pytest.raises(ValueError, match="asks for FSDP2, but MULTI_CPU is active"):
        check_active(Engine.FSDP2, accelerator(DistributedType.MULTI_CPU))
    with pytest.raises(ValueError, match="asks for DeepSpeed ZeRO-3, but DEEPSPEED is active"):
        check_active(Engine.ZERO3, accelerator(DistributedType.DEEPSPEED, 2))


def test_what_the_launch_file_asks_for(monkeypatch):
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    assert requested_engine() is None
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert requested_engine() is Engine.ZERO3
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")
    with pytest.raises(ValueError, match="ZeRO stage 0; allowed are 1, 2 and 3"):
        requested_engine()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="FSDP version 1"):
        requested_engine()


def test_deepspeed_over_cpus_takes_gloo_and_is_not_told_of_cpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert device_fields({}) == {"use_cpu": False, "ddp_backend": "gloo"}
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    assert device_fields({}) == {"use_cpu": True}
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert device_fields({}) == {}
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="hide it"):
        device_fields({"use_cpu": True})


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were launched and this one knows of 1"):
        refuse_lost_processes(1)


@pytest.mark.parametrize(("total", "batch", "processes"), [(7, 2, 3), (1, 4, 2), (12, 2, 2)])
def test_every_block_is_measured_once_in_equally_many_batches(total, batch, processes):
    mine = [list(shares(total, batch, process, processes)) for process in range(processes)]
    assert len({len(batches) for batches in mine}) == 1
    assert sorted(i for batches in mine for share in batches for i in share) == list(range(total))


def test_the_first_start_of_offloading_says_that_it_compiles(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    announce_compiling()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    announce_compiling()
    assert not caplog.text
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    announce_compiling()
    assert "DeepSpeed compiles cpu_adam now, which takes a minute or more" in caplog.text
    caplog.clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    announce_compiling()
    monkeypatch.delenv("LOCAL_RANK")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam/cpu_adam.so").touch()
    announce_compiling()
    assert not caplog.text
