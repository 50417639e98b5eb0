"""Saves a run's state and loads it again, opens its model, and decides which of its checkpoints are kept.

A checkpoint is a dict of tensors and plain Python values under nanoGPT's keys (model, optimizer, model_args, iter_num,
best_val_loss, config) and some more: a file in torch.save's format, ckpt.pt; nanoGPT's own can be loaded as well. For
an FSDP run it is a folder, ckpt, to which each process writes its shards of the tensors, under their paths in the state
("optimizer/0/state/3/exp_avg"): shard-*.safetensors, in the format of torch.distributed.checkpoint. run.pt holds
everything else, and the shards' sizes and checksums.
"""

import contextlib
import errno
import glob
import os
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch

from configurator import UserError, first_line
from model import GPT, GPTConfig
from text import dataset, tokenizers
from text.files import sync_folder, written_aside
from training import distributed

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"  # files in a run's folder; an FSDP run's have no .pt
FOLDER = 16  # the attribute of a zip entry that calls it a folder: PyTorch believes it, and no checksum covers it
KEYS = ("model", "model_args", "iter_num", "best_val_loss", "config")
VERSION = 1  # of the format; nanoGPT's files have none
WRITE_ERRORS = ("unexpected pos", "PytorchStreamWriter failed")  # what torch.save says when a disk is full or fails


def mapped(f: Callable, state: object, path: str = "") -> object:
    """A copy of the state with f(path, leaf) in place of each leaf; a path looks like "optimizer/0/state/3/step"."""
    if isinstance(state, dict):
        return {key: mapped(f, value, f"{path}/{key}".lstrip("/")) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(mapped(f, value, f"{path}/{i}") for i, value in enumerate(state))
    return f(path, state)


def tensors(state: object) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, aliases): {path: tensor}, and {second path: first path} of tensors that the state holds twice."""
    held = {}  # {where in memory: [(path, tensor), ...]}

    def note(path: str, x: object) -> None:
        if isinstance(x, torch.Tensor):
            shard = x.to_local() if hasattr(x, "to_local") else x
            place = (shard.data_ptr(), shard.shape, shard.stride()) if shard.numel() else path
            held.setdefault(place, []).append((path, x))

    mapped(note, state)
    found = dict(same[0] for same in held.values())
    return found, {path: same[0][0] for same in held.values() for path, _ in same[1:]}


def snapshot(state: object) -> object:
    """A copy of the state in the CPU's memory, which training does not change. Tied tensors stay tied."""
    found, aliases = tensors(state)
    copies = {path: x.detach().to("cpu", copy=True) for path, x in found.items()}
    copies |= {alias: copies[path] for alias, path in aliases.items()}
    return mapped(lambda path, x: copies.get(path, x), state)


def check_finite(path: str, state: dict) -> None:
    """Raises UserError if a tensor of the state holds a NaN or an infinity. path: the file, for the message."""
    for name, x in tensors(state)[0].items():
        x = x.to_local() if hasattr(x, "to_local") else x
        if x.is_floating_point() and not torch.isfinite(x.sum()) and not x.isfinite().all():
            raise UserError(f"{name} holds values that are not finite; {path} was not written")


