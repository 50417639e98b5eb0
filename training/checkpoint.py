"""Saves a run's state and loads it again, opens its model, and decides which of its checkpoints are kept.

A checkpoint is a file in torch.save's format: a dict of tensors and plain Python values under nanoGPT's keys (model,
optimizer, model_args, iter_num, best_val_loss, config) and some more. The number of processes leaves no trace in it:
an FSDP run puts its shards together to save them, and takes its shards of each tensor when it resumes.
"""

import contextlib
import os
import re
import shutil
import zipfile

import torch

from errors import NotFinite, UserError, first_line
from model import GPT, GPTConfig
from text import dataset, tokenizers
from training import distributed

LATEST, BEST, LOG = "ckpt.pt", "best.pt", "log.jsonl"  # files in a run's folder
BOARD = "tensorboard"  # a folder in a run's folder
KEYS = ("model", "model_args", "iter_num", "best_val_loss", "config")
VERSION = 2  # of the format; nanoGPT's files have none

# -----------------------------------------------------------------------------
# one file


def save(path: str, state: dict) -> None:
    """Writes the state beside path and renames it: a crash leaves the old file whole. OSError if the disk is full."""
    os.replace(_written(path, state), path)


def _written(path: str, state: dict) -> str:
    """Writes the state to path + ".tmp", whose name it returns, and to the disk. After an error no file is left."""
    aside = path + ".tmp"
    try:
        with open(aside, "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())  # before the file is renamed: after a power cut the name must not be of an empty file
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            os.remove(aside)
        if isinstance(error, RuntimeError) and not re.search("PytorchStreamWriter|unexpected pos", str(error)):
            raise  # a bug; those two are torch.save's words for a full disk
        why = f"{first_line(error)}. Is the disk full?"
        raise OSError(f"cannot write {path}: {why} An older file of this name is unchanged") from None
    return aside


def load(path: str, verify: bool = True, lazily: bool = False) -> dict:
    """The checkpoint at path, on the CPU. Raises UserError for a missing, damaged or foreign file.

    verify: compare the checksums. lazily: read a tensor when it is used; until then the file must not change.
    """
    if not os.path.exists(path):
        raise UserError(f"there is no checkpoint {path}; train first, or name the folder of a run with --out_dir=")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not compare checksums
            if verify and (damaged := archive.testzip()):
                raise ValueError(f"its record {damaged} does not match its checksum")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # unpickling a damaged file can raise any error
        raise UserError(f"{path} is damaged or no checkpoint: {first_line(error)}") from None
    if not isinstance(state, dict) or any(key not in state for key in KEYS) or not isinstance(state["iter_num"], int):
        raise UserError(f"{path} is not a checkpoint of train.py: it needs the entries {', '.join(KEYS)}")
    if (version := state.get("version", 1)) not in (1, VERSION):
        raise UserError(f"{path} has version {version} of the format; this train.py knows versions 1 and {VERSION}")
    args = state["model_args"].items()  # in earlier versions beta_squared was beta2, and norms had a field for biases
    state["model_args"] = {k: "beta_squared" if v == "beta2" else v for k, v in args if k != "norm_bias"}
    if version == 1:  # with qk_norm=l2 it has sqrt(D) g in the place of g; Adam's moments of that stay as they are
        c = state["model_args"]
        if c.get("per_dim_temperature") and c.get("position") == "rope":
            raise UserError(f"{path} has per_dim_temperature before RoPE. Now it comes after it: train the model anew")
        D = c.get("head_dim") or c["n_embd"] // c["n_head"]
        g = {k: x / D**0.5 for k, x in state["model"].items() if k.endswith("attn.q_norm.scale")}
        state |= {"version": VERSION, "model": state["model"] | g}
        if state["config"].get("optimizer") == "lamb":  # which did not use the flag
            state["config"]["adam_eps"] = None
    if "tokenizer" not in state:  # nanoGPT's own: names of a compiled model, buffers for masks, the exact GELU
        weights = {name.removeprefix("_orig_mod."): x for name, x in state["model"].items()}
        state["model"] = {name: x for name, x in weights.items() if not name.endswith(".attn.bias")}
        state["model_args"] = {"mlp": "gelu_exact"} | state["model_args"]
        state["best_val_loss"] = float(state["best_val_loss"])
    return state


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
    model.load_state_dict(state["model"])
    return model


def tokenizer_of(state: dict) -> tokenizers.Tokenizer:
    """The tokenizer of a checkpoint. nanoGPT's checkpoints name none: then it is their data set's, or GPT-2's."""
    if "tokenizer" in state:
        return tokenizers.tokenizer(state["tokenizer"])
    vocab_size = state["model_args"]["vocab_size"]
    with contextlib.suppress(UserError):  # if the data set is not here
        meta = dataset.read_meta(dataset.folder_of(state["config"].get("dataset", "")))
        if meta["vocab_size"] == vocab_size:
            return tokenizers.tokenizer(meta["tokenizer"])
    if vocab_size < tokenizers.GPT2_VOCAB_SIZE:
        raise UserError("this checkpoint names no tokenizer: prepare its data set in data/, which holds the tokenizer")
    return tokenizers.GPT2Tokenizer()


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


def check_finite(state: dict) -> None:
    """Raises NotFinite if a weight, or a number of an optimizer's state, is NaN or infinite."""
    tensors = list(state["model"].items())
    for optimizer in state["optimizer"]:
        tensors += [(f"the optimizer's {k}", x) for of in optimizer["state"].values() for k, x in of.items()]
    for name, x in tensors:
        if isinstance(x, torch.Tensor) and not x.isfinite().all():
            raise NotFinite(f"{name} holds values that are not finite")


def restore(saved: dict, optimizers: list, scaler: torch.amp.GradScaler) -> None:
    """Puts the saved states into the optimizers and the scaler. The optimizers' settings stay: flags may change them.

    Of each tensor that has its parameter's shape, FSDP's processes take their shards.
    """

    def placed(x: object, p: torch.Tensor) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        if x.shape != p.shape:
            return x.clone()
        x = x.to(p.device, copy=True)
        if not hasattr(p, "placements"):
            return x
        return torch.distributed.tensor.distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None)

    states = saved["optimizer"] if isinstance(saved["optimizer"], list) else [saved["optimizer"]]  # nanoGPT has one
    for optimizer, state in zip(optimizers, states, strict=True):
        own = [p for group in optimizer.param_groups for p in group["params"]]
        of_parameters = {i: {k: placed(x, own[i]) for k, x in of.items()} for i, of in state["state"].items()}
        groups = zip(state["param_groups"], optimizer.param_groups, strict=True)
        groups = [theirs | {k: x for k, x in mine.items() if k != "params"} for theirs, mine in groups]
        optimizer.load_state_dict({"state": of_parameters, "param_groups": groups})
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # empty except in float16


