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
import math
import os
import re
import shutil
import sys
import zipfile
from dataclasses import dataclass
from os.path import exists, join

from configurator import user_errors

import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

from errors import NotFinite, UserError, first_line
from model import GPT, GPTConfig
from text import dataset, tokenizers
from training import origin
from training.distributed import master, say

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"  # files in a run's folder
NAME = re.compile(r"(ckpt|best)(-\d{8})?\.pt")  # of all checkpoints; other files are the user's
VERSION = 3  # of the format: short heads come first since 3; nanoGPT's files have none
# {a field that left GPTConfig: what to do where it is on}
LEFT = {
    "differential": "train again with --import=lab.ideas.differential",
    "per_dim_temperature": "train again with --import=lab.ideas.temperature",
    "after": "train again with --import=lab.ideas.after",
    "max_distance": "train again with --import=lab.ideas.positions",
}

# of a class that keeps nothing of what it is made from
EMPTY = dict.fromkeys(("__init__", "__setstate__"), lambda *args: None)

# -----------------------------------------------------------------------------
# one file


def save(path: str, state: dict, older: str = "") -> None:
    """Writes the state to a file beside path, and renames the file to path.

    A file that is at path is renamed to older first, if that is given and possible. After a crash
    the older file is whole. Raises OSError if the state cannot be written.
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

    if older:
        with contextlib.suppress(OSError):  # there is no older file; or it cannot be kept
            os.replace(path, older)
    os.replace(temporary, path)


def load(path: str, verify: bool = True) -> dict:
    """The checkpoint at path, on the CPU, with its path under "path".

    verify: compare the checksums of all that is in the file, which torch.load does not do. A tensor
    is read when it is used: until then nothing may write to the file. (save writes to another file
    and renames it.) Raises UserError for a missing, damaged or foreign file, and for a field that
    GPTConfig does not have, unless it is one of LEFT and off.
    """
    if not exists(path):
        raise UserError(
            f"there is no checkpoint {path}; "
            "train first, or name the folder of a run with --out_dir="
        )
    try:
        if verify and (record := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"its record {record} does not match its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        # to publish a model, somebody may have taken all else out of its checkpoint
        state = {"iter_num": 0, "best_val_loss": math.inf, "config": {}} | state

        if "tokenizer" not in state:  # nanoGPT's, with buffers for masks
            state["model"] = {
                name: x for name, x in state["model"].items() if not name.endswith(".attn.bias")
            }
            state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
        fields = state["model_args"]
    except Exception as error:  # unpickling a damaged file can raise any error
        if what := foreign(path):
            raise UserError(
                f"{path} is whole, but {what}. Only tensors and Python's own numbers and texts are "
                "read, since other things may run code"
            ) from None
        raise UserError(
            f"{path} is damaged or no checkpoint of train.py: {first_line(error)}. If you "
            "delete it, --init_from=resume goes on from an older checkpoint in its folder"
        ) from None

    # a version and fields that this code knows; those that left are dropped where they are off
    if state.get("version", VERSION) not in (2, VERSION):
        raise UserError(
            f"{path} has version {state['version']} of checkpoints; this code reads {VERSION}"
        )
    for field in sorted(fields.keys() - GPTConfig.__dataclass_fields__):
        value = fields.pop(field)
        if field not in LEFT or value not in (None, False, "none"):
            raise UserError(
                f"{path} has {field}={value!r}, which GPTConfig does not have: "
                f"{LEFT.get(field, 'use the code that has made it')}"
            )
    return state | {"path": path}


def foreign(path: str) -> str:
    """Which value of a whole checkpoint is not read, in words; "" for a damaged one.

    It becomes an object of an empty class, so none of its code runs. Such an object may not hold
    what it held: then the words have no place.
    """
    with contextlib.suppress(Exception):  # it is damaged
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        kinds = [(type(name, (), EMPTY), name) for name in names]
        with contextlib.suppress(Exception), torch.serialization.safe_globals(kinds):
            state = torch.load(path, weights_only=True, mmap=True)
            for place, x in tree_leaves_with_path(state):
                if type(x) in dict(kinds):
                    return f"{keystr(place) or 'it'} is a {type(x).__name__}"
        return f"it has a {max(names)}"  # the last in the alphabet comes after builtins
    return ""


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
        return model, tokenizers.PRETRAINED["other"](init_from), {}, init_from
    path = path_of(out_dir, which)
    state = load(path)
    about = f"{path}: step {state['iter_num']}, best validation loss {state['best_val_loss']:.4f}"
    return model_of(state), tokenizer_of(state), state["config"], about


def model_of(state: dict, **changes) -> GPT:
    """The model of a checkpoint that load has read. changes: fields of GPTConfig to change.

    With a smaller block_size it has the first of the learned positions. If the checkpoint has no
    short convolution, the model keeps its new one. Raises UserError if the changes or the weights
    do not fit: it names the weights that are missing, unknown or of another shape.
    """
    path = state["path"]
    made_by = state.get("origin", {})
    try:
        config = GPTConfig(**state.get("model_args", {}) | changes)
    except UserError as error:  # perhaps a choice of a file that is not imported
        raise UserError(f"{error}. {path} was made by: {made_by.get('command')}") from None
    heads = "/".join(map(config.layer_heads, range(config.n_layer)))
    if state.get("version") == 2 and "LS" in heads:
        raise UserError(
            f"{path} has heads={config.heads}; now short heads come first. "
            "14831a9 is the last commit that reads it"
        )
    origin.note_changes(made_by, config, path)

    model = GPT(config)
    weights = {
        name: x for name, x in model.state_dict().items() if name.endswith("attn.conv.weight")
    }
    # without what torch.compile and DDP put before the names
    weights |= {
        re.sub(r"^(_orig_mod\.|module\.)+", "", name): x for name, x in state["model"].items()
    }
    table = "transformer.wpe.weight"
    if config.position == "learned" and table in weights:
        weights[table] = weights[table][: config.block_size]
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{path}'s weights do not fit the model: {error}") from None
    return model


def tokenizer_of(state: dict) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint. Those of nanoGPT name none: GPT-2's, or the data set's.

    Raises UserError if that data set is not prepared here.
    """
    meta = state
    if "tokenizer" not in state:
        if state["model_args"]["vocab_size"] >= tokenizers.GPT2_VOCAB_SIZE:
            return tokenizers.GPT2Tokenizer()
        meta = dataset.read_meta(dataset.folder_of(state["config"].get("dataset", "")))
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
    return full.cpu() if master else None


