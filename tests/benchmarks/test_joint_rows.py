"""The four rows of joint training are runs that can start, and differ in what they name."""

from benchmarks.paper.joint_training import VARIANTS, build_parser, shortened


def test_every_row_is_a_run_that_can_start():
    options = build_parser().parse_args(["--steps", "2"])
    configs = {name: variant(shortened(options)) for name, variant in VARIANTS.items()}
    for config in configs.values():
        config.check()
    trained = [
        (c.rates.base is not None, c.warm_in.steps > 0, c.self_distillation.weight > 0) for c in configs.values()
    ]
    assert trained == [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
