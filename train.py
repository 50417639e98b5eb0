"""Trains a GPT, on one CPU, one GPU or many.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char_cpu.py --attention=laser
    torchrun --standalone --nproc_per_node=4 train.py config/train_shakespeare_char.py

Writes ckpt.pt (the latest state), best.pt (the lowest validation loss) and log.jsonl to out_dir.
"""

import collections
import contextlib
import html
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from dataclasses import replace as with_fields
from typing import Literal, NoReturn

from configurator import (  # first: Ctrl-C is a sentence from here
    NotInstalled,
    UserError,
    configure,
    fail,
    first_line,
    pick_device,
    user_errors,
)

# isort: split
import torch

from model import GPT, GPTConfig
from text.dataset import Tokens, folder_of, positions, read_meta
from text.files import replace
from text.tokenizers import GPT2_VOCAB_SIZE, tokenizer
from training import checkpoint
from training.distributed import (
    by_master,
    connect,
    gathered,
    launch,
    local_rank,
    master,
    rank,
    say,
    shared,
    summed,
    whole,
    world,
)
from training.estimate import VOCAB_SIZE, peak_flops, report
from training.optimizers import OPTIMIZER, Settings
from training.pretrained import FREE, TRAINING, config_of

_began = time.perf_counter()
# -----------------------------------------------------------------------------
# flags; GPT-2 (124M) on OpenWebText by default. The fields of GPTConfig are flags too.
# I/O
out_dir = "out"  # where checkpoints and the log go
eval_interval = 2000  # steps between evaluations
log_interval = 1  # steps between log lines
log_logits = False  # and the largest absolute attention score of each layer, on a micro-batch: a forward pass more
eval_iters = 200  # batches per evaluation, from fixed windows of each split
eval_only = False  # evaluate once, write nothing, exit
dry_run = False  # print parameters, FLOPs, and estimates of memory and time, touch nothing, exit
always_save_checkpoint = True  # ckpt.pt at every evaluation; False: only at the end and when interrupted
save_interval = 0  # steps between saves of ckpt.pt; 0: at every evaluation
keep_checkpoints = 2  # of the latest ones: ckpt.pt, and those before it as ckpt-00000500.pt
save_in_background: bool | None = None  # write while training goes on; None: on CUDA only
init_from = "scratch"  # scratch, resume, gpt2, gpt2-medium, ..., owner/model of the hub, or a local folder of one
sample_tokens = 300  # tokens of text printed at the end, 0: none
# wandb
wandb_log = False  # log to Weights & Biases
wandb_project = "owt"  # its project
wandb_run_name = "gpt2"  # its run
# data
dataset = "openwebtext"  # a folder of data/
pack: Literal["none", "document"] = "none"  # document: no token sees another document's; positions begin anew in each
allow_other_data = False  # resume on other data than the saved run's
gradient_accumulation_steps = 5 * 8  # micro-batches per step, over all processes
batch_size = 12  # sequences per micro-batch; times the micro-batches it is the global batch, whoever computes it
# model; None: the data's vocabulary
vocab_size: int | None = None  # rows of the embedding, at least the data's vocabulary, which is the default
bias = False  # in Linears and LayerNorms; without is a bit better and faster
# optimizer
optimizer: Literal[*OPTIMIZER] = "adamw"  # muon: for the matrices of the blocks, AdamW for the rest
learning_rate = 6e-4  # the largest, of AdamW or LAMB
muon_lr = 0.02  # the largest, of Muon
muon_beta = 0.95  # Muon's momentum
max_iters = 600000  # steps
weight_decay = 1e-1  # of matrices and embeddings
beta1 = 0.9  # AdamW's and LAMB's
beta2 = 0.95  # AdamW's and LAMB's
grad_clip = 1.0  # largest gradient norm, 0.0: no clipping
loss_spike = 0.0  # warn of 4 losses in a row above that many times the mean of the 100 before; 0.0: do not
# learning rate: linear warm-up, then what schedule says
schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # down to min_lr; wsd: stable, then a linear decay to it
decay_share = 0.2  # of lr_decay_iters that wsd decays in, at their end; 1.0: from the warm-up on
decay_lr = True  # False: learning_rate throughout, with no warm-up
warmup_iters = 2000  # steps of warm-up
lr_decay_iters = 600000  # the step at which min_lr is reached
min_lr = 6e-5  # the smallest, learning_rate / 10 by Chinchilla; Muon's is in proportion
# system
parallel: Literal["ddp", "fsdp"] = "ddp"  # of several processes each has the whole model, or its share of it
backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # of torch.distributed: nccl on CUDA, gloo elsewhere
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # bfloat16 on a GPU that has it, else float16
tf32 = True  # matrix products of float32 in TF32, on GPUs that have it
compile: bool | None = None  # torch.compile the model; None: on CUDA only
triton = False  # attention by the Triton kernels of kernels.py, on CUDA
seed = 1337  # of weights, batches, dropout
# -----------------------------------------------------------------------------
config, given = configure(globals(), GPTConfig)
MODEL_FIELDS = [field.name for field in fields(GPTConfig)]
# the model fields that a resumed run may change, and the flags that are of one call alone
RESHAPABLE = ("dropout", "attn_dropout", "z_loss", "activation_checkpointing")
PASSING = ("init_from", "out_dir", "eval_only", "dry_run", "allow_other_data")


