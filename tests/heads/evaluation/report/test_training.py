"""A report shows the run's accuracy where heads lie in a run's folder, and nothing where they do not."""

import json

import pytest

from heads.evaluation.report.training import training_sections

pytest.importorskip("matplotlib")


def write_run(folder, lines):
    (folder / "best").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "best"


def evaluation(step, value):
    heads = {f"eval_head{k}_{metric}": value / k for k in (1, 2) for metric in ("top1", "top5")}
    return {"step": step, "eval_backbone_top1": 0.7, "eval_backbone_top5": 0.9, **heads}


def test_the_run_beside_the_heads_is_drawn(tmp_path):
    heads = write_run(tmp_path / "run", [{"step": 5, "loss": 1.0}, evaluation(10, 0.2), evaluation(20, 0.46)])
    (section,) = training_sections(heads)
    assert "2 evaluations" in section.text
    assert "step 20" in section.text
    (picture,) = section.pictures
    assert "head 2  23%" in picture.svg
    assert "backbone  70%" in picture.svg
    assert training_sections(tmp_path / "run") == [section]  # heads that were moved beside the file


@pytest.mark.parametrize("lines", [None, [], [{"step": 5, "loss": 1.0}]])
def test_without_evaluations_there_is_no_section(tmp_path, lines):
    heads = tmp_path / "heads"
    heads.mkdir()
    if lines is not None:
        heads = write_run(tmp_path / "run", lines)
    assert training_sections(heads) == []
