"""Checkpoints that were written before: they load, and their runs go on as they did.

Or a sentence says which commit reads them.
"""

import importlib
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
IMPORT = {"lamb": "lab.ideas.lamb", "muon": "lab.ideas.positions"}  # what is in the lab now
# {kind: what the sentence says}
REFUSED = {"differential": "lab.ideas.differential", "beta": "lab.ideas.positions"}
kinds = parametrize("kind", [kind for kind in BEFORE if kind not in REFUSED])


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


@parametrize("kind", REFUSED)
def test_a_model_that_left(kind):
    with refusal(REFUSED[kind]):
        checkpoint.load(os.path.join(FOLDER, f"{kind}.pt"))


@parametrize(
    "field, value, says",
    [
        ("after", "none", None),
        ("after", "gate", "has after='gate', .*: train again with --import=lab.ideas.after"),
        (
            "gone",
            False,
            "has gone=False, which GPTConfig does not have: use the code that has made",
        ),
    ],
)
def test_fields_that_left(tmp_path, field, value, says):
    path = str(tmp_path / "ckpt.pt")
    fields = {"n_head": 2, field: value}
    checkpoint.save(path, {"tokenizer": {}, "model": {}, "model_args": fields})
    if says is None:
        assert checkpoint.load(path)["model_args"] == {"n_head": 2}
    else:
        with refusal(says):
            checkpoint.load(path)


@parametrize(
    "heads, n_head, is_read",
    [
        ("SL", 4, False),
        ("SSSL", 6, False),
        ("L/LS", 4, False),
        ("SSSL", 4, True),
        ("L/S", 4, True),
    ],
)
def test_short_heads_came_in_any_place(heads, n_head, is_read):
    """Since version 3 they come first in each layer."""
    fields = {"vocab_size": 5, "n_layer": 2, "n_head": n_head, "n_embd": 12, "heads": heads}
    weights = GPT(GPTConfig(**fields)).state_dict()
    state = {"path": "ckpt.pt", "model_args": fields, "model": weights}
    checkpoint.model_of(state)
    state["version"] = 2
    if is_read:
        checkpoint.model_of(state)
    else:
        with refusal(f"ckpt.pt has heads={heads}; now short heads come first. 14831a9 is the last"):
            checkpoint.model_of(state)