def restore(saved: dict) -> None:
    """Takes the saved run's settings over into config, except for those on the command line, and says so."""
    theirs = {k: v for k, v in saved["config"].items() if k in config and k not in PASSING}
    model_args = {field.name: field.default for field in fields(GPTConfig)} | saved["model_args"]
    free = (*RESHAPABLE, *(("block_size",) if model_args["position"] != "learned" else ()))  # train short, test long
    theirs |= {k: v for k, v in model_args.items() if k not in free}
    for key, value in theirs.items():
        mine = config[key]
        if key not in given or mine == value:
            config[key] = value
        elif given[key] != "command line":
            config[key] = value
            say(f"resume: keeping {key}={value}; {given[key]} has {mine}, --{key}={mine} changes it")
        elif key in MODEL_FIELDS and key not in free:
            raise UserError(f"--{key}={mine} does not fit the saved model, which has {key}={value}")
        else:
            say(f"resume: {key} was {value}, now {mine}")


def of_weights() -> dict:
    """The fields of pretrained weights' model that were asked for."""
    return {name: config[name] for name in FREE if name in given}


def check_weights(theirs: GPTConfig) -> None:
    """Says which fields of pretrained weights' model were asked for in vain; ValueError: on the command line."""
    for name in (name for name in given if name in MODEL_FIELDS and name not in FREE):
        own, mine = getattr(theirs, name), config[name]
        if own != mine and given[name] == "command line":
            raise UserError(f"--{name}={mine} does not fit {init_from}, which has {name}={own}")
        if own != mine:
            say(f"{init_from}: {name} is {own}, not {mine} as in {given[name]}")


def to_resume() -> str | None:
    """The checkpoint to go on from, if any: --init_from=resume asks for it; torchrun starts anew what it started."""
    resume = config["init_from"] == "resume"
    try:
        path, theirs, skipped = checkpoint.newest(config["out_dir"])
    except ValueError:
        if resume:
            raise
        return None
    if not resume and not set(launches) & set(theirs or []):
        return None  # of an older run
    for why in skipped:
        say(f"resume: skipping a checkpoint: {why}")
    return path


saved = saved_path = meta = None
launches = [launch()]  # of each machine, one of which may be replaced
with user_errors():
    if config["init_from"] == "resume" or (launch() and not config["eval_only"]):
        connect(config["backend"])
        launches = sorted({name for name in gathered(launch()) if name})
        saved_path = by_master(to_resume)
    if saved_path:
        saved = checkpoint.load(saved_path, verify=False, lazily=True)
        again = "resume" if config["init_from"] == "resume" else "started again by torchrun"
        say(f"{again}: going on from {saved_path}, step {saved['iter_num']}")
        config["init_from"] = "resume"
        restore(saved)
globals().update(config)

