"""Checkpoints written before the project's files were rearranged: they load, and their runs go on as they did."""

import json
import os
import shutil

import pytest
import torch
from harness import ROOT

from model import GPT, GPTConfig
from training import checkpoint

FOLDER = os.path.join(ROOT, "tests", "before")
BEFORE = json.load(open(os.path.join(FOLDER, "before.json"), encoding="utf-8"))
kinds = pytest.mark.parametrize("kind", BEFORE)


@kinds
def test_names_order_and_first_weights(kind):
    """AdamW's state goes by the order of parameters, and first weights are drawn in the order of modules."""
    saved = checkpoint.load(os.path.join(FOLDER, f"{kind}.pt"))
    torch.manual_seed(7)
    gpt, before = GPT(GPTConfig(**saved["model_args"])), BEFORE[kind]
    assert [name for name, _ in gpt.named_parameters()] == before["parameters"]
    assert list(gpt.state_dict()) == before["state_dict"]
    for name, p in gpt.named_parameters():
        assert p.double().sum().item() == pytest.approx(before["initial"][name], rel=1e-6, abs=1e-6), name


def test_version_1(tmp_path):
    """It has sqrt(D) g in the place of g (D is 4 here), and a temperature per dimension came before RoPE."""
    path, name = os.path.join(FOLDER, "differential.pt"), "transformer.h.0.attn.q_norm.scale"
    state, saved = checkpoint.load(path), torch.load(path, weights_only=True)
    assert state["model"][name] == saved["model"][name] / 2
    new = str(tmp_path / "new.pt")
    checkpoint.save(new, state)
    assert checkpoint.load(new)["model"][name] == state["model"][name]  # version 2
    checkpoint.save(new, saved | {"model_args": saved["model_args"] | {"position": "rope"}})
    with pytest.raises(ValueError, match="has per_dim_temperature before RoPE"):
        checkpoint.load(new)


@kinds
def test_a_run_goes_on(kind, run, data, tmp_path):
    os.makedirs(tmp_path / "out")
    shutil.copy(os.path.join(FOLDER, f"{kind}.pt"), tmp_path / "out" / "ckpt.pt")
    flags = (f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", "--device=cpu")
    code, _, err = run("train.py", "--init_from=resume", *flags, "--max_iters=8", "--eval_interval=4")
    rows = [json.loads(line) for line in open(tmp_path / "out" / "log.jsonl")]
    assert code == 0, err
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(BEFORE[kind]["losses"], rel=1e-6)
    assert [row["val_loss"] for row in rows if "val_loss" in row][-1] == pytest.approx(
        BEFORE[kind]["val_loss"], rel=1e-6
    )
