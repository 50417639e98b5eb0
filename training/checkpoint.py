"""Saves a run's state and loads it again, opens its model, and keeps its latest checkpoints.

A checkpoint is a file in torch.save's format: a dict of tensors and plain Python values under
nanoGPT's keys (model, optimizer, model_args, iter_num, best_val_loss, config) and a few others. It
does not depend on the number of processes: an FSDP run puts its shards together to save them, and
takes its shards of each tensor when it resumes.

    python -m training.checkpoint out/ckpt.pt      # what made it: its command, versions and source
"""

import contextlib
import copy
import glob
import os
import shutil
import sys
import zipfile
from os.path import exists, join

import torch

from configurator import user_errors
from errors import NotFinite, UserError, first_line
from model import GPT, GPTConfig
from text import dataset, tokenizers
from training import distributed, origin

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"  # files in a run's folder
KEYS = ("model", "model_args", "iter_num", "best_val_loss", "config")
VERSION = 2  # of the format; nanoGPT's files have none

# -----------------------------------------------------------------------------
# one file


def save(path: str, state: dict, older: str = "") -> OSError | None:
    """Writes the state to a file beside path, and renames the file to path.

    A file that is at path is renamed to older, if that is given; returns the error if it cannot be.
    After a crash the older file is whole. Raises OSError if the state cannot be written.
    """
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())  # a power cut after the renaming must not leave an empty file
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError for a full disk
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise OSError(
            f"cannot write {path}: {first_line(error)}. Is the disk full? "
            "An older file of this name is unchanged"
        ) from None
    problem = None
    if older and exists(path):
        try:
            os.replace(path, older)
        except OSError as error:  # the new checkpoint matters more
            problem = error
    os.replace(temporary, path)
    return problem