# -----------------------------------------------------------------------------
# processes, device, precision
with user_errors():
    positive = ("batch_size", "gradient_accumulation_steps", "eval_interval", "log_interval", "eval_iters")
    for name in (*positive, "keep_checkpoints"):
        if config[name] < 1:
            raise UserError(f"--{name}={config[name]} must be at least 1")
    counts = ("seed", "max_iters", "save_interval", "sample_tokens", "warmup_iters")
    for name in (*counts, "min_lr", "weight_decay", "grad_clip", "loss_spike"):
        if config[name] < 0:
            raise UserError(f"--{name}={config[name]} must not be negative")
    decays = decay_lr and schedule != "constant"
    if decays and lr_decay_iters <= warmup_iters:
        raise UserError(
            f"lr_decay_iters={lr_decay_iters} must be greater than warmup_iters={warmup_iters}: the decay "
            f"lies between the two (--schedule=constant has none)"
        )
    for name in ("learning_rate", "muon_lr"):
        if config[name] <= 0:
            raise UserError(f"--{name}={config[name]} must be positive")
    for name in ("beta1", "beta2", "muon_beta"):
        if not 0 <= config[name] < 1:
            raise UserError(f"--{name}={config[name]} must be in [0, 1)")
    if not 0 < decay_share <= 1:
        raise UserError(f"--decay_share={decay_share} must be above 0 and at most 1")
    for name, used, by in (
        ("muon_lr", optimizer == "muon", "--optimizer=muon"),
        ("muon_beta", optimizer == "muon", "--optimizer=muon"),
        ("decay_share", decay_lr and schedule == "wsd", "--schedule=wsd"),
        ("schedule", decay_lr, "--decay_lr=True"),
        ("min_lr", decays, "a schedule that decays"),
    ):
        if given.get(name) == "command line" and not used:
            raise UserError(f"--{name} is used only with {by}")
    if decays and min_lr > learning_rate:
        raise UserError(f"min_lr={min_lr} is above learning_rate={learning_rate}: the decay would go up")
    rows = batch_size * gradient_accumulation_steps  # of the global batch
    if rows % world:
        more = next(n for n in range(gradient_accumulation_steps, 10**9) if n * batch_size % world == 0)
        raise UserError(
            f"the {rows} sequences, gradient_accumulation_steps={gradient_accumulation_steps} times {batch_size}, "
            f"cannot be shared by {world} processes; {more} can (--gradient_accumulation_steps={more}); "
            f"or start {' or '.join(str(n) for n in range(1, 129) if rows % n == 0)} processes"
        )
    device, dtype, amp = pick_device(device, dtype)
    device_type = device.split(":")[0]
    if device == "cuda":
        device = f"cuda:{local_rank}"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    sharded = parallel == "fsdp" and world > 1
    if parallel == "fsdp" and not sharded:
        say("one process: --parallel=fsdp changes nothing")
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if dry_run:
        try:
            meta = read_meta(folder_of(dataset))
        except ValueError as error:
            say(str(error))
        if vocab_size is None:
            config["vocab_size"] = meta["vocab_size"] if meta else VOCAB_SIZE.get(dataset, GPT2_VOCAB_SIZE)
        if not meta and vocab_size is None and init_from == "scratch":
            say(f"until then its vocabulary is taken for {config['vocab_size']:,} (--vocab_size=)")
        if init_from in ("scratch", "resume"):
            shape = GPTConfig(**{k: config[k] for k in MODEL_FIELDS})
        else:
            shape = GPTConfig(**config_of(init_from, of_weights())[1])
            check_weights(shape)
        n_tokens = meta["files"]["train.bin"]["tokens"] if meta else None
        say(report(shape, config, n_tokens, device, dtype, world))
        sys.exit()
    if sharded and save_in_background:
        raise UserError("--save_in_background: with --parallel=fsdp all processes write together, and training waits")
    connect(backend)
    torch.manual_seed(seed)  # the same weights everywhere
compile = device_type == "cuda" if compile is None else compile
torch.set_flush_denormal(True)  # on a CPU the tiniest weights of attention, ALiBi above all, cost several times a zero

