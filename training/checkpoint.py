"""Saves a run's state and loads it again, and decides which of a run's checkpoints are kept.

A checkpoint is a dict of tensors and plain Python values under nanoGPT's keys (model, optimizer, model_args, iter_num,
best_val_loss, config) and some more: a file in torch.save's format, ckpt.pt, or for an FSDP run a folder, ckpt (see
sharded.py). nanoGPT's own ckpt.pt can be loaded as well.
"""

import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

import torch

from configurator import UserError
from text.files import written_aside
from training import distributed
from training.sharded import check_shards, put, read_tensors, save_sharded
from training.state import check_finite, mapped, read, snapshot, writing

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"
SHARDED = {LATEST: "ckpt", BEST: "best"}  # the folders of an FSDP run
KEYS = ("model", "model_args", "iter_num", "best_val_loss", "config")
VERSION = 1  # of the format; nanoGPT's files have none


def save(path: str, state: dict, before: Callable = lambda: None) -> None:
    """Writes the state beside path, flushes it to the disk and renames it to path: a crash leaves the old file whole.

    before() is called when all is written, before the renaming.
    Raises UserError for weights that are not finite and OSError if the disk fails; then nothing is left behind.
    """
    check_finite(path, state)
    with writing(path, state), written_aside(path) as f:
        torch.save(state, f)
        f.flush()  # a full disk is noticed here
        before()


def load(path: str, verify: bool = True, lazily: bool = False) -> dict:
    """The checkpoint at path, on the CPU, its weights under the names that GPT gives them.

    Of a folder, the optimizers' tensors are left out: optimizer_states reads them. verify: compare the checksums.
    lazily: read each tensor from the disk when it is used; until then the file must not change.
    Raises UserError, with a sentence that says why, for a missing, damaged or foreign file.
    """
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        others = [os.path.join(folder, name) for name in names(folder)]
        hint = f"there is {', '.join(others)}" if others else "train first, or name its folder with --out_dir="
        raise UserError(f"there is no checkpoint {path}; {hint}")
    state = _opened(path, verify, lazily)
    if os.path.isdir(path):
        weights = read_tensors(path, "model/")
        weights |= {alias: weights[name] for alias, name in state["aliases"].items()}
        state["model"] = {name.removeprefix("model/"): x for name, x in weights.items()}
    if "tokenizer" not in state:  # nanoGPT's own: names of a compiled model, buffers for masks, the exact GELU
        weights = {name.removeprefix("_orig_mod."): x for name, x in state["model"].items()}
        state["model"] = {name: x for name, x in weights.items() if not name.endswith(".attn.bias")}
        state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
        state["best_val_loss"] = float(state["best_val_loss"])
    return state


def _opened(path: str, verify: bool, lazily: bool) -> dict:
    """The checked checkpoint at path; a folder's tensors are None."""
    folder = os.path.isdir(path)
    state = read(os.path.join(path, "run.pt") if folder else path, path, verify, lazily)
    if not isinstance(state, dict) or any(key not in state for key in KEYS) or not isinstance(state["iter_num"], int):
        raise UserError(f"{path} is not a checkpoint of train.py: it needs the entries {', '.join(KEYS)}")
    if state.get("version", VERSION) != VERSION:
        raise UserError(f"{path} has version {state['version']} of the format; this train.py knows version {VERSION}")
    if folder:
        for key in ("shards", "aliases"):
            if not isinstance(state.get(key), dict):
                raise UserError(f"{path} is not a checkpoint of train.py: its run.pt has no {key}")
        check_shards(path, state["shards"], verify)
    return state


