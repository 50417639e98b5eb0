"""Saves a run's state and loads it again, opens its model, and decides which of its checkpoints are kept.

A checkpoint is a dict of tensors and plain Python values under nanoGPT's keys (model, optimizer, model_args, iter_num,
best_val_loss, config) and some more. It is a file in torch.save's format, ckpt.pt; an FSDP run writes a folder
(sharded.py).
"""

import os
import re
import shutil
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

import torch

from errors import UserError, first_line
from model import GPT, GPTConfig
from text import dataset, tokenizers
from text.files import written_aside
from training import distributed
from training.sharded import check_shards, put, read_tensors, save_sharded
from training.state import check_finite, mapped, snapshot, writing

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"  # files in a run's folder; an FSDP run's checkpoints have no .pt
BOARD = "tensorboard"  # a folder in a run's folder
FOLDER = 16  # the attribute that marks a zip entry as a folder: PyTorch trusts it, and no checksum covers it
KEYS = ("model", "model_args", "iter_num", "best_val_loss", "config")
VERSION = 1  # of the format; nanoGPT's files have none


def save(path: str, state: dict, before: Callable = lambda: None) -> None:
    """Writes the state beside path and to the disk, calls before() and renames it: a crash leaves the old file whole.

    Raises UserError for weights that are not finite and OSError if the disk fails, and leaves no partial file.
    """
    check_finite(path, state)
    with writing(path, state), written_aside(path) as f:
        torch.save(state, f)
        f.flush()  # a full disk is noticed here
        before()


def load(path: str, verify: bool = True, lazily: bool = False) -> dict:
    """The checkpoint at path, on the CPU. Raises UserError for a missing, damaged or foreign file.

    verify: compare the checksums. lazily: read a tensor when it is used; until then the file must not change.
    """
    state = _opened(path, verify, lazily)
    if os.path.isdir(path):
        weights = read_tensors(path, "model/", {})  # optimizer_states reads the optimizers' tensors
        state |= mapped(lambda name, _: weights.get(state["aliases"].get(name, name)), {"model": state["model"]})
    if "tokenizer" not in state:  # nanoGPT's own: names of a compiled model, buffers for masks, the exact GELU
        weights = {name.removeprefix("_orig_mod."): x for name, x in state["model"].items()}
        state["model"] = {name: x for name, x in weights.items() if not name.endswith(".attn.bias")}
        state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
        state["best_val_loss"] = float(state["best_val_loss"])
    return state


def _opened(path: str, verify: bool, lazily: bool) -> dict:
    """The checked checkpoint at path, unpickled with `weights_only=True`; a folder's tensors are None."""
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        others = [os.path.join(folder, name) for name in names(folder)]
        hint = f"there is {', '.join(others)}" if others else "train first, or name the folder of a run with --out_dir="
        raise UserError(f"there is no checkpoint {path}; {hint}")
    file = os.path.join(path, "run.pt") if os.path.isdir(path) else path
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() if verify else None  # torch.load does not compare checksums
            damaged = damaged or next((x.filename for x in archive.infolist() if x.external_attr & FOLDER), None)
        state = None if damaged else torch.load(file, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # unpickling a damaged file can raise any error
        raise UserError(f"{path} is damaged or no checkpoint: {first_line(error)}") from None
    if damaged:
        raise UserError(f"{path} is damaged: its record {damaged} does not match its checksum")
    if not isinstance(state, dict) or any(key not in state for key in KEYS) or not isinstance(state["iter_num"], int):
        raise UserError(f"{path} is not a checkpoint of train.py: it needs the entries {', '.join(KEYS)}")
    if state.get("version", VERSION) != VERSION:
        raise UserError(f"{path} has version {state['version']} of the format; this train.py knows version {VERSION}")
    if os.path.isdir(path):
        check_shards(path, state, verify)
    return state


def optimizer_states(path: str, state: dict, optimizers: list) -> list[dict]:
    """The optimizers' state dicts, in memory, from the checkpoint at path. state: what `load` returned for it."""
    saved = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]  # nanoGPT has one
    parameters = {}  # {"optimizer/0/state/3": the parameter whose state this is}
    for i, optimizer in enumerate(optimizers):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        parameters |= {f"optimizer/{i}/state/{j}": p for j, p in enumerate(held)}
    found = read_tensors(path, "optimizer/", parameters) if os.path.isdir(path) else {}

    def in_memory(name: str, x: object) -> object:
        """A copy of x: on its parameter's device and sharded as the parameter is, if it has the parameter's shape."""
        if not isinstance(x, torch.Tensor):
            return found.get(name, x)
        p = parameters.get(os.path.dirname(name))
        return distributed.like(x, p) if p is not None and p.shape == x.shape else x.clone()

    return mapped(in_memory, {"optimizer": saved})["optimizer"]