# -----------------------------------------------------------------------------
# data and model
with user_errors():
    data_dir = folder_of(dataset)
    prepare = os.path.join(data_dir, "prepare.py")
    missing = not os.path.exists(os.path.join(data_dir, "meta.json"))
    if master and missing and dataset.startswith("shakespeare") and os.path.exists(prepare):  # others take long
        say(f"{dataset} is not prepared yet: running {os.path.relpath(prepare)}")
        if subprocess.run([sys.executable, prepare]).returncode:
            raise UserError(f"{prepare} failed, see above")
    summed(torch.zeros(1))  # the others wait
    meta = read_meta(data_dir)
    if config["vocab_size"] is None:
        config["vocab_size"] = meta["vocab_size"]
    if init_from == "scratch":
        model = GPT(GPTConfig(**{name: config[name] for name in MODEL_FIELDS}))
    elif init_from == "resume":
        model = GPT.from_checkpoint(saved, **{name: config[name] for name in (*RESHAPABLE, "block_size")})
    else:
        model = GPT.from_pretrained(init_from, of_weights())
        if (meta["tokenizer"]["kind"], model.config.vocab_size) != ("gpt2", GPT2_VOCAB_SIZE):
            say(f"{init_from} may know other tokens than those of {dataset}, whose numbers mean something else to it")
        swapped = [f"{name}={config[name]}" for name in FREE if name in given and name not in (*TRAINING, "block_size")]
        new = f"; new to them: {', '.join(swapped)}, so the loss begins higher" if swapped else ""
        say(f"{init_from}: all of its weights carry over, the optimizer starts anew{new}")
        check_weights(model.config)
    if model.config.vocab_size < meta["vocab_size"]:
        raise UserError(f"vocab_size={model.config.vocab_size} is less than the {meta['vocab_size']} ids of {dataset}")
    eot = tokenizer(meta["tokenizer"]).eot if pack == "document" else None
    if pack == "document" and eot is None:
        raise UserError(f"--pack=document: {dataset} has no boundaries of documents, as of one alone")
    data = {split: Tokens(data_dir, split, model.config.block_size) for split in ("train", "val")}
    if triton:
        if device_type != "cuda" or dtype == "float16":
            raise UserError(
                f"--triton: its kernels are for CUDA, in bfloat16 and float32, and this runs on {device_type} in "
                f"{dtype}; --no-triton works"
            )
        model.use_triton()

micro_steps = math.ceil(rows / world / batch_size)  # of this process
tokens_per_step = rows * model.config.block_size

model_args = {name: getattr(model.config, name) for name in MODEL_FIELDS}
model_args["window"] = model.config.span  # a number, whatever the context is later
config |= model_args
c = model.config
shown = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "attention", "heads", "window", "dropout")
choices = {f.name: getattr(c, f.name) for f in fields(GPTConfig) if f.name not in (*shown, "attn_dropout")}
choices = ", ".join(f"{k}={v}" for k, v in choices.items() if v != getattr(GPTConfig, k))
decay_from = warmup_iters if schedule == "cosine" else max(warmup_iters, lr_decay_iters * (1 - decay_share))
rate = f"{schedule if decay_lr else 'constant'} learning rate of {learning_rate}"
rate += f" (Muon's {muon_lr}, momentum {muon_beta})" if optimizer == "muon" else ""
rate += f", down to {min_lr} from step {math.ceil(decay_from)} to {lr_decay_iters}" if decays else ""
slow_beta = c.weight_dropout and with_fields(c, attn_dropout=0.0).linear
say(
    f"{dataset}: {len(data['train']):,} train, {len(data['val']):,} val tokens; source: {meta['source'].get('from')}\n"
    f"{model.num_params() / 1e6:.2f}M parameters: {c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, "
    f"block {c.block_size}, vocabulary {c.vocab_size}\n"
    f"{c.attention} attention, heads {c.heads}{f' (span {c.span})' if c.span is not None else ''}, "
    f"dropout {c.dropout} (on attention weights {c.weight_dropout}"
    f"{', which makes it quadratic in time: --attn_dropout=0' if slow_beta else ''})"
    f"{', documents apart' if pack == 'document' else ''}\n"
    f"unlike GPT-2: {choices or 'nothing'}; {optimizer}, {rate}\n"
    f"{tokens_per_step:,} tokens per step = {rows} sequences x {c.block_size}: {world} processes x {micro_steps} "
    f"micro-batches of {'' if rows == batch_size * micro_steps * world else 'up to '}{batch_size}; {device}, {dtype}"
    f"{', ' + parallel if world > 1 else ''}"
)


def get_batch(step: int) -> tuple[torch.Tensor, ...]:
    """This process's rows of a step's global batch, on the device."""
    return to_device(data["train"].batch(step, rows, seed=seed, rank=rank, world=world))


def to_device(batch: tuple) -> tuple[torch.Tensor, ...]:
    """(x, y) or, with --pack=document, (x, y, positions in their documents)."""
    batch = batch if eot is None else (*batch, positions(batch[0], eot))
    if device_type == "cuda":
        batch = (t.contiguous().pin_memory() for t in batch)  # a copy of anything else would wait for the GPU
        return tuple(t.to(device, non_blocking=True) for t in batch)
    return tuple(t.to(device) for t in batch)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, pos: torch.Tensor | None = None) -> torch.Tensor:
    return model(x, y, pos=pos)[1]


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """torch.compile(model), tried on one micro-batch; where that fails the model itself, saying why.

    Of several processes it is compiled where it is used, inside of DDP, which sends gradients while others are still
    computed, or block by block, which FSDP2 puts together; what fails there is left as it is, with a warning.
    """
    say("compiling the model (a minute or so)...")
    torch._dynamo.config.suppress_errors = world > 1
    if sharded:
        for block in model.transformer.h:
            block.compile()
        return model
    if world > 1:
        return torch.compile(model)
    try:
        fast = torch.compile(model)
        with amp:
            loss_of(fast, *(t[:batch_size] for t in batch)).backward()
    except Exception as error:
        say(f"torch.compile does not work here, going on without it ({type(error).__name__}: {first_line(error)})")
        fast = model
    model.zero_grad(set_to_none=True)
    return fast