# -----------------------------------------------------------------------------
# the checkpoints of a run


def save_run(folder: str, state: dict, latest: bool, best: bool, keep: int) -> None:
    """Writes the state as the latest checkpoint of a run, the best, or both. The keep - 1 before the latest stay.

    Raises NotFinite before it writes numbers that are not finite. Raises OSError if the disk is full.
    """
    check_finite(state)
    if best:
        save(os.path.join(folder, BEST), state)
    if latest:
        path, step = os.path.join(folder, LATEST), state["iter_num"]
        aside = _written(path, state)
        if os.path.exists(path):
            os.replace(path, os.path.join(folder, f"ckpt-{_step(path):08d}.pt"))
        os.replace(aside, path)
        older = {int(name[5:-3]): name for name in names(folder) if "-" in name}  # {500: "ckpt-00000500.pt"}
        kept = sorted(at for at in older if at < step)[::-1][: keep - 1]
        for name in [name for at, name in older.items() if at not in kept]:  # also of later steps, which were given up
            os.remove(os.path.join(folder, name))


def _step(path: str) -> int:
    """How many steps the run had made."""
    return load(path, verify=False, lazily=True)["iter_num"]


def names(folder: str) -> list[str]:
    """The checkpoints in a run's folder: the latest, older ones (ckpt-00000500.pt), the best."""
    found = os.listdir(folder) if os.path.isdir(folder) else []
    older = sorted((name for name in found if re.fullmatch(r"ckpt-\d+\.pt", name)), reverse=True)
    return [name for name in (LATEST, *older, BEST) if name in found]


def path_of(out_dir: str, which: str) -> str:
    """The path of a run's "latest" or "best" checkpoint; if there is no best one, the latest."""
    best = which == "best" and BEST in names(out_dir)
    return os.path.join(out_dir, BEST if best else LATEST)


def load_newest(out_dir: str) -> tuple[str, dict]:
    """(path, state) of the checkpoint with the most steps, which may be the best one. Raises UserError as load does."""
    found = names(out_dir)
    try:
        path = max((os.path.join(out_dir, name) for name in found or [LATEST]), key=_step)
        return path, load(path, lazily=True)
    except UserError as error:
        others = [name for name in found if os.path.join(out_dir, name) not in str(error)]
        hint = f". Delete it to go on from the newest of the others: {', '.join(others)}" if others else ""
        raise UserError(f"{error}{hint}") from None


def set_aside(out_dir: str) -> None:
    """Moves a run that is already in out_dir to out_dir/previous, and says so. What was in previous is deleted."""
    if not names(out_dir):  # no run to keep: if a run died before its first checkpoint, its log is overwritten
        return
    files = [name for name in (*names(out_dir), LOG, BOARD) if os.path.exists(os.path.join(out_dir, name))]
    previous = os.path.join(out_dir, "previous")
    shutil.rmtree(previous, ignore_errors=True)
    os.makedirs(previous)
    for name in files:
        os.replace(os.path.join(out_dir, name), os.path.join(previous, name))
    print(f"{out_dir} held a run: moved {', '.join(files)} to {previous} (--init_from=resume would go on with a run)")
