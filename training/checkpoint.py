"""A run's state to disk and back, and which of its checkpoints are kept.

A checkpoint is a dict of tensors and plain Python values in torch.save's zip format, under nanoGPT's keys
(model, optimizer, model_args, iter_num, best_val_loss, config), and nanoGPT's own ckpt.pt loads as well.
Of a sharded run it is a folder: each process's share in shard-*.safetensors, through torch.distributed.checkpoint,
and all else in run.pt. Nothing is unpickled but what `weights_only=True` allows.
"""

import errno
import glob
import os
import re
import shutil
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable
from typing import IO

import torch

from configurator import UserError, first_line
from text.files import sync_folder, written_aside
from training import distributed

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"
SHARDED = {LATEST: "ckpt", BEST: "best"}  # the names of folders
KEYS = ("model", "model_args", "iter_num", "best_val_loss", "config")
VERSION = 1  # of the format; nanoGPT's files have none
FOLDER = 16  # a zip entry's attribute, which PyTorch believes although no checksum covers it

# -----------------------------------------------------------------------------
# one checkpoint


def mapped(f: Callable, state: object, path: str = "") -> object:
    """A nested dict or list with f(path, leaf) in the place of every leaf, path as in "optimizer/0/state/3/step"."""
    if isinstance(state, dict):
        return {key: mapped(f, value, f"{path}/{key}".lstrip("/")) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(mapped(f, value, f"{path}/{i}") for i, value in enumerate(state))
    return f(path, state)


def tensors(state: object) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a nested state by their paths; and of those that have two paths, the second: the first."""
    found, aliases, seen = {}, {}, {}

    def note(path: str, x: object) -> None:
        if isinstance(x, torch.Tensor):
            local = x.to_local() if hasattr(x, "to_local") else x
            same = (local.data_ptr(), local.shape, local.stride()) if local.numel() else (path,)
            first = seen.setdefault(same, path)
            if first == path:
                found[path] = x
            else:
                aliases[path] = first

    mapped(note, state)
    return found, aliases


def snapshot(state: object) -> object:
    """A copy in the CPU's memory, which training does not change; what was one tensor under two names still is."""
    found, aliases = tensors(state)
    copies = {path: x.detach().to("cpu", copy=True) for path, x in found.items()}
    copies |= {alias: copies[path] for alias, path in aliases.items()}
    return mapped(lambda path, x: copies.get(path, x), state)


def check_finite(path: str, state: dict) -> None:
    """Raises ValueError for a state that is not worth keeping: with a NaN or an infinity among its weights."""
    for name, x in tensors({key: state[key] for key in ("model", "optimizer") if key in state})[0].items():
        x = x.to_local() if hasattr(x, "to_local") else x
        if x.is_floating_point() and not torch.isfinite(x.sum()) and not x.isfinite().all():
            raise UserError(f"{name} holds values that are not finite; {path} was not written")


def save(path: str, state: dict) -> None:
    """Writes state aside, flushes it to the disk and renames it: a crash leaves the old file whole.

    Raises ValueError for weights that are not finite, OSError where it cannot be written, and leaves nothing behind.
    """
    check_finite(path, state)
    try:
        with written_aside(path) as f:
            torch.save(state, f)
    except (OSError, RuntimeError) as error:  # torch's own for a full disk
        raise _unwritten(path, state, error) from None


def _unwritten(path: str, state: dict, error: Exception) -> OSError:
    reason = first_line(error)
    full = (os.strerror(code) for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
    if not any(words in reason for words in (*full, "unexpected pos")):  # the last is torch's own
        return OSError(f"cannot write {path}: {reason}. What was there before is untouched")
    needed = sum(x.numel() * x.element_size() for x in tensors(state)[0].values()) / 2**20
    free = shutil.disk_usage(os.path.dirname(path) or ".").free / 2**20
    return OSError(
        f"cannot write {path}: {reason}. Is the disk full? It needs {needed:,.1f} MiB, and {free:,.1f} MiB are free. "
        f"What was there before is untouched"
    )


def load(path: str, verify: bool = True, lazily: bool = False) -> dict:
    """The checkpoint at path, on the CPU, its weights named as GPT names them.

    Of a sharded one the optimizers' tensors are left out, for optimizer_states. verify: its checksums. lazily:
    tensors are read from the disk where they are used, so the file must stay what it is.
    Raises ValueError, with a sentence that says why, for a missing, damaged or foreign file.
    """
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        others = [os.path.join(folder, name) for name in names(folder)]
        hint = f"there is {', '.join(others)}" if others else "train first, or name its folder with --out_dir="
        raise UserError(f"there is no checkpoint {path}; {hint}")
    state = _opened(path, verify, lazily)
    if os.path.isdir(path):
        read = _read(path, {name: None for name in _entries(path) if name.startswith("model/")})
        read |= {alias: read[name] for alias, name in _entry(state, "aliases", path).items()}
        state["model"] = {name.removeprefix("model/"): x for name, x in read.items()}
    if "tokenizer" not in state:  # nanoGPT's own: compiled names, mask buffers, the exact GELU
        weights = {key.removeprefix("_orig_mod."): value for key, value in state["model"].items()}
        state["model"] = {key: value for key, value in weights.items() if not key.endswith(".attn.bias")}
        state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
        state["best_val_loss"] = float(state["best_val_loss"])
    return state


def _opened(path: str, verify: bool, lazily: bool) -> dict:
    """load, with None for the tensors of a sharded one."""
    if not os.path.isdir(path):
        return _load(path, path, verify, lazily)
    state = _load(os.path.join(path, "run.pt"), path, verify, lazily)
    for name, (size, checksum) in _entry(state, "shards", path).items():
        shard = os.path.join(path, name)
        if not os.path.exists(shard) or os.path.getsize(shard) != size:
            raise UserError(f"{path} is damaged: {name} is missing or does not have its {size:,} bytes")
        if verify and crc32(shard) != checksum:
            raise UserError(f"{path} is damaged: {name} does not have its checksum")
    return state


def _load(path: str, name: str, verify: bool, lazily: bool) -> dict:
    """One of torch.save's files, checked; name: what its user calls it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if verify else None  # torch.load does not check the CRCs
            damaged = damaged or next((x.filename for x in archive.infolist() if x.external_attr & FOLDER), None)
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # a flipped bit may make anything of a pickle
        raise UserError(f"{name} is damaged or no checkpoint: {first_line(error)}") from None
    if damaged:
        raise UserError(f"{name} is damaged: its record {damaged} does not have its checksum")
    if not isinstance(state, dict) or any(key not in state for key in KEYS) or not isinstance(state["iter_num"], int):
        raise UserError(f"{name} is not a checkpoint of train.py: it needs the entries {', '.join(KEYS)}")
    if state.get("version", VERSION) != VERSION:
        raise UserError(f"{name} has version {state['version']} of the format; this train.py knows version {VERSION}")
    return state


def _entry(state: dict, key: str, path: str) -> dict:
    if not isinstance(state.get(key), dict):
        raise UserError(f"{path} is not a checkpoint of train.py: its run.pt has no {key}")
    return state[key]


def crc32(path: str) -> int:
    value = 0
    with open(path, "rb") as f:
        while block := f.read(2**22):
            value = zlib.crc32(block, value)
    return value


# -----------------------------------------------------------------------------
# a sharded one: {"model/transformer.wte.weight": its share, "optimizer/0/state/3/exp_avg": its share, ...}


def save_sharded(path: str, state: dict, before: Callable = lambda: None) -> None:
    """As save, of a state whose tensors are shared out: every process calls it, and writes its own share.

    before: called just before the new folder takes its place, by the master.
    """
    from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageWriter
    from torch.distributed.checkpoint import save as dcp_save

    try:
        check_finite(path, state)
        problem = None
    except ValueError as error:
        problem = str(error)
    problem = next(filter(None, distributed.gathered(problem)), None)
    if problem:
        raise UserError(problem)
    aside = path + ".tmp"
    found, aliases = tensors({key: state[key] for key in ("model", "optimizer")})
    aliases = distributed.gathered(aliases)[0]  # an empty share does not show what it is one of; the master's is not
    found = {name: x for name, x in found.items() if name not in aliases}
    distributed.by_master(lambda: (shutil.rmtree(aside, ignore_errors=True), os.makedirs(aside)))
    try:
        dcp_save(found, storage_writer=HuggingFaceStorageWriter(aside, save_distributed=True))
    except (CheckpointException, OSError, RuntimeError) as error:
        distributed.by_master(lambda: shutil.rmtree(aside, ignore_errors=True))
        raise _unwritten(path, state, RuntimeError(str(error).strip().splitlines()[-1])) from None
    mine = glob.glob(os.path.join(glob.escape(aside), f"shard-{distributed.rank + 1:05d}-*"))
    shards = {os.path.basename(file): (os.path.getsize(file), crc32(file)) for file in mine}
    shards = {name: entry for part in distributed.gathered(shards) for name, entry in part.items()}
    rest = mapped(lambda path, x: None if isinstance(x, torch.Tensor) else x, state) | {"shards": shards}
    rest["aliases"] = aliases

    def publish() -> None:
        try:
            with written_aside(os.path.join(aside, "run.pt")) as f:
                torch.save(rest, f)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise _unwritten(path, state, error) from None
        before()
        _put(aside, path)

    distributed.by_master(publish)


def _put(aside: str, path: str) -> None:
    """Renames what has been written aside to path, a file or a folder."""
    if os.path.isdir(path):
        shutil.rmtree(path + ".old", ignore_errors=True)
        os.rename(path, path + ".old")
    os.replace(aside, path)
    sync_folder(os.path.dirname(path))
    shutil.rmtree(path + ".old", ignore_errors=True)


def _reader(path: str) -> object:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    return HuggingFaceStorageReader(path)


def _entries(path: str) -> dict:
    """The size and the dtype of each tensor of a sharded checkpoint."""
    return _reader(path).read_metadata().state_dict_metadata


def _read(path: str, wanted: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The wanted tensors of a sharded checkpoint, read into the ones given, which may be shares; None: in whole."""
    from torch.distributed.checkpoint import load as dcp_load

    entries = _entries(path)
    for name, x in wanted.items():
        if x is None:
            wanted[name] = torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group takes part
        dcp_load(wanted, storage_reader=_reader(path), no_dist=True)
    return wanted


def optimizer_states(path: str, state: dict, optimizers: list) -> list[dict]:
    """What the checkpoint at path, loaded as state, says of the optimizers: their state dicts, in memory.

    A tensor of a parameter's shape is on its device and shared out as it is, however many processes wrote it.
    """
    saved = state["optimizer"] if isinstance(state["optimizer"], list) else [state["optimizer"]]  # nanoGPT's
    parameters = {
        f"optimizer/{i}/state/{j}": p
        for i, o in enumerate(optimizers)
        for j, p in enumerate(p for group in o.param_groups for p in group["params"])
    }

    def in_memory(name: str, x: object) -> object:
        p = parameters.get(name.rpartition("/")[0])
        if not isinstance(x, torch.Tensor):
            return x
        return distributed.like(x, p) if p is not None and p.shape == x.shape else x.clone()

    if not os.path.isdir(path):
        return mapped(in_memory, {"optimizer": saved})["optimizer"]
    wanted = {}
    for name, entry in _entries(path).items():
        p = parameters.get(name.rpartition("/")[0])
        if name.startswith("optimizer/"):
            alike = p is not None and p.shape == entry.size
            wanted[name] = torch.zeros_like(p, dtype=entry.properties.dtype) if alike else None
    read = _read(path, wanted)
    return mapped(lambda name, x: read.get(name, x), {"optimizer": saved})["optimizer"]


# -----------------------------------------------------------------------------
# those of a run


def names(folder: str) -> list[str]:
    """The checkpoints in a run's folder: the latest, older ones (ckpt-00000500.pt), the best."""
    found = os.listdir(folder) if os.path.isdir(folder) else []
    older = sorted((name for name in found if re.fullmatch(r"ckpt-\d+(\.pt)?", name)), reverse=True)
    return [name for name in (LATEST, "ckpt", *older, BEST, "best") if name in found]


def newest(folder: str) -> tuple[str, list, list[str]]:
    """(path, launch, skipped): the newest intact checkpoint of a run, what it says of who started it, and why newer
    ones are not it, a sentence each. Raises ValueError where there is none.
    """
    found, skipped = [], []
    for path in (os.path.join(folder, name) for name in names(folder)):
        try:
            found.append((_opened(path, verify=False, lazily=True)["iter_num"], path))
        except ValueError as error:
            skipped.append(str(error))
    for _, path in sorted(found, reverse=True, key=lambda entry: entry[0]):
        try:
            return path, _opened(path, verify=True, lazily=True).get("launch", []), skipped
        except ValueError as error:
            skipped.append(str(error))
    if len(skipped) > 1:
        raise UserError(f"{folder} holds no intact checkpoint: " + "; ".join(skipped))
    load(os.path.join(folder, names(folder)[0] if skipped else LATEST))  # which says what is wrong
    raise UserError(f"{folder} changes while it is read")


class Keeper:
    """Writes a run's checkpoints to a folder: the latest, the best, and the keep - 1 ones before the latest.

    None takes another's place before it is whole and flushed to the disk, and one with weights that are not
    finite is not written. background: training goes on while a snapshot of the state is written, which a kill would
    lose. sharded: every process must call save; else the master does the work. error: of the last one.
    """

    def __init__(self, folder: str, keep: int, background: bool, sharded: bool):
        self.folder, self.keep, self.background, self.sharded = folder, keep, background, sharded
        self.error: Exception | None = None
        self.step: int | None = None  # of the checkpoint that is the latest, where it is intact
        self._thread: threading.Thread | None = None

    def save(self, state: dict, latest: bool = True, best: bool = False) -> Exception | None:
        """Writes the state as the latest checkpoint, the best, or both.

        Returns what is wrong with it: a ValueError of the state, an OSError of the disk. In the background that
        is not known yet, and it is what was wrong with the one before.
        """
        self.wait()
        before = self.error
        if self.sharded:
            self._write(state, latest, best)
        elif distributed.master and self.background:
            self._thread = threading.Thread(target=self._write, args=(snapshot(state), latest, best))
            self._thread.start()
            return before
        elif distributed.master:
            self._write(state, latest, best)
        return self.error

    def wait(self) -> None:
        """Until what is being written has been."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, SHARDED[name] if self.sharded else name)

    def _write(self, state: dict, latest: bool, best: bool) -> None:
        self.error, aside = None, None
        path = self._path(LATEST if latest else BEST)
        try:
            if self.sharded:
                save_sharded(path, state, lambda: latest and self._step_aside(path))
            else:
                aside = self._step_aside(path) if latest else None
                save(path, state)
            if latest:
                self.step = state["iter_num"]
            if distributed.master:
                if best and latest:
                    _link(path, self._path(BEST))
                self._prune(latest, best)
        except Exception as error:  # in the background it would be lost
            self.error = error if isinstance(error, (OSError, ValueError)) else _unwritten(path, state, error)
            if aside:
                remove(aside)

    def _step_aside(self, path: str) -> str | None:
        """Gives the latest checkpoint a name of its own, before the next one takes its place. Returns a new name."""
        if self.step is not None and os.path.exists(path) and (self.keep > 1 or os.path.isdir(path)):
            stem, suffix = os.path.splitext(path)
            older = f"{stem}-{self.step:08d}{suffix}"
            if os.path.isdir(path):
                remove(older)
                os.rename(path, older)
            elif not os.path.exists(older):
                _link(path, older)
                return older
        return None

    def _prune(self, latest: bool, best: bool) -> None:
        """Deletes the oldest but keep - 1; newer ones than the latest, which were skipped or given up; and what
        this name was before in the other form, a file or a folder."""
        for name in ((LATEST,) if latest else ()) + ((BEST,) if best else ()):
            remove(os.path.join(self.folder, name if self.sharded else SHARDED[name]))
        numbers = {name: int(re.search(r"\d+", name)[0]) for name in names(self.folder) if "-" in name}
        older = (n for n in numbers.values() if self.step is None or n < self.step)
        kept = sorted(older, reverse=True)[: self.keep - 1]
        for name in (name for name, n in numbers.items() if n not in kept):
            remove(os.path.join(self.folder, name))


def remove(path: str) -> None:
    """Deletes a checkpoint, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def tidy(folder: str) -> None:
    """Deletes what a run that was killed has left half written, and puts back what was about to be replaced."""
    for path in (os.path.join(folder, name) for name in os.listdir(folder)):
        if re.fullmatch(r"(ckpt|best)(-\d+)?(\.pt)?\.(tmp|old)", os.path.basename(path)):
            if path.endswith(".old") and not os.path.exists(path[:-4]):
                os.rename(path, path[:-4])
            remove(path)


def _link(path: str, other: str) -> None:
    """Makes other the same checkpoint as path, without a second copy where the file system has links."""

    def link(a: str, b: str) -> None:
        try:
            os.link(a, b)
        except OSError:
            with open(a, "rb") as source, written_aside(b) as f:
                shutil.copyfileobj(source, f)

    aside = other + ".tmp"
    remove(aside)
    shutil.copytree(path, aside, copy_function=link) if os.path.isdir(path) else link(path, aside)
    _put(aside, other)


def path_of(out_dir: str, which: str) -> str:
    """The path of a run's "latest" or "best" checkpoint; the latest stands in for a best that is not there."""
    for name in ((BEST, "best") if which == "best" else ()) + (LATEST, "ckpt"):
        if os.path.exists(os.path.join(out_dir, name)):
            return os.path.join(out_dir, name)
    return os.path.join(out_dir, LATEST)


def set_aside(out_dir: str) -> None:
    """Moves a run that is already in out_dir to out_dir/previous, and says so. One generation is kept.

    A run is what left a checkpoint: the log of one that died before its first is simply written over.
    """
    files = names(out_dir)
    if files:
        files += [LOG] if os.path.exists(os.path.join(out_dir, LOG)) else []
        previous = os.path.join(out_dir, "previous")
        replaced = ", in the place of the run before it" if os.path.exists(previous) else ""
        shutil.rmtree(previous, ignore_errors=True)
        os.makedirs(previous)
        for f in files:
            os.replace(os.path.join(out_dir, f), os.path.join(previous, f))
        print(f"{out_dir} held a run: moved {', '.join(files)} to {previous}{replaced}")


def claim(log: IO) -> None:
    """Locks a run's open log for this process, until it ends, however it does.

    Raises ValueError where another process trains into the same folder.
    """
    try:
        import fcntl

        fcntl.lockf(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        folder = os.path.dirname(log.name)
        raise UserError(f"another process is training into {folder}: stop it, or take another --out_dir=") from None
    except (ImportError, OSError):  # no such thing on Windows and on some file systems
        pass