# -----------------------------------------------------------------------------
# the model as it is trained, and the optimizers
start, best_val_loss = saved["iter_num"] if saved else 0, math.inf
wandb_id = saved.get("wandb_id") if saved else None  # a resumed run goes on in the same place
with user_errors():
    batch = get_batch(start)
raw_model = model if sharded else model.to(device)
model = eval_model = compiled(model) if compile else model
if world > 1:
    with user_errors():
        model = shared(model, parallel, device, getattr(torch, dtype))
    eval_model = model if sharded else eval_model  # DDP's processes would have to run in step
settings = Settings(learning_rate, (beta1, beta2), weight_decay, device_type in ("cuda", "cpu"), muon_lr, muon_beta)
optimizers = OPTIMIZER[optimizer](raw_model, settings)
for group in (group for o in optimizers for group in o.param_groups):
    group["scale"] = group["lr"] / learning_rate  # of the schedule's learning rate
scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
checksums = {name: entry["sha256"] for name, entry in meta["files"].items()}
if saved:
    if start >= max_iters and not eval_only:
        say(f"resume: the run is at step {start} already, max_iters={max_iters}: a larger --max_iters goes on")
    with user_errors():
        if saved.get("tokenizer", meta["tokenizer"]) != meta["tokenizer"]:
            raise UserError(f"{dataset} has been prepared anew, with another vocabulary than the saved run's")
        other = [name for name, checksum in saved.get("data", {}).items() if checksums.get(name) != checksum]
        if other and not allow_other_data:
            raise UserError(
                f"the saved run was trained on other data than {' and '.join(other)} of {dataset}: "
                f"--allow_other_data goes on all the same"
            )
        if "optimizer" not in saved:
            raise UserError(f"the checkpoint in {out_dir} has no optimizer state to go on with")
        if saved["config"].get("optimizer", "adamw") != optimizer:
            raise UserError(f"--optimizer={optimizer} cannot go on from the state of the saved run's other one")
        for o, state in zip(optimizers, checkpoint.optimizer_states(saved_path, saved, optimizers), strict=True):
            fresh = [{k: v for k, v in group.items() if k != "params"} for group in o.param_groups]
            o.load_state_dict(state)
            for group, wanted in zip(o.param_groups, fresh, strict=True):
                group |= wanted  # a flag wins over what was saved
    theirs = {"pack": "none"} | saved["config"]
    windows = ("dataset", "eval_iters", "batch_size", "block_size", "pack")
    if saved.get("data") and not other and all(config[name] == theirs.get(name) for name in windows):
        best_val_loss = saved["best_val_loss"]  # of the same windows
    else:
        say("resume: evaluation is over other windows, so the best validation loss starts anew")
    scaler.load_state_dict(saved.get("scaler") or scaler.state_dict())  # it is empty of other precisions
in_background = device_type == "cuda" if save_in_background is None else save_in_background
keeper = checkpoint.Keeper(out_dir, keep_checkpoints, in_background, sharded)
keeper.step = start if saved and os.path.basename(saved_path) in (checkpoint.LATEST, "ckpt") else None
saved = None  # what is left of it in memory


def diverged(step: int, what: object) -> NoReturn:
    """Ends the run at a loss or at values that are not finite."""
    if master:
        print(
            f"\nstep {step}: {what}: stopped before the optimizer used that. No checkpoint was changed; a smaller "
            f"--learning_rate, --grad_clip or --dtype=float32 may help",
            file=sys.stderr,
        )
    keeper.wait()
    sys.exit(1)


@contextlib.contextmanager
def forward_pass() -> Iterator[None]:
    """Mixed precision; where the model meets values that are not finite, the run ends."""
    try:
        with amp:
            yield
    except ValueError as error:
        diverged(it, error)