def open_model(init_from: str, out_dir: str, which: str) -> tuple[GPT, tokenizers.Tokenizer, dict, str]:
    """(model, tokenizer, settings of its run, a line about it), of out_dir's checkpoint or of pretrained weights."""
    if names(init_from):  # the folder of a run
        init_from, out_dir = "resume", init_from
    if init_from != "resume":  # the name of pretrained weights, which have no run
        model = GPT.from_pretrained(init_from)
        return model, tokenizers.pretrained_tokenizer(init_from, model.config.vocab_size), {}, init_from
    path = path_of(out_dir, which)
    state = load(path, lazily=True)  # only the weights are used
    about = f"{path}: step {state['iter_num']}, best validation loss {state['best_val_loss']:.4f}"
    return model_of(state), tokenizer_of(state), state["config"], about


def model_of(state: dict, **overrides: object) -> GPT:
    """The model of a checkpoint that load has read. overrides: fields of GPTConfig to change."""
    if unknown := set(state["model_args"]) - set(GPTConfig.__dataclass_fields__):
        raise UserError(f"the checkpoint's model has fields unknown here: {', '.join(sorted(unknown))}")
    model = GPT(GPTConfig(**state["model_args"] | overrides))
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:  # PyTorch's, for other names or shapes
        raise UserError(f"the checkpoint's weights do not fit its model: {str(error).splitlines()[-1]}") from None
    return model


def tokenizer_of(state: dict) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint. nanoGPT's checkpoints name none: then it is their data set's, or GPT-2's."""
    if "tokenizer" in state:
        return tokenizers.tokenizer(state["tokenizer"])
    vocab_size = state["model_args"]["vocab_size"]
    try:
        meta = dataset.read_meta(dataset.folder_of(state["config"].get("dataset", "")))
    except UserError:  # the data set is not here
        meta = {"vocab_size": None}
    if meta["vocab_size"] == vocab_size:
        return tokenizers.tokenizer(meta["tokenizer"])
    if vocab_size < tokenizers.GPT2_VOCAB_SIZE:
        raise UserError("this checkpoint names no tokenizer: prepare its data set in data/, which holds the tokenizer")
    return tokenizers.GPT2Tokenizer()


# -----------------------------------------------------------------------------
# the checkpoints of a run


def names(folder: str) -> list[str]:
    """The checkpoints in a run's folder: the latest, older ones (ckpt-00000500.pt), the best."""
    found = os.listdir(folder) if os.path.isdir(folder) else []
    older = sorted((name for name in found if re.fullmatch(r"ckpt-\d+(\.pt)?", name)), reverse=True)
    return [name for name in (LATEST, "ckpt", *older, BEST, "best") if name in found]


def newest(folder: str) -> tuple[str, list, list[str]]:
    """(path, its torchruns, why newer ones were skipped) of the newest intact checkpoint. Raises UserError for none."""

    def step(path: str) -> float:
        try:
            return _opened(path, verify=False, lazily=True)["iter_num"]
        except UserError:
            return float("inf")  # it comes first, so that the reason is noted

    skipped = []
    paths = [os.path.join(folder, name) for name in names(folder) or [LATEST]]
    for path in sorted(paths, key=step, reverse=True):
        try:
            return path, _opened(path, verify=True, lazily=True).get("launch", []), skipped
        except UserError as error:
            skipped.append(str(error))
    raise UserError(skipped[0] if len(skipped) == 1 else f"{folder} holds no intact checkpoint: {'; '.join(skipped)}")


