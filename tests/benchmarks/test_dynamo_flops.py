"""FLOPs per token with the prompt's pass and without it, which leaves out the tokens that this pass emits too."""

import io

import pytest
import torch
from rich.console import Console

from benchmarks.paper.dynamo_flops import count, main, table
from heads.evaluation.methods import Method, Outcome

PROMPTS = [torch.ones(1, 10), torch.ones(1, 10), torch.ones(1, 10)]


def method(per_pass, length):
    """2,000 operations for the prompt, which gives the first tokens, and 200 for each later pass."""

    def run(prompt_1T):
        passes = -(-length // per_pass)
        matrix = torch.ones(10, 10)
        _ = matrix @ matrix
        for _ in range(passes - 1):
            _ = prompt_1T @ matrix
        return Outcome(tokens=[0] * length, passes=passes)

    return Method(name=f"{per_pass} a pass", run=run)


def counted(per_pass):
    return count([method(per_pass, length) for length in (1, 2, 3, 9)], PROMPTS)


def test_the_first_pass_s_operations_and_tokens_are_left_out():
    three = counted(3)
    assert three.whole == ([2400] * 3, [9] * 3)
    assert three.later == ([400] * 3, [6] * 3)
    assert counted(1).later == ([1600] * 3, [8] * 3)


def test_ratios_without_the_prompt_s_pass_are_those_of_later_tokens():
    console = Console(file=io.StringIO(), width=200)
    console.print(table([counted(1), counted(3)], "title"))
    (row,) = [line.split() for line in console.file.getvalue().splitlines() if "3 a pass" in line]
    assert row[3:] == ["0.0", "0.33", "(0.33–0.33)", "0.0", "0.67", "(0.67–0.67)", "3.00"]


def test_texts_that_the_first_pass_may_emit_alone_are_refused():
    with pytest.raises(ValueError, match="--new-tokens 3 was given; the first pass may emit 3 tokens"):
        main(["--new-tokens", "3"])