# -----------------------------------------------------------------------------
# one evaluation, one learning rate, one checkpoint
@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    """Mean loss over fixed windows of each split, shared out over the processes; draws no random number.

    Raises ValueError on every process where one cannot read its windows.
    """
    raw_model.eval()
    losses, wrong = {}, ""
    for split, tokens in data.items():
        try:
            batches = list(tokens.eval_batches(eval_iters, batch_size, rank=rank, world=world))
        except (UserError, OSError) as error:
            wrong = str(error)
        if summed(torch.tensor(float(wrong != ""))):  # before anyone computes, together with those who cannot
            raise UserError(wrong or "another process could not read its data")
        total = torch.zeros(2, dtype=torch.float64)  # loss, windows
        for windows in batches:
            with forward_pass():
                loss = loss_of(eval_model, *to_device(windows)).item()
            if (windows[1] >= 0).any():
                total += torch.tensor([loss * len(windows[0]), len(windows[0])])
        total = summed(total)
        losses[split] = (total[0] / total[1]).item()
    raw_model.train()
    return losses


def largest_logits() -> list[float]:
    """Of each layer the largest absolute score, on this process's first micro-batch."""
    raw_model.eval()
    with forward_pass(), torch.compiler.set_stance("force_eager"):
        x, _, *pos = (t.tensor_split(micro_steps)[0] for t in batch)
        largest = raw_model.largest_logits(x, *pos)
    raw_model.train()
    return largest


def get_lr(it: int) -> float:
    """Linear warm-up, then a cosine, or stable and a linear decay, to min_lr, then min_lr; or constant."""
    if not decay_lr:
        return learning_rate
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if schedule == "constant":
        return learning_rate
    progress = min(1.0, max(0.0, it - decay_from) / max(1, lr_decay_iters - decay_from))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return min_lr + left * (learning_rate - min_lr)


def save(it: int, latest: bool, best: bool) -> Exception | None:
    """Hands the run's state after `it` steps to the keeper, which says what is wrong."""
    state = {
        "version": checkpoint.VERSION,
        "model": raw_model.state_dict(),
        "optimizer": [o.state_dict() for o in optimizers],
        "scaler": scaler.state_dict(),
        "model_args": model_args,
        "iter_num": it,  # with the seed and the rank, this is also the state of the random numbers
        "best_val_loss": best_val_loss,
        "config": config,
        "tokenizer": meta["tokenizer"],
        "data": checksums,
        "launch": launches,
        "wandb_id": wandb_id,
    }
    return keeper.save(state, latest, best)


# -----------------------------------------------------------------------------
# logging
peak = peak_flops(device, dtype)
terminal = sys.stdout.isatty()


def step_of(line: str) -> float:
    """The step of a log line; infinity for a line that was cut off."""
    try:
        return json.loads(line)["iter"]
    except (ValueError, KeyError, TypeError):
        return math.inf


if wandb_log and master and not eval_only:
    with user_errors():
        try:
            import wandb

            wandb.init(project=wandb_project, name=wandb_run_name, config=config, id=wandb_id, resume="allow")
            wandb_id = wandb.run.id
        except ImportError:
            raise NotInstalled("--wandb_log needs wandb: pip install wandb") from None
        except wandb.Error as error:
            raise UserError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from None
log_path, log_file = os.path.join(out_dir, checkpoint.LOG), None


def open_log() -> None:
    """Claims out_dir for this run, and opens its log."""
    global log_file
    os.makedirs(out_dir, exist_ok=True)
    log_file = open(log_path, "a+")
    checkpoint.claim(log_file)
    log_file.seek(0)
    kept = [line for line in log_file if step_of(line) < start]  # rows past the checkpoint are trained again
    if init_from != "resume":
        kept = []
        checkpoint.set_aside(out_dir)
    checkpoint.tidy(out_dir)
    replace(log_path, "".join(kept).encode())
    log_file = open(log_path, "a", buffering=1)
    checkpoint.claim(log_file)


if not eval_only:
    with user_errors():
        by_master(open_log)


def log(row: dict, line: str, passing: bool = False) -> None:
    """A row to log.jsonl and wandb, and its line; a passing line is overwritten by the next in a terminal."""
    if log_file:
        try:
            log_file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk ends no run
            say(f"\ncannot write {log_path} ({error}): going on without that line")
        if wandb_log:
            lists = {f"{k}/{i}": x for k, xs in row.items() if isinstance(xs, list) for i, x in enumerate(xs)}
            wandb.log({k: x for k, x in row.items() if not isinstance(x, list)} | lists, step=row["iter"])
    if terminal:
        line = "\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K"
    say(line, end="" if terminal and passing else "\n")