def load(path: str, verify: bool = True) -> dict:
    """The checkpoint at path, on the CPU. Raises UserError for a missing, damaged or foreign file.

    state["path"] is its path. A tensor is read when it is used: until then nothing may write to the
    file. (save writes to another file and renames it.) verify: compare the checksums of all that is
    in the file.
    """
    if not exists(path):
        raise UserError(
            f"there is no checkpoint {path}; "
            "train first, or name the folder of a run with --out_dir="
        )
    try:
        if verify:  # torch.load compares no checksums
            with zipfile.ZipFile(path) as archive:
                record = archive.testzip()
            if record:
                raise ValueError(f"its record {record} does not match its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not state.keys() >= set(KEYS):
            raise ValueError(f"it needs {', '.join(KEYS)}")
    except Exception as error:  # unpickling a damaged file can raise any error
        raise UserError(
            f"{path} is damaged or no checkpoint of train.py: {first_line(error)}. If you delete "
            "it, --init_from=resume goes on from an older checkpoint in its folder"
        ) from None
    version = state.get("version", VERSION)
    if version != VERSION:
        raise UserError(f"{path} has version {version} of checkpoints; this code reads {VERSION}")
    state["path"] = path
    if "tokenizer" not in state:
        _convert_nanogpt(state)
    return state


def _convert_nanogpt(state):
    """Makes a checkpoint of nanoGPT's one of ours, in place.

    It may have names of a compiled model and buffers for masks. Its GELU is the exact one, its loss
    a tensor.
    """
    weights = {name.removeprefix("_orig_mod."): x for name, x in state["model"].items()}
    state["model"] = {name: x for name, x in weights.items() if not name.endswith(".attn.bias")}
    state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
    state["best_val_loss"] = float(state["best_val_loss"])


def open_model(
    init_from: str, out_dir: str, which: str
) -> tuple[GPT, tokenizers.Tokenizer, dict, str]:
    """(model, tokenizer, settings of its run, a line about it), or of pretrained weights.

    init_from: "resume", the folder of a run in the place of out_dir, or the name of pretrained
    weights, which have no settings of a run. which: see path_of.
    """
    if checkpoints_in(init_from):
        out_dir = init_from
    elif init_from != "resume":
        model = GPT.from_pretrained(init_from)
        tok = tokenizers.pretrained_tokenizer(init_from, model.config.vocab_size)
        return model, tok, {}, init_from
    path = path_of(out_dir, which)
    state = load(path)
    about = f"{path}: step {state['iter_num']}, best validation loss {state['best_val_loss']:.4f}"
    return model_of(state), tokenizer_of(state), state["config"], about


def model_of(state: dict, **overrides) -> GPT:
    """The model of a checkpoint that load has read. overrides: fields of GPTConfig to change.

    Raises UserError for fields that GPTConfig does not have.
    """
    unknown = set(state["model_args"]) - set(GPTConfig.__dataclass_fields__)
    if unknown:
        raise UserError(f"the checkpoint's model has unknown fields: {', '.join(sorted(unknown))}")
    made_by = state.get("origin", {})
    path = state.get("path", "the checkpoint")
    try:
        config = GPTConfig(**state["model_args"] | overrides)
    except UserError as error:  # perhaps a choice of a file that is not imported
        if not made_by:
            raise
        how = f"{path} was made by {made_by['command']}"
        raise UserError(f"{error}. {how}; {origin.command_for(path)} prints its source") from None
    origin.note_changes(made_by, config, path)
    model = GPT(config)
    model.load_state_dict(state["model"])
    return model


def tokenizer_of(state: dict) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint. Those of nanoGPT name none: GPT-2's, or the data set's.

    Raises UserError if that data set is not prepared here.
    """
    meta = state
    if "tokenizer" not in state:
        if state["model_args"]["vocab_size"] >= tokenizers.GPT2_VOCAB_SIZE:
            return tokenizers.GPT2Tokenizer()
        meta = dataset.read_meta(dataset.folder_of(state["config"]["dataset"]))
    return tokenizers.tokenizer(meta["tokenizer"])


# -----------------------------------------------------------------------------
# the state of a run


def gathered(state: object) -> object:
    """A state dict with whole tensors, on the first process's CPU, in the place of FSDP's shards.

    Every process must call this. Tensors that are not sharded stay as they are.
    """
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if not hasattr(state, "full_tensor"):
        return state
    full = state.full_tensor()
    return full.cpu() if distributed.master else None


def check_finite(x: object, name: str = "") -> None:
    """Raises NotFinite if a tensor in x, nested dicts and lists, has a NaN or an infinity."""
    if isinstance(x, list):
        x = dict(enumerate(x))
    if isinstance(x, dict):
        for key, value in x.items():
            check_finite(value, key)
    elif torch.is_tensor(x) and not x.isfinite().all():
        raise NotFinite(f"{name} holds values that are not finite")


def restore(saved: dict, optimizers: list, scaler: torch.amp.GradScaler) -> None:
    """Puts the saved states into the optimizers and the scaler.

    The optimizers keep their settings, since flags may change them.
    """
    states = saved["optimizer"]
    if isinstance(states, dict):  # nanoGPT's, of one optimizer
        states = [states]
    for optimizer, state in zip(optimizers, states, strict=True):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = {
            i: {name: _placed(x, params[i]) for name, x in entries.items()}
            for i, entries in state["state"].items()
        }
        optimizer.load_state_dict(optimizer.state_dict() | {"state": numbers})
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # empty except in float16


def _placed(x, p):
    """A copy of what an optimizer keeps of a parameter p.

    If p is sharded and x has its shape, this is the shard of this process.
    """
    if not hasattr(p, "placements") or getattr(x, "shape", None) != p.shape:
        return copy.deepcopy(x)
    return torch.distributed.tensor.distribute_tensor(
        x.to(p.device), p.device_mesh, p.placements, src_data_rank=None
    )


# -----------------------------------------------------------------------------
# the checkpoints of a run


class Saver:
    """Writes the checkpoints of a run, and keeps the last `keep`. Saving reads nothing back.

    other_best: best.pt is of another evaluation, so it is kept under a name with its step.
    """

    def __init__(self, folder: str, keep: int, other_best: bool = False):
        self.folder = folder
        self.keep = keep
        self.best = ""  # what best.pt is renamed to, before another one is written
        if other_best and BEST in checkpoints_in(folder):
            self.best = join(folder, f"best-{_step(join(folder, BEST)):08d}.pt")
            distributed.say(f"the best checkpoint until now will be kept as {self.best}")
        self.step = 0  # of ckpt.pt
        if LATEST in checkpoints_in(folder):
            self.step = _step(join(folder, LATEST))

    def save(self, state: dict, latest: bool, best: bool) -> None:
        """Writes the state as the latest checkpoint of the run, the best, or both.

        Raises NotFinite before it writes numbers that are not finite, and OSError if the state
        cannot be written or, with the state saved, an older file cannot be kept or removed.
        """
        check_finite(state)
        try:
            if best:
                save(join(self.folder, BEST), state, self.best)
                self.best = ""
        finally:
            if latest:
                path = join(self.folder, LATEST)
                problem = save(path, state, join(self.folder, f"ckpt-{self.step:08d}.pt"))
                self.step = state["iter_num"]
                older = [name for name in checkpoints_in(self.folder) if name.startswith("ckpt-")]
                for name in older[self.keep - 1 :]:
                    os.remove(join(self.folder, name))
                if problem:
                    raise OSError(f"{path} is saved, but the one before it is lost: {problem}")


def _step(path):
    """The number of steps that the run of a checkpoint had made."""
    return load(path, verify=False)["iter_num"]


def checkpoints_in(folder: str) -> list[str]:
    """The checkpoints in a run's folder: the latest, older ones (ckpt-00000500.pt), the best.

    Before the best one come those of evaluations with other windows (best-00000500.pt).
    """
    older = sorted(glob.glob(f"????-{'[0-9]' * 8}.pt", root_dir=folder), reverse=True)
    return [name for name in (LATEST, *older, BEST) if exists(join(folder, name))]


def path_of(out_dir: str, which: str) -> str:
    """The path of a run's "latest" or "best" checkpoint; if there is no best one, the latest."""
    best = which == "best" and BEST in checkpoints_in(out_dir)
    return join(out_dir, BEST if best else LATEST)


def load_newest(out_dir: str) -> dict:
    """The checkpoint with the most steps, perhaps the best. Errors: see load."""
    paths = [join(out_dir, name) for name in checkpoints_in(out_dir) or [LATEST]]
    return load(max(paths, key=_step))


def begun_by(launch: str, out_dir: str) -> bool:
    """Whether out_dir has a checkpoint of this call of torchrun (distributed.launch)."""
    for name in checkpoints_in(out_dir) if launch else ():
        with contextlib.suppress(UserError):  # a damaged file
            if launch in load(join(out_dir, name), verify=False).get("launch", ()):
                return True
    return False


def move_to_previous(out_dir: str) -> list[str]:
    """Moves a run from out_dir to out_dir/previous, and returns its files. Deletes what was there.

    Without a checkpoint there is no run to keep: the log of a run that died early is overwritten.
    """
    files = checkpoints_in(out_dir)
    if not files:
        return []
    previous = join(out_dir, "previous")
    shutil.rmtree(previous, ignore_errors=True)
    os.makedirs(previous)
    if exists(join(out_dir, LOG)):
        files.append(LOG)
    for name in files:
        os.replace(join(out_dir, name), join(previous, name))
    return files


def print_origin(path: str) -> None:
    """Prints what made a checkpoint. Raises UserError if the checkpoint does not say it."""
    made_by = load(path).get("origin")
    if made_by is None:
        raise UserError(f"{path} is of a version that did not keep what made it")
    for name, made in (made_by.pop("sources") | made_by).items():
        print(f"# {name}:\n{made}\n")


if __name__ == "__main__":
    with user_errors():
        print_origin(sys.argv[1])
