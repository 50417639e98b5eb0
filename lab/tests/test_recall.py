"""lab/experiments/recall.py: its three tasks have the right answers, and its runs are not repeated."""

import json

import pytest
import torch
from torch.nn import functional as F

from lab.experiments import recall


def drawn(task: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return recall.batch(task, n, 64, torch.Generator().manual_seed(n))


def solved(task: str, x: list[int], n: int) -> list[int]:
    """The answers, read from the tokens alone."""
    if task == "pairs":
        value = dict(zip(x[: 2 * n : 2], x[1 : 2 * n : 2], strict=True))
        assert len(value) == n == len(set(x[2 * n :])) and max(value) < 128 <= min(value.values())
        return [value[key] for key in x[2 * n :]]
    if task == "copying":
        assert x.count(0) == 1 and x[n] == 0 and x[n + 1 :] == x[: n - 1]
        return x[:n]
    assert len(x) == n + 1 and x.count(0) == 2 and x[-1] == 0 and max(x) <= 16
    return [x[x.index(0) + 1]]


@pytest.mark.parametrize("task", ["pairs", "copying", "induction"])
@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_targets_are_the_answers_and_the_rest_has_none(task, n):
    x, y = drawn(task, n)
    assert x.shape == y.shape and x.shape[1] <= recall.TASKS[task][1] * n + 1 and 0 <= x.min() <= x.max() < 256
    for tokens, targets in zip(x.tolist(), y.tolist(), strict=True):
        answers = solved(task, tokens, n)
        assert targets == [-1] * (len(tokens) - len(answers)) + answers
    assert not x[0].equal(x[1])


@pytest.mark.parametrize("task", ["pairs", "copying", "induction"])
def test_accuracy_counts_the_answers_alone(task):
    """A perfect predictor has 1, random logits have 1 / VOCAB, and a predictor that is right elsewhere has 0."""
    x, y = drawn(task, 32)
    accuracy = recall.accuracy
    right = F.one_hot(y.clamp(min=0), 256).float()
    assert accuracy(right, y) == 1.0 and accuracy(-right, y) == 0.0
    wrong_where_asked = torch.where((y != -1)[..., None], -right, right)
    assert accuracy(wrong_where_asked, y) == 0.0
    many = y.repeat(50, 1)
    logits = torch.randn(*many.shape, 256, generator=torch.Generator().manual_seed(0))
    assert accuracy(logits, many) == pytest.approx(1 / 256, abs=0.004)


def test_pairs_differ_in_order_and_values():
    """The order of the questions says nothing, and neither does a key."""
    x, y = drawn("pairs", 8)
    asked_first = (x[:, 16, None] == x[:, :16:2]).int().argmax(-1)
    assert len(asked_first.unique()) == 8
    assert len(y[x == x[0, 0]].unique()) > 2


def test_runs_are_made_once_and_drawn(run, tmp_path):
    files = (f"--out={tmp_path / 'r.json'}", f"--picture={tmp_path / 'r.png'}", "--scale=tiny")
    only = "--only=softmax; softmax short, beta_squared long, conv"
    code, out, err = run("lab.experiments.recall", *files, only)
    assert code == 0 and out.count("; seed 1; 3 steps:") == 2 * 2 * 3, err
    assert "| softmax short, beta_squared long, conv |" in out
    for found in json.loads((tmp_path / "r.json").read_text())["runs"]:
        *_, sizes, larger = recall.TASKS[found["task"]]
        assert [int(n) for n in found["accuracy"]] == sizes + larger and found["model"] in only
        assert all(0 <= value <= 1 for value in found["accuracy"].values())
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    again = run("lab.experiments.recall", *files, only, "--seeds=2")[1]
    assert "seed 1;" not in again and again.count("; seed 2; 3 steps:") == 2 * 3 and again.count("| 3, 3 |") == 2 * 3
    code, _, err = run("lab.experiments.recall", *files[:2], "--scale=small", only)
    assert code == 2 and "results of other settings" in err