stop_signal, stopped_at = 0, 0.0


def on_signal(number: int, frame: object) -> None:
    """Asks for a stop at the end of the step; a second signal, not torchrun's copy of the first, stops at once."""
    global stop_signal, stopped_at
    if stop_signal and time.monotonic() - stopped_at > 1:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    elif not stop_signal:
        stop_signal, stopped_at = number, time.monotonic()
        if master:  # print may be what was interrupted
            os.write(2, b"\nstopping after this step (once more: at once)\n")


if not eval_only:
    signal.signal(signal.SIGINT, on_signal)
    signal.signal(signal.SIGTERM, on_signal)

# -----------------------------------------------------------------------------
# what a step has been like: read from the device, agreed on by all processes
lag = int(device_type == "cuda" and optimizer == "adamw" and not scaler.is_enabled())  # steps, for no wait
waiting = collections.deque()  # (step, learning rate, status, when it has arrived, scores), of the steps not read yet
recent = collections.deque(maxlen=100)  # losses
high = 0  # losses in a row that were too high


def settle(left: int) -> None:
    """Reads the status of all but the last `left` steps: ends the run, asks for its end, or logs the step."""
    global stop, failed, overflowed, it, since, since_it, high
    while len(waiting) > left:
        step, lr, status, arrived, largest = waiting.popleft()
        if arrived is not None:
            arrived.synchronize()
        loss, norm, stopping, failing = status.tolist()
        stop, overflowed = stop or stopping > 0, not math.isfinite(norm)
        if failing:
            failed, it = True, step
            waiting.clear()
            return
        if not math.isfinite(loss) or (overflowed and (not scaler.is_enabled() or scaler.get_scale() < 1)):
            diverged(step, f"the loss is {loss} and the gradient norm {norm}")
        if loss_spike and len(recent) == recent.maxlen:
            high = high + 1 if loss > loss_spike * sum(recent) / len(recent) else 0
            if high == 4:
                say(f"\nstep {step}: the loss, {loss:.4f}, has been above {loss_spike} times its mean for 4 steps")
        recent.append(loss)
        if step % log_interval == 0 and master:
            seconds = (time.perf_counter() - since) / (step + 1 - since_it)
            speed = tokens_per_step / seconds
            row = {"iter": step, "loss": loss, "lr": lr, "norm": norm, "ms": seconds * 1e3, "tokens_per_s": speed}
            line = f"iter {step}: loss {loss:.4f}, time {seconds * 1e3:.2f}ms, {speed:,.0f} tok/s, norm {norm:.3f}"
            if largest:
                row["max_logit"] = largest
                line += f", largest logit {max(largest):.2f}"
            if peak:
                row["mfu"] = raw_model.flops() * speed / (peak * world)
                line += f", mfu {row['mfu'] * 100:.2f}%"
            if terminal:
                line += f", {(max_iters - step) * seconds / 60:.1f} min left"
            log(row, line, passing=True)
            since, since_it = time.perf_counter(), step + 1