@dataclass
class Keeper:
    """Writes a run's checkpoints to a folder: the latest, the best, and the keep - 1 before the latest.

    A checkpoint replaces another one only when it is complete, on the disk, and its weights are finite.
    """

    folder: str
    keep: int
    background: bool  # training goes on while a copy of the state is written; a kill loses that copy
    sharded: bool  # every process must call save; otherwise the first process does the work
    error: Exception | None = None  # of the last save
    step: int | None = None  # of the latest checkpoint, if it is intact
    _writing: Future | None = None  # in the background

    def save(self, state: dict, latest: bool = True, best: bool = False) -> Exception | None:
        """Writes the state as the latest checkpoint, the best, or both. Returns its UserError or OSError, or None.

        With `background` it returns the error of the save before, and a bug is raised by the next save or wait.
        """
        self.wait()
        before = self.error
        if self.background and distributed.master and not self.sharded:
            self._writing = ThreadPoolExecutor(1).submit(self._write, snapshot(state), latest, best)
            return before
        if self.sharded or distributed.master:
            self._write(state, latest, best)
        return self.error

    def wait(self) -> None:
        """Waits until the save in the background has finished."""
        if self._writing is not None:
            self._writing.result()

    def _write(self, state: dict, latest: bool, best: bool) -> None:
        self.error = None
        write, suffix = (save_sharded, "") if self.sharded else (save, ".pt")
        path = os.path.join(self.folder, ("ckpt" if latest else "best") + suffix)
        try:
            write(path, state, lambda: latest and self._step_aside(path))
            if latest:
                self.step = state["iter_num"]
            if best and latest and distributed.master:
                _link(path, os.path.join(self.folder, "best" + suffix))
            if distributed.master:
                self._prune(latest, best)
        except (UserError, OSError) as error:
            self.error = error

    def _step_aside(self, path: str) -> None:
        """Names the latest checkpoint after its step, before the next one takes its place."""
        if self.step is None or not os.path.exists(path) or (self.keep == 1 and not os.path.isdir(path)):
            return
        older = f"-{self.step:08d}".join(os.path.splitext(path))  # ckpt-00000500.pt
        if os.path.isdir(path):
            remove(older)
            os.rename(path, older)
        elif not os.path.exists(older):
            _link(path, older)

    def _prune(self, latest: bool, best: bool) -> None:
        """Deletes all but the keep - 1 checkpoints before the latest, and the other form (file, folder) of new ones."""
        for stem in [stem for stem, written in (("ckpt", latest), ("best", best)) if written]:
            remove(os.path.join(self.folder, stem + (".pt" if self.sharded else "")))
        steps = {name: int(re.search(r"\d+", name)[0]) for name in names(self.folder) if "-" in name}
        # later steps than the latest go too: their checkpoints were skipped as damaged, or their run was given up
        older = sorted((step for step in steps.values() if self.step is None or step < self.step), reverse=True)
        for name in [name for name, step in steps.items() if step not in older[: self.keep - 1]]:
            remove(os.path.join(self.folder, name))


def remove(path: str) -> None:
    """Deletes a checkpoint, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def tidy(folder: str) -> None:
    """Deletes files that a killed run has left half written, and restores those that it was about to replace."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if re.fullmatch(r"(ckpt|best)(-\d+)?(\.pt)?\.(tmp|old)", name):
            if name.endswith(".old") and not os.path.exists(path[:-4]):
                os.rename(path, path[:-4])
            remove(path)


def _link(path: str, other: str) -> None:
    """Makes other the same checkpoint as path, by hard links if the file system has them, else as a copy."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            with open(source, "rb") as f, written_aside(target) as copy:
                shutil.copyfileobj(f, copy)

    aside = other + ".tmp"
    remove(aside)
    if os.path.isdir(path):
        shutil.copytree(path, aside, copy_function=link)
    else:
        link(path, aside)
    put(aside, other)


def path_of(out_dir: str, which: str) -> str:
    """The path of a run's "latest" or "best" checkpoint; if there is no best one, the latest."""
    order = (BEST, "best", LATEST, "ckpt") if which == "best" else (LATEST, "ckpt")
    return os.path.join(out_dir, next((name for name in order if name in names(out_dir)), LATEST))


def set_aside(out_dir: str) -> None:
    """Moves a run that is already in out_dir to out_dir/previous, and says so. What was in previous is deleted."""
    if not names(out_dir):  # no run to keep: if a run died before its first checkpoint, its log is overwritten
        return
    files = [name for name in (*names(out_dir), LOG, BOARD) if os.path.exists(os.path.join(out_dir, name))]
    previous = os.path.join(out_dir, "previous")
    replaced = ", in the place of an older run" if os.path.exists(previous) else ""
    shutil.rmtree(previous, ignore_errors=True)
    os.makedirs(previous)
    for name in files:
        os.replace(os.path.join(out_dir, name), os.path.join(previous, name))
    print(f"{out_dir} held a run: moved {', '.join(files)} to {previous}{replaced}")


def claim(log: IO) -> None:
    """Locks a run's open log until this process ends. Raises UserError if another one trains into the same folder."""
    try:
        import fcntl

        fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        folder = os.path.dirname(log.name)
        raise UserError(f"another process is training into {folder}: stop it, or take another --out_dir=") from None
    except (ImportError, OSError):  # Windows and some file systems have no such locks
        pass