def optimizer_states(path: str, state: dict, optimizers: list) -> list[dict]:
    """The state dicts, in memory, of the optimizers in the checkpoint at path, which was loaded as state.

    A tensor that has its parameter's shape lies on the parameter's device and is sharded as the parameter is.
    """
    saved = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]  # nanoGPT has one
    parameters = {}  # {"optimizer/0/state/3": the parameter that this is the state of}
    for i, optimizer in enumerate(optimizers):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        parameters |= {f"optimizer/{i}/state/{j}": p for j, p in enumerate(held)}
    found = read_tensors(path, "optimizer/", parameters) if os.path.isdir(path) else {}

    def in_memory(name: str, x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return found.get(name, x)
        p = parameters.get(os.path.dirname(name))
        return distributed.like(x, p) if p is not None and p.shape == x.shape else x.clone()

    return mapped(in_memory, {"optimizer": saved})["optimizer"]


# -----------------------------------------------------------------------------
# the checkpoints of a run


def names(folder: str) -> list[str]:
    """The checkpoints in a run's folder: the latest, older ones (ckpt-00000500.pt), the best."""
    found = os.listdir(folder) if os.path.isdir(folder) else []
    older = sorted((name for name in found if re.fullmatch(r"ckpt-\d+(\.pt)?", name)), reverse=True)
    return [name for name in (LATEST, "ckpt", *older, BEST, "best") if name in found]


def newest(folder: str) -> tuple[str, list, list[str]]:
    """(path, launch, skipped): a run's newest intact checkpoint, the torchruns that wrote it, and sentences.

    Each sentence says why a newer checkpoint was skipped. Raises UserError if no checkpoint is intact.
    """
    found = []
    skipped = []
    for path in (os.path.join(folder, name) for name in names(folder)):
        try:
            found.append((_opened(path, verify=False, lazily=True)["iter_num"], path))
        except UserError as error:
            skipped.append(str(error))
    for _, path in sorted(found, reverse=True, key=lambda entry: entry[0]):
        try:
            return path, _opened(path, verify=True, lazily=True).get("launch", []), skipped
        except UserError as error:
            skipped.append(str(error))
    if len(skipped) > 1:
        raise UserError(f"{folder} holds no intact checkpoint: " + "; ".join(skipped))
    load(os.path.join(folder, names(folder)[0] if skipped else LATEST))  # raises a UserError that says what is wrong
    raise UserError(f"{folder} changes while it is read")


@dataclass
class Keeper:
    """Writes a run's checkpoints to a folder: the latest, the best, and the keep - 1 before the latest.

    A checkpoint takes the place of another only when it is whole and on the disk. One with weights that are not
    finite is not written.
    """

    folder: str
    keep: int
    background: bool  # training goes on while a copy of the state is written; a kill loses that copy
    sharded: bool  # every process must call save; otherwise the first process does the work
    error: Exception | None = None  # of the last save
    step: int | None = None  # of the latest checkpoint, if it is intact
    _writing: Future | None = None  # in the background

    def save(self, state: dict, latest: bool = True, best: bool = False) -> Exception | None:
        """Writes the state as the latest checkpoint, the best, or both. Returns what went wrong, or None.

        That is a UserError about the state or an OSError of the disk. In the background it is not known yet: then
        save returns what went wrong with the save before. A bug is raised, in the background by the next save or wait.
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
        """Waits until the background has written what it is writing."""
        if self._writing is not None:
            self._writing.result()

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, SHARDED[name] if self.sharded else name)

    def _write(self, state: dict, latest: bool, best: bool) -> None:
        self.error = None
        path = self._path(LATEST if latest else BEST)
        write = save_sharded if self.sharded else save
        try:
            write(path, state, lambda: latest and self._step_aside(path))
            if latest:
                self.step = state["iter_num"]
            if best and latest and distributed.master:
                _link(path, self._path(BEST))
            if distributed.master:
                self._prune(latest, best)
        except (UserError, OSError) as error:
            self.error = error

    def _step_aside(self, path: str) -> None:
        """Names the latest checkpoint after its step, before the next one takes its place."""
        if self.step is None or not os.path.exists(path) or (self.keep == 1 and not os.path.isdir(path)):
            return
        stem, suffix = os.path.splitext(path)
        older = f"{stem}-{self.step:08d}{suffix}"
        if os.path.isdir(path):
            remove(older)
            os.rename(path, older)
        elif not os.path.exists(older):
            _link(path, older)

    def _prune(self, latest: bool, best: bool) -> None:
        """Deletes the other form (file or folder) of what was written, and all but the keep - 1 before the latest.

        Checkpoints of later steps than the latest go too: they were skipped as damaged, or their run was given up.
        """
        for name in [name for name, written in ((LATEST, latest), (BEST, best)) if written]:
            remove(os.path.join(self.folder, name if self.sharded else SHARDED[name]))
        steps = {name: int(re.search(r"\d+", name)[0]) for name in names(self.folder) if "-" in name}
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
    """Deletes what a killed run has left half written, and renames back what it was about to replace."""
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
    paths = [os.path.join(out_dir, name) for name in order]
    return next(filter(os.path.exists, paths), os.path.join(out_dir, LATEST))


def set_aside(out_dir: str) -> None:
    """Moves a run that is already in out_dir to out_dir/previous, and says so. What was in previous is deleted.

    A folder without a checkpoint is no run: the log of a run that died before its first checkpoint is overwritten.
    """
    files = names(out_dir)
    if not files:
        return
    files += [LOG] if os.path.exists(os.path.join(out_dir, LOG)) else []
    previous = os.path.join(out_dir, "previous")
    replaced = ", in the place of the run before it" if os.path.exists(previous) else ""
    shutil.rmtree(previous, ignore_errors=True)
    os.makedirs(previous)
    for name in files:
        os.replace(os.path.join(out_dir, name), os.path.join(previous, name))
    print(f"{out_dir} held a run: moved {', '.join(files)} to {previous}{replaced}")


def claim(log: IO) -> None:
    """Locks a run's open log for this process. The lock ends with the process, however that ends.

    Raises UserError if another process trains into the same folder.
    """
    try:
        import fcntl

        fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        folder = os.path.dirname(log.name)
        raise UserError(f"another process is training into {folder}: stop it, or take another --out_dir=") from None
    except (ImportError, OSError):  # Windows and some file systems have no such locks
        pass