def restore(saved: dict, optimizers: list, scaler: torch.amp.GradScaler) -> None:
    """Puts the saved states into the optimizers and the scaler.

    The optimizers keep their settings, since flags may change them.
    """
    states = saved["optimizer"]
    if isinstance(states, dict):  # nanoGPT's, of one optimizer
        states = [states]
    for optimizer, state in zip(optimizers, states, strict=True):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, entries in state["state"].items():
            for name, x in entries.items():
                entries[name] = _placed(x, params[i])
        optimizer.load_state_dict(optimizer.state_dict() | {"state": state["state"]})
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # empty except in float16


def _placed(x, p):
    """A copy of what an optimizer keeps of a parameter p.

    If p is sharded and x has its shape, it is this process's shard.
    """
    if not hasattr(p, "placements") or getattr(x, "shape", None) != p.shape:
        return copy.deepcopy(x)
    return torch.distributed.tensor.distribute_tensor(
        x.to(p.device), p.device_mesh, p.placements, src_data_rank=None
    )


# -----------------------------------------------------------------------------
# the checkpoints of a run


@dataclass
class Saver:
    """Writes the checkpoints of a run, and keeps the last `keep`."""

    folder: str
    keep: int
    other_best: bool  # best.pt is of other windows: it is kept under a name with its step

    def save(self, state: dict, name: str) -> None:
        """Writes the state as the LATEST or the BEST checkpoint of the run.

        Raises NotFinite for weights that are not finite, and OSError if it cannot be written.
        """
        for weight, x in state["model"].items():
            if not x.isfinite().all():
                raise NotFinite(f"{weight} holds values that are not finite")

        path = join(self.folder, name)
        older = ""
        if name == LATEST or self.other_best:
            with contextlib.suppress(UserError):  # there is no older file, or it is damaged
                step = load(path, verify=False)["iter_num"]
                older = f"{path.removesuffix('.pt')}-{step:08d}.pt"
        save(path, state, older)
        if name == BEST:
            self.other_best = False
        latest = [name for name in checkpoints_in(self.folder) if name.startswith("ckpt")]
        for name in latest[self.keep :]:
            os.remove(f"{self.folder}/{name}")


def checkpoints_in(folder: str) -> list[str]:
    """The checkpoints in a run's folder: the latest, older ones (ckpt-00000500.pt), the best.

    After the best one come those of evaluations with other windows (best-00000500.pt).
    """
    return sorted(filter(NAME.fullmatch, glob.glob("*.pt", root_dir=folder)), reverse=True)


def path_of(out_dir: str, which: str) -> str:
    """The path of a run's "latest" or "best" checkpoint; if there is no best one, the latest."""
    best = join(out_dir, BEST)
    return best if which == "best" and exists(best) else join(out_dir, LATEST)


def load_newest(out_dir: str) -> dict:
    """The checkpoint with the most steps, perhaps the best. Errors: see load."""
    paths = [join(out_dir, name) for name in checkpoints_in(out_dir) or [LATEST]]
    return load(max(paths, key=lambda path: load(path, verify=False)["iter_num"]))


def steps_in(folder: str) -> float:
    """The steps of the newest checkpoint in a folder; NaN if it cannot be read, or has none."""
    with contextlib.suppress(UserError):
        return load_newest(folder)["iter_num"] or math.nan
    return math.nan


def move_to_previous(out_dir: str) -> None:
    """Moves a run from out_dir to out_dir/previous, and says so.

    It takes the place of a run that has no more steps; else it goes to previous-2, and so on.
    Without a checkpoint there is no run to keep: the log of a run that died early is overwritten.
    """
    files = checkpoints_in(out_dir)
    if not files:
        return
    folder = join(out_dir, "previous")
    n = 1
    while exists(folder) and not steps_in(folder) <= steps_in(out_dir):
        n += 1
        folder = join(out_dir, f"previous-{n}")

    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    files += glob.glob(LOG, root_dir=out_dir)
    for name in files:
        os.replace(join(out_dir, name), join(folder, name))
    say(f"{out_dir} held a run: moved {', '.join(files)} to {folder}")


if __name__ == "__main__":
    with user_errors():
        made_by = load(sys.argv[1]).get("origin", {})
    for name, made in (made_by.pop("sources", {}) | made_by).items():
        print(f"# {name}:\n{made}\n")
