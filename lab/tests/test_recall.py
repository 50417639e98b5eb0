"""recall.py: its three tasks have the right answers, and its runs are not repeated."""

import itertools

import torch
from harness import done, parametrize
from torch.nn import functional as F

from lab.experiments import recall

GROUP = [*itertools.permutations(range(3))]


def drawn(task, n):
    """(tokens, targets) of 64 sequences of size n."""
    return recall.batch(task, n, 64, torch.Generator().manual_seed(n))


def solved(task, x, n):
    """The answers, read from the tokens alone."""
    if task == "pairs":
        keys = x[: 2 * n : 2]
        values = x[1 : 2 * n : 2]
        value = dict(zip(keys, values, strict=True))
        asked = x[2 * n :]
        assert len(value) == n == len(set(asked))
        assert max(keys) < 128 <= min(values)
        return [value[key] for key in asked]
    if task == "copying":
        assert x[n:] == [0, *x[: n - 1]]
        return x[:n]
    if task == "products":
        states = itertools.accumulate((GROUP[i] for i in x), lambda a, b: tuple(a[i] for i in b))
        return [GROUP.index(state) for state in states]
    assert x.count(0) == 2
    assert x[-1] == 0
    return [x[x.index(0) + 1]]


@parametrize("task", recall.TASKS)
@parametrize("n", [2, 8, 64])
def test_targets_are_the_answers_and_the_rest_has_none(task, n):
    x, y = drawn(task, n)
    for tokens, targets in zip(x.tolist(), y.tolist(), strict=True):
        answers = solved(task, tokens, n)
        assert targets == [-1] * (len(tokens) - len(answers)) + answers


def test_accuracy_counts_the_answers_alone():
    """Perfect logits have 1, and logits that are right elsewhere have 0."""
    _, y = drawn("pairs", 32)
    right = F.one_hot(y.clamp(min=0), 256).float()
    assert recall.accuracy(right, y) == 1
    wrong_where_asked = torch.where((y != -1)[..., None], -right, right)
    assert recall.accuracy(wrong_where_asked, y) == 0


def test_runs_are_made_once_and_drawn(run, tmp_path):
    out = tmp_path / "r.json"
    picture = tmp_path / "r.png"
    flags = [f"--out={out}", f"--picture={picture}"]
    flags.append("--only=softmax; softmax short, beta_squared long, conv")
    printed = done(run("lab.experiments.recall", *flags, "--scale=tiny"))
    assert printed.count(', seed 1: {"rate": ') == printed.count('"steps": 3') == 2 * 2 * 3
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert out.read_text().count(', tiny": {') == 3  # runs of another scale stand elsewhere
    again = run("lab.experiments.recall", *flags, "--scale=tiny", "--seeds=2")[1]
    assert "seed 1:" not in again
    assert again.count(', seed 2: {"rate": ') == again.count("| 3, 3 |") == 2 * 3