@contextlib.contextmanager
def writing(path: str, state: dict) -> Iterator[None]:
    """Within it, an error of the disk becomes an OSError that says why path was not written; a bug stays what it is."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        by_torch = any(words in str(error) for words in WRITE_ERRORS)
        if not by_torch and not isinstance(error, OSError):
            raise
        reason = first_line(error)
        if by_torch or any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)):
            needed = sum(x.numel() * x.element_size() for x in tensors(state)[0].values()) / 2**20
            free = shutil.disk_usage(os.path.dirname(path) or ".").free / 2**20
            reason += f". Is the disk full? It needs {needed:,.1f} MiB, and {free:,.1f} MiB are free"
        raise OSError(f"cannot write {path}: {reason}. What was there before is untouched") from None


# -----------------------------------------------------------------------------
# to disk and back


def put(aside: str, path: str) -> None:
    """Renames what was written aside, a file or a folder, to path; a crash leaves the old one, or path + ".old"."""
    if os.path.isdir(path):
        shutil.rmtree(path + ".old", ignore_errors=True)
        os.rename(path, path + ".old")
    os.replace(aside, path)
    sync_folder(os.path.dirname(path))
    shutil.rmtree(path + ".old", ignore_errors=True)


def save(path: str, state: dict, before: Callable = lambda: None) -> None:
    """Writes the state beside path and to the disk, calls before() and renames it: a crash leaves the old file whole.

    Raises UserError for weights that are not finite and OSError if the disk fails; then nothing is left behind.
    """
    check_finite(path, state)
    with writing(path, state), written_aside(path) as f:
        torch.save(state, f)
        f.flush()  # a full disk is noticed here
        before()


def save_sharded(path: str, state: dict, before: Callable = lambda: None) -> None:
    """Writes a sharded state as save does. Every process must call it; the first one calls before()."""
    import torch.distributed.checkpoint as dcp

    def publish() -> None:
        rest = mapped(lambda _, x: None if isinstance(x, torch.Tensor) else x, state)
        with writing(path, state), written_aside(os.path.join(aside, "run.pt")) as f:
            torch.save(rest | {"shards": shards, "aliases": aliases}, f)
        before()  # before the new folder takes its place
        put(aside, path)

    distributed.by_all(lambda: check_finite(path, state))
    aside = path + ".tmp"
    distributed.by_master(lambda: shutil.rmtree(aside, ignore_errors=True))
    found, aliases = tensors(state)
    aliases = distributed.gathered(aliases)[0]  # other processes may hold empty shards, which lie nowhere in memory
    found = {name: x for name, x in found.items() if name not in aliases}
    mine = os.path.join(glob.escape(aside), f"shard-{distributed.rank + 1:05d}-*")
    try:
        with writing(path, state):
            try:
                dcp.save(found, storage_writer=dcp.HuggingFaceStorageWriter(aside, save_distributed=True))
            except dcp.CheckpointException as error:  # raised on every process, with the errors of those that failed
                first, _ = next(iter(error.failures.values()))
                raise first from error
        parts = distributed.by_all(lambda: {os.path.basename(file): measured(file) for file in glob.glob(mine)})
        shards = {name: entry for part in parts for name, entry in part.items()}
        distributed.by_master(publish)
    except OSError:  # on every process
        distributed.by_master(lambda: shutil.rmtree(aside, ignore_errors=True))
        raise


def measured(path: str) -> tuple[int, int]:
    """(bytes, crc32) of a file."""
    return os.path.getsize(path), zlib.crc32(np.memmap(path, mode="r"))


def read_tensors(path: str, prefix: str, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{name: tensor}, of the names that begin with prefix: whole on the CPU, or lying as a parameter of its shape does.

    parameters: {"optimizer/0/state/3": the parameter that this is the state of}
    """
    import torch.distributed.checkpoint as dcp

    found = {}
    reader = dcp.HuggingFaceStorageReader(path)
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix):
            p = parameters.get(os.path.dirname(name))
            alike = p if p is not None and p.shape == entry.size else torch.empty(entry.size)
            found[name] = torch.zeros_like(alike, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that no process group takes part
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def load(path: str, verify: bool = True, lazily: bool = False) -> dict:
    """The checkpoint at path, on the CPU. Raises UserError for a missing, damaged or foreign file.

    Of a folder, the optimizers' tensors are left out: optimizer_states reads them. verify: compare the checksums.
    lazily: read each tensor from the disk when it is used; until then the file must not change.
    """
    if not os.path.exists(path):
        folder = os.path.dirname(path) or "."
        others = [os.path.join(folder, name) for name in names(folder)]
        hint = f"there is {', '.join(others)}" if others else "train first, or name its folder with --out_dir="
        raise UserError(f"there is no checkpoint {path}; {hint}")
    state = _opened(path, verify, lazily)
    if os.path.isdir(path):
        weights = read_tensors(path, "model/", {})
        state |= mapped(lambda name, _: weights[state["aliases"].get(name, name)], {"model": state["model"]})
    if "tokenizer" not in state:  # nanoGPT's own: names of a compiled model, buffers for masks, the exact GELU
        weights = {name.removeprefix("_orig_mod."): x for name, x in state["model"].items()}
        state["model"] = {name: x for name, x in weights.items() if not name.endswith(".attn.bias")}
        state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
        state["best_val_loss"] = float(state["best_val_loss"])
    return state


def _opened(path: str, verify: bool, lazily: bool) -> dict:
    """The checked checkpoint at path, unpickled with `weights_only=True`; a folder's tensors are None."""
    folder = os.path.isdir(path)
    file = os.path.join(path, "run.pt") if folder else path
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() if verify else None  # torch.load does not compare checksums
            damaged = damaged or next((x.filename for x in archive.infolist() if x.external_attr & FOLDER), None)
        state = None if damaged else torch.load(file, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # unpickling a damaged file can raise any error
        raise UserError(f"{path} is damaged or no checkpoint: {first_line(error)}") from None
    if damaged:
        raise UserError(f"{path} is damaged: its record {damaged} does not have its checksum")
    if not isinstance(state, dict) or any(key not in state for key in KEYS) or not isinstance(state["iter_num"], int):
        raise UserError(f"{path} is not a checkpoint of train.py: it needs the entries {', '.join(KEYS)}")
    if state.get("version", VERSION) != VERSION:
        raise UserError(f"{path} has version {state['version']} of the format; this train.py knows version {VERSION}")
    if folder:
        for key in ("shards", "aliases"):
            if not isinstance(state.get(key), dict):
                raise UserError(f"{path} is not a checkpoint of train.py: its run.pt has no {key}")
        for name, (size, checksum) in state["shards"].items():
            shard = os.path.join(path, name)
            if not os.path.exists(shard) or os.path.getsize(shard) != size:
                raise UserError(f"{path} is damaged: {name} is missing or does not have its {size:,} bytes")
            if verify and measured(shard) != (size, checksum):
                raise UserError(f"{path} is damaged: {name} does not have its checksum")
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
# a trained model


def open_model(init_from: str, out_dir: str, which: str) -> tuple[GPT, tokenizers.Tokenizer, dict, str]:
    """(model, its tokenizer, the settings of its run, a line about it).

    init_from: "resume" for out_dir's checkpoint, "best" or "latest"; or the name of pretrained weights, without a run.
    """
    if init_from != "resume":
        model = GPT.from_pretrained(init_from)
        return model, tokenizers.pretrained_tokenizer(init_from, model.config.vocab_size), {}, init_from
    path = path_of(out_dir, which)
    state = load(path, lazily=True)  # only the weights are used
    about = f"{path}: step {state['iter_num']}, best validation loss {state['best_val_loss']:.4f}"
    return model_of(state), tokenizer_of(state), state["config"], about


def model_of(state: dict, **overrides: object) -> GPT:
    """The model of a checkpoint that load has read. overrides: fields of GPTConfig that are to differ."""
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
        raise UserError("this checkpoint names no tokenizer, and its data set is not prepared in data/ to take it from")
    return tokenizers.GPT2Tokenizer()


# -----------------------------------------------------------------------------
# the checkpoints of a run


def names(folder: str) -> list[str]:
    """The checkpoints in a run's folder: the latest, older ones (ckpt-00000500.pt), the best."""
    found = os.listdir(folder) if os.path.isdir(folder) else []
    older = sorted((name for name in found if re.fullmatch(r"ckpt-\d+(\.pt)?", name)), reverse=True)
    return [name for name in (LATEST, "ckpt", *older, BEST, "best") if name in found]


def newest(folder: str) -> tuple[str, list, list[str]]:
    """(path, launch, skipped): a run's newest intact checkpoint, which torchruns wrote it, why newer ones were skipped.

    Raises UserError if no checkpoint is intact.
    """
    steps, skipped = {}, []
    for path in (os.path.join(folder, name) for name in names(folder)):
        try:
            steps[path] = _opened(path, verify=False, lazily=True)["iter_num"]
        except UserError as error:
            skipped.append(str(error))
    for path in sorted(steps, key=steps.get, reverse=True):
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

    A checkpoint takes the place of another only when it is whole, on the disk, and its weights are finite.
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

        In the background it is that of the save before. A bug is raised, in the background by the next save or wait.
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
        stem, suffix = os.path.splitext(path)
        older = f"{stem}-{self.step:08d}{suffix}"
        if os.path.isdir(path):
            remove(older)
            os.rename(path, older)
        elif not os.path.exists(older):
            _link(path, older)

    def _prune(self, latest: bool, best: bool) -> None:
        """Deletes the other form (file or folder) of what was written, and all but the keep - 1 before the latest.

        Later steps than the latest go too: their checkpoints were skipped as damaged, or their run was given up.
        """
        for stem in [stem for stem, written in (("ckpt", latest), ("best", best)) if written]:
            remove(os.path.join(self.folder, stem + (".pt" if self.sharded else "")))
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
    return os.path.join(out_dir, next((name for name in order if name in names(out_dir)), LATEST))


def set_aside(out_dir: str) -> None:
    """Moves a run that is already in out_dir to out_dir/previous, and says so. What was in previous is deleted."""
    if not names(out_dir):  # then it is no run: the log of one that died before its first checkpoint is overwritten
        return
    files = [*names(out_dir), LOG]
    previous = os.path.join(out_dir, "previous")
    replaced = ", in the place of the run before it" if os.path.exists(previous) else ""
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
