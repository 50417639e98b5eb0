"""Checkpoints that were written before: they load, and their runs go on as they did."""

import importlib
import json
import os
import shutil

import pytest
import torch
from harness import ROOT, done, log_of, parametrize

from model import GPT, GPTConfig
from training import checkpoint

FOLDER = os.path.join(ROOT, "tests", "before")
BEFORE = json.load(open(os.path.join(FOLDER, "before.json"), encoding="utf-8"))
IMPORT = {"lamb": "lab.ideas.lamb", "beta": "lab.ideas.positions"}  # what is in the lab now
kinds = parametrize("kind", BEFORE)


@kinds
def test_names_order_and_first_weights(kind):
    """AdamW's state goes by the order of parameters, first weights by the order of modules."""
    saved = checkpoint.load(os.path.join(FOLDER, f"{kind}.pt"))
    before = BEFORE[kind]
    if kind in IMPORT:
        importlib.import_module(IMPORT[kind])
    torch.manual_seed(7)
    gpt = GPT(GPTConfig(**saved["model_args"]))
    sums = {name: p.double().sum().item() for name, p in gpt.named_parameters()}
    assert list(sums) == before["parameters"]
    assert list(gpt.state_dict()) == before["state_dict"]
    assert sums == pytest.approx(before["initial"], rel=1e-6, abs=1e-6)


@kinds
def test_a_run_goes_on(kind, run, data, tmp_path):
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    shutil.copy(os.path.join(FOLDER, f"{kind}.pt"), out_dir / "ckpt.pt")
    flags = f"--dataset={data} --out_dir={out_dir} --device=cpu --init_from=resume --max_iters=8"
    if kind in IMPORT:
        flags += f" --import={IMPORT[kind]}"
    done(run("train.py", *flags.split(), "--eval_interval=4"))
    rows = log_of(tmp_path)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses == pytest.approx(BEFORE[kind]["losses"], rel=1e-6)
    assert rows[-1]["val_loss"] == pytest.approx(BEFORE[kind]["val_loss"], rel=1e-6)
