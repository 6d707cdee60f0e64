"""Memory of every engine by hand: 40 bytes frozen, 80 trained in float32, on 4 processes."""

from dataclasses import replace
from pathlib import Path

import pytest

from train.plan.live_tensors import BACKBONE, FROZEN, GRADIENTS, TRAINED
from train.plan.memory import LAUNCHES, Sizes, fewest_processes, memory_of, read_launches
from train.plan.shapes import ParameterCount
from train.plan.step import TracedStep

ROOT = Path(__file__).resolve().parents[3]
ALL, ROOT_GROUP, UNIT = (
    ParameterCount(trained=20, frozen=10, trained_bytes=80, frozen_bytes=40),
    ParameterCount(trained=2, frozen=4),
    ParameterCount(trained=3, frozen=1),
)
STEP = TracedStep(
    training=[{BACKBONE: 1000}, {BACKBONE: 930, GRADIENTS: 80}],
    evaluating=[{BACKBONE: 300}],
    storing=[],
    flops=0,
    storing_flops=0,
)
SIZES = Sizes(all=ALL, root=ROOT_GROUP, unit=UNIT, step=STEP)
BY_HAND = {
    # frozen + trained + gradients + optimizer + gathered + communication + activations
    "single": 40 + 80 + 80 + 160 + 930,
    "ddp": 40 + 80 + 80 + 160 + 80 + 930,
    "fsdp2": 10 + 20 + 0 + 40 + 4 * (6 + 2 * 4) + 4 * (2 + 2 * 3) + 1000,
    "fsdp2_multi_node": 10 + 20 + 0 + 40 + 56 + 32 + 1000,
    "zero1": 40 + 80 + 80 + (80 + 160) // 4 + 80 + 930,
    "zero2": 40 + 80 + 0 + (80 + 160) // 4 + 80 + 1000,
    "zero3": 10 + 20 + 0 + (80 + 160) // 4 + 120 + 80 + 1000,
    "zero3_offload": 0 + 0 + 0 + 0 + 120 + 80 + 1000,
}


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: launch.name)
def test_each_engine_by_hand(launch):
    found = memory_of(launch, SIZES, 4)
    assert sum(found.training.values()) == BY_HAND[launch.name]
    assert found.host == (10 + 20 + 60 + 20 if launch.offloads else 0)
    gathered = {"fsdp2": 56, "fsdp2_multi_node": 56, "zero3": 120, "zero3_offload": 120}.get(launch.name, 0)
    kept = sum(found.training.get(part, 0) for part in (FROZEN, TRAINED, "optimizer states"))
    assert found.evaluating == kept + gathered + 300


def test_deepspeed_in_mixed_precision_has_two_bytes_and_a_master_copy():
    zero2 = next(launch for launch in LAUNCHES if launch.name == "zero2")
    found = memory_of(zero2, replace(SIZES, half=True), 4).training
    assert (found[FROZEN], found[TRAINED], found["optimizer states"]) == (20, 40, (4 + 8) * 20 // 4)


def test_fsdp2_follows_its_launch_file(tmp_path):
    (tmp_path / "fsdp2.yaml").write_text("fsdp_config: {fsdp_reshard_after_forward: false}\n")
    launch = read_launches(tmp_path)[2]
    assert memory_of(launch, SIZES, 4).training["gathered for use"] == 4 * ALL.numel
    assert read_launches(tmp_path / "nowhere") == LAUNCHES


def test_engines_are_the_launch_files():
    assert {launch.name for launch in LAUNCHES} == {path.stem for path in (ROOT / "launch").glob("*.yaml")}


def test_the_fewest_processes_are_found():
    fsdp2 = LAUNCHES[2]
    needed = {n: memory_of(fsdp2, SIZES, n).peak for n in range(1, 9)}
    assert fewest_processes(fsdp2, SIZES, needed[5]) == 5
    assert fewest_processes(fsdp2, SIZES, 10) is None
    assert fewest_processes(LAUNCHES[0], SIZES, 10**9) == 1


def test_fsdp2_sums_in_float32_beside_gradients_of_the_compute_dtype():
    """Root group 2 and unit 3 trained: five gradients of two bytes wait, three are summed in four."""
    fsdp2 = LAUNCHES[2]
    assert memory_of(fsdp2, replace(SIZES, half=True), 4).training["communication"] == 2 * (2 + 3) + 4 * 3
    large_root = replace(SIZES, half=True, root=ParameterCount(trained=11))
    assert memory_of(fsdp2, large_root, 4).training["communication"] == (2 + 4) * 11
    in_half = replace(SIZES, all=replace(ALL, trained_bytes=2 * ALL.trained))  # bfloat16, not mixed
    assert memory_of(fsdp2, in_half, 4).training["communication"] == 2 * (2 + 3) + 2 * 3
