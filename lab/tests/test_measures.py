"""lab/experiments/gpu_training.py and local_dependencies.py, in small."""

import json
import os
import runpy

import pytest
import torch
from harness import ROOT

from attention.scores import visible


def test_training_on_a_gpu(run, tmp_path):
    """Other ways to compute the loss give the same loss."""
    small = ("--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=24", "--vocab_size=97", "--batch_size=2")
    same = "plain,no wait,flash,triton,logits in bfloat16,chunks"
    args = (
        "--device=cpu",
        "--dtype=float32",
        "--no-compile",
        "--steps=6",
        "--chunks=3",
        f"--out={tmp_path / 't.json'}",
    )
    code, out, err = run("lab/experiments/gpu_training.py", *small, *args, f"--only={same},beta")
    assert code == 0, err
    results = json.loads((tmp_path / "t.json").read_text())
    losses = [results[name]["loss"] for name in same.split(",")]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5) and 3 < losses[0] < 5
    assert abs(results["beta"]["loss"] - losses[0]) > 1e-6 and results["plain"]["tokens_per_s"] > 0
    code, _, err = run("lab/experiments/gpu_training.py", *small, *args, "--only=plan")
    assert code == 2 and "'plan' is not one of plain" in err


def test_short_scores_are_the_long_ones_of_a_window(run, tmp_path):
    task = runpy.run_path(os.path.join(ROOT, "lab", "experiments", "local_dependencies.py"))
    q, k = torch.randn(2, 12, 5)
    short, long = task["short_scores"](q, k, 4).softmax(-1), task["long_scores"](q, k)
    long = long.masked_fill(~visible(q, k, 4), -torch.inf).softmax(-1)
    for block in range(3):
        rows = slice(4 * block, 4 * block + 4)
        before = long[rows, max(0, 4 * block - 4) : 4 * block + 4]
        assert torch.allclose(short[block, :, -before.shape[1] :], before)
        assert short[block].sum(-1).allclose(torch.ones(4))
    p = task["target"](40, 4)
    distance = torch.arange(40)[:, None] - torch.arange(40)
    assert not p[(distance < 1) | (distance > 4)].any() and (p[8:].count_nonzero(-1) < 5).all()
    assert p.sum(-1)[p.any(-1)].allclose(torch.ones(()))
    sizes = ("--n=40", "--d=4", "--band=4", "--span=4", "--steps=300", "--rows=2", "--learning_rates=1e-1")
    code, out, _ = run("lab/experiments/local_dependencies.py", *sizes, "--device=cpu", f"--out={tmp_path / 'l.json'}")
    results = json.loads((tmp_path / "l.json").read_text())
    first, last = (results["short 0.1"][i]["missed"] for i in (0, -1))
    assert code == 0 and last < 0.2 * first and "| short | 0.1 |" in out
    code, _, err = run("lab/experiments/local_dependencies.py", "--n=41", "--span=4", "--band=4")
    assert code == 2 and "a multiple of span=4" in err
