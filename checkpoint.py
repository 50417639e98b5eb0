"""A run's state to disk and back, and a run's files out of the next one's way.

A checkpoint is a dict of tensors and plain Python values in torch.save's zip format, under nanoGPT's keys
(model, optimizer, model_args, iter_num, best_val_loss, config), and nanoGPT's own ckpt.pt loads as well.
Nothing is unpickled but what `weights_only=True` allows.
"""

import glob
import os
import pickle
import shutil
import zipfile

import torch

from dataset import written_aside

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"
KEYS = ("model", "model_args", "iter_num", "best_val_loss", "config")


def save(path: str, state: dict) -> None:
    """Writes state aside, flushes it to the disk and renames it: a crash leaves the old file whole.

    Raises OSError where it cannot be written, with nothing left behind.
    """
    try:
        with written_aside(path) as f:
            torch.save(state, f)
    except (OSError, RuntimeError) as error:  # torch's own for a full disk
        reason = str(error).splitlines()[0]
        raise OSError(f"cannot write {path}: {reason}. Is the disk full? What was there before is untouched") from None


def load(path: str) -> dict:
    """The checkpoint at path, on the CPU, its weights named as GPT names them.

    Raises ValueError, with a sentence that says why, for a missing, damaged or foreign file.
    """
    if not os.path.exists(path):
        others = glob.glob(os.path.join(glob.escape(os.path.dirname(path) or "."), "*.pt"))
        hint = f"there is {', '.join(others)}" if others else "train first, or name its folder with --out_dir="
        raise ValueError(f"there is no checkpoint {path}; {hint}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not check the CRCs
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} is damaged or no checkpoint: {reason}") from None
    if damaged:
        raise ValueError(f"{path} is damaged: its record {damaged} does not have its checksum")
    if not isinstance(state, dict) or any(key not in state for key in KEYS):
        raise ValueError(f"{path} is not a checkpoint of train.py: it needs the entries {', '.join(KEYS)}")
    if "tokenizer" not in state:  # nanoGPT's own: compiled names, mask buffers, the exact GELU
        weights = {key.removeprefix("_orig_mod."): value for key, value in state["model"].items()}
        state["model"] = {key: value for key, value in weights.items() if not key.endswith(".attn.bias")}
        state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
        state["best_val_loss"] = float(state["best_val_loss"])
    return state


def path_of(out_dir: str, which: str) -> str:
    """The path of a run's "latest" or "best" checkpoint; the latest stands in for a best that is not there."""
    best = os.path.join(out_dir, BEST)
    return best if which == "best" and os.path.exists(best) else os.path.join(out_dir, LATEST)


def set_aside(out_dir: str) -> None:
    """Moves a run that is already in out_dir to out_dir/previous, and says so. One generation is kept.

    A run is what left a checkpoint: the log of one that died before its first is simply written over.
    """
    files = [f for f in (LATEST, BEST, LOG) if os.path.exists(os.path.join(out_dir, f))]
    if LATEST in files or BEST in files:
        previous = os.path.join(out_dir, "previous")
        replaced = ", in the place of the run before it" if os.path.exists(previous) else ""
        shutil.rmtree(previous, ignore_errors=True)
        os.makedirs(previous)
        for f in files:
            os.replace(os.path.join(out_dir, f), os.path.join(previous, f))
        print(f"{out_dir} held a run: moved {', '.join(files)} to {previous}{replaced}")
