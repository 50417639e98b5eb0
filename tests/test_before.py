"""Checkpoints of version 1 and of earlier files: they load, and their runs go on as they did."""

import json
import os
import shutil

import pytest
import torch
from harness import ROOT, done, log_of, parametrize, refusal

from model import GPT, GPTConfig
from training import checkpoint

FOLDER = os.path.join(ROOT, "tests", "before")
BEFORE = json.load(open(os.path.join(FOLDER, "before.json"), encoding="utf-8"))
kinds = parametrize("kind", BEFORE)


@kinds
def test_names_order_and_first_weights(kind):
    """AdamW's state goes by the order of parameters, first weights by the order of modules."""
    saved = checkpoint.load(os.path.join(FOLDER, f"{kind}.pt"))
    before = BEFORE[kind]
    torch.manual_seed(7)
    gpt = GPT(GPTConfig(**saved["model_args"]))
    sums = {name: p.double().sum().item() for name, p in gpt.named_parameters()}
    assert list(sums) == before["parameters"]
    assert list(gpt.state_dict()) == before["state_dict"]
    assert sums == pytest.approx(before["initial"], rel=1e-6, abs=1e-6)


def test_version_1(tmp_path):
    """It has sqrt(D) g for g (D is 4 here), and a temperature per dimension came before RoPE."""
    path = os.path.join(FOLDER, "differential.pt")
    name = "transformer.h.0.attn.q_norm.scale"
    state = checkpoint.load(path)
    saved = torch.load(path, weights_only=True)
    assert state["model"][name] == saved["model"][name] / 2
    new = str(tmp_path / "new.pt")
    checkpoint.save(new, state)
    assert checkpoint.load(new)["model"][name] == state["model"][name]  # version 2
    saved["model_args"]["position"] = "rope"
    checkpoint.save(new, saved)
    with refusal("has per_dim_temperature before RoPE"):
        checkpoint.load(new)


@kinds
def test_a_run_goes_on(kind, run, data, tmp_path):
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    shutil.copy(os.path.join(FOLDER, f"{kind}.pt"), out_dir / "ckpt.pt")
    flags = f"--dataset={data} --out_dir={out_dir} --device=cpu --init_from=resume --max_iters=8"
    if kind == "lamb":
        flags += " --import=lab.lamb"
    done(run("train.py", *flags.split(), "--eval_interval=4"))
    rows = log_of(tmp_path)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == pytest.approx(BEFORE[kind]["losses"], rel=1e-6)
    assert rows[-1]["val_loss"] == pytest.approx(BEFORE[kind]["val_loss"], rel=1e-6)