# -----------------------------------------------------------------------------
# training
model.train()
generator = {"cuda": torch.cuda, "mps": torch.mps}.get(device_type, torch.default_generator)  # of dropout
loader = ThreadPoolExecutor(1, initializer=lambda: device_type == "cuda" and torch.cuda.set_device(device))
it, stop, failed, overflowed, problem = start, False, False, False, ""
since, since_it = time.perf_counter(), start  # of the last log line
while True:
    # evaluation and checkpoints, of the weights after `it` steps
    evaluated = eval_only or it % eval_interval == 0 or it == max_iters
    due = it % save_interval == 0 if save_interval else evaluated and always_save_checkpoint
    if evaluated or due or stop or it >= max_iters:
        settle(0)
    pause, best = time.perf_counter(), False
    if evaluated and not failed:
        try:
            losses = estimate_loss()
        except ValueError as error:
            failed, problem = True, str(error)
        else:
            if not all(map(math.isfinite, losses.values())):
                diverged(it, f"the losses of the evaluation are {losses}")
            row = {"iter": it, "train_loss": losses["train"], "val_loss": losses["val"]}
            log(row, f"step {it}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
            best = losses["val"] <= best_val_loss and it > 0 and not eval_only  # <: a kill could lose the file alone
            best_val_loss = losses["val"] if best else best_val_loss
    if eval_only:
        break
    last = it >= max_iters or stop or failed
    latest = it > start and (due or last)
    if latest or best:
        wrong = save(it, latest, best)
        if isinstance(wrong, ValueError):
            problem = str(wrong)
        elif wrong and not last:
            say(f"\n{wrong}. Training goes on, and the next save tries again")
    if last:
        break
    since += time.perf_counter() - pause  # the clock of the log line stands still meanwhile

    # one step, on the mean of the micro-batches' gradients
    upcoming = loader.submit(get_batch, it + 1)  # meanwhile
    lr = get_lr(it)
    for group in (group for o in optimizers for group in o.param_groups):
        group["lr"] = lr * group["scale"]
    generator.manual_seed(((seed * 1_000_003 + it) * 4096 + rank) % 2**63)  # whatever came before, as after a resume
    largest = largest_logits() if log_logits and it % log_interval == 0 else None
    loss = torch.zeros((), device=device)
    for micro, part in enumerate(zip(*(t.tensor_split(micro_steps) for t in batch), strict=True)):
        if world > 1 and not sharded:
            model.require_backward_grad_sync = micro == micro_steps - 1
        with forward_pass():
            micro_loss = loss_of(model, *part) * (len(part[0]) / len(batch[0]))
        loss += micro_loss.detach()
        scaler.scale(micro_loss).backward()
    for o in optimizers:
        scaler.unscale_(o)
    norm = whole(torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf))
    # what all processes must agree on: the loss, the norm, and whether one was told to stop or cannot go on
    flags = (torch.full((), float(flag), device=device) for flag in (stop_signal != 0, problem != ""))
    status = summed(torch.stack((loss / world, norm / world, *flags)))
    arrived = None
    if lag:  # the optimizer itself leaves the weights alone where the status is bad, before anyone has read that
        optimizers[0].found_inf = (~status[:2].isfinite().all() | (status[3] > 0)).float()
        status, arrived = status.to("cpu", non_blocking=True), torch.cuda.Event()
        arrived.record()
    waiting.append((it, lr, status, arrived, largest))
    settle(lag)
    if not failed and not (overflowed and scaler.is_enabled()):  # then none steps, also not one without inf
        for o in optimizers:
            scaler.step(o)
    scaler.update()
    model.zero_grad(set_to_none=True)
    if failed:
        continue
    try:
        batch = upcoming.result()
    except (UserError, OSError) as error:
        problem = str(error)  # one more step, which is not made, tells the others
    it += 1


# -----------------------------------------------------------------------------
def first_tokens() -> tuple[list[int], int]:
    """What the sample begins with, and the size of its vocabulary."""
    tok = tokenizer(meta["tokenizer"])
    newline = "\n" in meta["tokenizer"].get("vocab", "\n")
    return tok.start("\n") if newline else data["val"].ids[:1].tolist(), tok.n_vocab


signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
keeper.wait()
if not eval_only:
    say(f"{it - start} steps; {time.perf_counter() - _began:.1f} s with everything after the imports")
if keeper.error:
    fail(keeper.error)
if failed:
    kept = f"; {out_dir} is saved" if it > start and not eval_only else ""
    if problem or master:
        print(f"\nstep {it}: {problem or 'another process cannot go on'}{kept}", file=sys.stderr)
elif stop:
    say(f"\nstopped by signal after {it} steps; {out_dir} is saved: --init_from=resume --out_dir={out_dir} goes on")
elif sample_tokens and not eval_only and (master or sharded):
    try:
        start_ids, n_vocab = by_master(first_tokens) if sharded else first_tokens()
        with amp, torch.compiler.set_stance("force_eager"):
            prompt = torch.tensor([start_ids], device=device)
            ids = raw_model.eval().generate(prompt, sample_tokens, 0.8, vocab_size=n_vocab, seed=seed)
        if master:
            text = tokenizer(meta["tokenizer"]).decode(ids[0].tolist())
            if wandb_log:
                wandb.log({"sample": wandb.Html(f"<pre>{html.escape(text)}</pre>")})
            say(f"\na sample (more of them: python sample.py --out_dir={out_dir}):\n{text}")
    except (UserError, OSError) as error:  # the run itself is done and saved
        say(f"\nno sample: {error}")
if wandb_log and master and not eval_only:
    wandb.finish()
if world > 1:
    torch.distributed.destroy_process_group()
if failed or stop:
    sys.exit(2 if failed else 128 + (stop_signal or signal.SIGTERM))  # another process was told
