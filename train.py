"""Trains a GPT, on one CPU, one GPU or many.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char_cpu.py --attention=laser
    torchrun --standalone --nproc_per_node=4 train.py config/train_shakespeare_char.py
    python train.py config/train_shakespeare_char_cpu.py --import=my --attention=mine

The last line trains an attention of your own, from a file my.py. --qkv= and --position= take your
ways to make queries, keys and values, and your positions (README.md, "Add your own").

Writes to out_dir: ckpt.pt (the latest state), best.pt (the state with the lowest validation loss)
and log.jsonl. Ctrl-C and SIGTERM end a run after the current step, with a checkpoint. A loss that
is NaN or infinite ends the run where it next logs, evaluates or saves, with exit code 1; no
checkpoint has such numbers.

Read it from top to bottom: flags, set-up, one batch, one loss, one evaluation, one checkpoint, the
loop. training/run.py has what a run needs around its loop: resuming, checks of flags, the first
lines, signals.
"""

import atexit
import math
import os
import sys
from types import SimpleNamespace
from typing import Literal

from configurator import DTYPE, configure, pick_device, user_errors

import torch
from torch import Tensor, nn

from attention.cache import run_definitions
from errors import NotFinite, UserError, note
from model import GPT, GPTConfig
from text.dataset import Tokens, folder_of, prepare_small, read_meta
from training import checkpoint, context, run
from training.distributed import by_master, connect, count, data_parallel, rank, say, summed, world
from training.estimate import mfu
from training.log import Log, diverged
from training.optimizers import OPTIMIZER
from training.origin import origin

# -----------------------------------------------------------------------------
# flags; GPT-2 (124M) on OpenWebText by default. The fields of GPTConfig are flags too.

# What is the model trained on?
dataset = "openwebtext"  # the data set: the name of a folder in data/, or the path of a folder
allow_other_data = False  # resume even if the data set has changed since the run was saved

# Which weights does it start from?
init_from = "scratch"  # scratch, resume, gpt2, gpt2-medium, ..., a model of the hub, a local folder
seed = 1337  # decides all random numbers: new weights, which batches are drawn, dropout

# How long is the training, and how large is a step?
max_iters = 600000  # steps in total
gradient_accumulation_steps = 5 * 8  # micro-batches per step, of all processes together
batch_size = 12  # sequences per micro-batch; a step has batch_size * gradient_accumulation_steps

# Which optimizer?
optimizer: "Literal[*OPTIMIZER]" = "adamw"  # muon: for the blocks' matrices, AdamW for the rest
weight_decay = 1e-1  # weight decay of matrices and embeddings; biases and norms have none
beta1 = 0.9  # AdamW: decay rate of the mean of the gradients
beta2 = 0.95  # AdamW: decay rate of the mean of the squared gradients
adam_eps: float | None = None  # AdamW's epsilon; None: 1e-8
muon_beta = 0.95  # Muon: its momentum
grad_clip = 1.0  # a gradient with a larger norm is scaled down to this norm; 0.0: never

# How does the learning rate change?
learning_rate = 6e-4  # the highest learning rate, except Muon's
muon_lr = 0.02  # the highest learning rate, of Muon
schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # wsd: constant, then linear decay
decay_share = 0.2  # wsd: decay in this share of lr_decay_iters; 1.0: right after the warm-up
decay_lr = True  # False: the learning rate is constant and has no warm-up
warmup_iters = 2000  # steps in which the learning rate grows from almost 0 to its highest value
lr_decay_iters = 600000  # step at which the learning rate reaches min_lr; often max_iters
min_lr = 6e-5  # the lowest learning rate, often learning_rate / 10; Muon's is in proportion

# What is measured and printed?
eval_interval = 2000  # steps between two evaluations
eval_iters = 200  # batches of each split in an evaluation; every evaluation uses the same batches
eval_only = False  # evaluate once, write nothing, and exit
gpus = "1 x A100"  # dry_run for these GPUs, such as "8 x H100"
dry_run = False  # only print the number of parameters, FLOPs, and estimates of memory and time
log_interval = 1  # steps between two lines of the log
sample_tokens = 300  # length of the text that the model writes at the end, in tokens; 0: no text
wandb_log = False  # also log to Weights & Biases; to trackio, where only that is installed
wandb_project = "owt"  # name of the project in Weights & Biases
wandb_run_name = "gpt2"  # name of the run in Weights & Biases

# What is saved, and where?
out_dir = "out"  # the folder for checkpoints and log.jsonl
always_save_checkpoint = True  # at every evaluation; False: at the end and if interrupted
save_interval = 0  # steps between two saves of ckpt.pt; 0: at every evaluation
keep_checkpoints = 2  # the latest to keep: ckpt.pt, before it ckpt-00000500.pt and so on

# What does it run on, and how?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: DTYPE = "auto"  # auto: 16 bits on CUDA, else 32
tf32 = True  # compute matrix products of float32 in TF32, on GPUs that can
compile: bool | None = None  # compile the model with torch.compile; None: only on CUDA
plain = False  # run the definitions of the attentions themselves: slow, to study and to compare
parallel: Literal["ddp", "fsdp", "context"] = "ddp"  # fsdp cuts the weights, context the sequences
context_processes = 0  # parallel=context: processes that share a sequence; 0: all
backend = "auto"  # auto, nccl: nccl for tensors on CUDA, else gloo; or gloo, mpi

# fields of GPTConfig that have another default here
vocab_size: int | None = None  # number of different tokens; None: as many as the data set has
bias = False  # biases in Linears and LayerNorms; False is a bit better and faster
# -----------------------------------------------------------------------------
# set-up: the flags, the device and the processes, the data, the model
config, given = configure(globals(), GPTConfig)
with user_errors():
    # a resumed run has its saved settings, changed by the flags on the command line
    config, saved, weights = run.settings_of(config, given)  # saved: of a resumed run, or None
    globals().update(config)
    # the number of processes that share each sequence
    sharing = (context_processes or world) if parallel == "context" else 1
    run.check_flags(config, sharing)
    if dry_run:
        run.print_estimates(config)
        sys.exit()

    # the device, and the other processes
    device, dtype, amp = pick_device(device, dtype)  # amp: the context of mixed precision
    device_type = device.split(":")[0]
    connect(backend)
    start = saved["iter_num"] if saved else 0  # steps that are done
    launches = run.launches(start)

    # the data
    by_master(lambda: prepare_small(dataset))
    data_dir = folder_of(dataset)
    meta = read_meta(data_dir)
    checksums = {name: entry["sha256"] for name, entry in meta["files"].items()}
    if vocab_size is None:
        config["vocab_size"] = meta["vocab_size"]

    # the model
    torch.manual_seed(seed)  # the same weights everywhere
    model_args = run.model_args(config)
    if init_from == "scratch":
        model = GPT(GPTConfig(**model_args))
    else:
        state = weights()
        if state.get("tokenizer", meta["tokenizer"]) != meta["tokenizer"]:
            raise UserError(f"{dataset} has another vocabulary than the data of {init_from}")
        model = checkpoint.model_of(state, **model_args)
    if plain:
        run_definitions(model)

    # from here on block_size, n_embd, vocab_size ... are the model's
    model_args = vars(model.config)
    config |= model_args
    globals().update(model_args)
    if vocab_size < meta["vocab_size"]:
        raise UserError(
            f"vocab_size={vocab_size} is less than the {meta['vocab_size']} tokens of {dataset}"
        )
    data = {split: Tokens(data_dir, split, config["block_size"]) for split in ("train", "val")}
    parts = context.Parts(sharing, model) if sharing > 1 else None
    place = {"rank": rank // sharing, "world": world // sharing}  # among those that share none
c = SimpleNamespace(**config)  # the settings as they are saved
made_by = origin(model.config)
run.describe(c, model, data["train"], device, dtype)
if compile is None:
    compile = device_type == "cuda"
rows = batch_size * gradient_accumulation_steps  # sequences of a step, of all processes together
micro_steps = math.ceil(rows / place["world"] / batch_size)  # micro-batches of this process
sharded = parallel == "fsdp" and world > 1  # each process has a part of every weight


# -----------------------------------------------------------------------------
# one batch, one loss, one learning rate, one evaluation, one checkpoint
def get_batch(step: int) -> tuple:
    """This process's rows of a step's global batch, on the device: x and y, (rows / world, T)."""
    return to_device(*data["train"].batch(step, rows, seed=seed, **place))


def to_device(x: Tensor, y: Tensor) -> tuple:
    """(x, y) on the device; this process's part of the sequences, if it shares them."""
    if parts:
        x, y = parts.mine(x), parts.mine(y)
    if device_type != "cuda":
        return x.to(device), y.to(device)
    # only pinned memory is copied while the GPU computes
    return tuple(t.contiguous().pin_memory().to(device, non_blocking=True) for t in (x, y))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a micro-batch. --parallel=context refuses here a layer that has a state."""
    with user_errors(), amp:
        return model(x, y, parts)[1]


def get_lr(it: int) -> float:
    """Linear warm-up; then constant, or down to min_lr, as a cosine or (wsd) late and linear."""
    if not decay_lr:
        return learning_rate
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if schedule == "constant":
        return learning_rate

    # the share of the decay that is over, from 0 to 1
    decay_start = warmup_iters
    if schedule == "wsd":
        decay_start = max(warmup_iters, lr_decay_iters * (1 - decay_share))
    progress = min(1.0, max(0.0, it - decay_start) / max(1, lr_decay_iters - decay_start))

    coeff = 1.0 - progress
    if schedule == "cosine":
        coeff = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr + coeff * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    """{split: mean loss} over fixed windows, which the processes share. No random numbers."""
    raw_model.eval()
    means = {}
    for split, tokens in data.items():
        total = windows = 0
        for x, y in tokens.eval_batches(eval_iters, batch_size, **place):
            loss = loss_of(eval_model, *to_device(x, y)).item()
            n = (y[:, 0] >= 0).sum().item()  # 0 on a process that has a window less than others
            if n:
                total += loss * n
                windows += n
        total, windows = summed(torch.tensor([total, windows], dtype=torch.float64)).tolist()
        means[split] = total / windows
    raw_model.train()
    return means


def save(it: int, best_val_loss: float, name: str) -> OSError | None:
    """Saves the state after `it` steps as checkpoint.LATEST or checkpoint.BEST.

    Returns the error if the disk is full; the training goes on, and the next save tries again.
    """
    state = {
        "version": checkpoint.VERSION,
        # what training goes on from
        "model": checkpoint.gathered(raw_model.state_dict()),
        "optimizer": [checkpoint.gathered(o.state_dict()) for o in optimizers],
        "scaler": scaler.state_dict(),
        "model_args": model_args,
        # how far the run is, and its settings
        "iter_num": it,  # random numbers depend only on the seed, this step and the rank
        "best_val_loss": best_val_loss,
        "config": vars(c),
        # what it is trained on, and what made it
        "tokenizer": meta["tokenizer"],
        "data": checksums,
        "launch": launches,
        "origin": made_by,
    }
    try:
        by_master(lambda: saver.save(state, name))
    except NotFinite as error:
        diverged(it, error)
    except OSError as error:
        note(f"\n{error}")
        return error


# -----------------------------------------------------------------------------
# the model as it is trained, the optimizers and the log
it = start
batch = get_batch(it)
raw_model = model  # without compilation and DDP around it
if not sharded:  # a sharded model is still on the CPU, where this would take long
    model.to(device)
    run.try_causality(model)
# only now, since the rounding of TF32 would look like later tokens
torch.set_float32_matmul_precision("high" if tf32 else "highest")
if compile:
    torch._dynamo.reset()  # an interpreter that has compiled five models would compile no other
    torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs uncompiled
    say("compiling the model in its first steps (about a minute; --no-compile trains without it)")
    if not sharded:
        model = torch.compile(model)
    else:
        for block in model.transformer.h:  # FSDP2 wraps blocks, DDP the compiled model
            block.compile()
eval_model = model  # without DDP: an evaluation needs no communication
if world > 1:
    model = data_parallel(model, parallel, device_type, getattr(torch, dtype))

optimizers = OPTIMIZER[optimizer](raw_model, c)
scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
best_val_loss = math.inf  # of best.pt
with user_errors():
    if saved:
        best_val_loss = run.best_loss(c, saved, checksums)
        checkpoint.restore(saved, optimizers, scaler)
    log = Log(c, start, made_by, mfu(raw_model, device, dtype))
saver = checkpoint.Saver(out_dir, keep_checkpoints, best_val_loss == math.inf)
saved = weights = state = None  # frees their memory, and the file that holds them

param_groups = [group for o in optimizers for group in o.param_groups]
for group in param_groups:
    group["lr_scale"] = group["lr"] / learning_rate  # relative to the schedule's learning rate
stop = 0  # the signal that stops the run

# -----------------------------------------------------------------------------
# training
model.train()
with run.caught_signals(not eval_only) as signals:
    while True:
        # what is due after `it` steps?
        last = eval_only or it >= max_iters or stop
        evaluates = eval_only or (not stop and (it % eval_interval == 0 or it == max_iters))
        saves = evaluates and always_save_checkpoint
        if save_interval:
            saves = it % save_interval == 0
        latest = it > start and (saves or last)  # never with eval_only, which makes no step

        # evaluation and checkpoints
        unsaved = None  # the error of the last save
        if evaluates:
            losses = estimate_loss()
            log.evaluation(it, losses)
        best = evaluates and it > 0 and losses["val"] < best_val_loss and not eval_only
        if best:
            unsaved = save(it, losses["val"], checkpoint.BEST)
            if not unsaved:
                best_val_loss = losses["val"]
        if latest:
            unsaved = save(it, best_val_loss, checkpoint.LATEST) or unsaved
        if evaluates or latest:
            log.restart(it)  # their time is in no step's
        if last:
            break

        # dropout's random numbers depend on seed, step and rank: a resumed run draws the same
        torch.manual_seed(((seed * 1_000_003 + it) * 4096 + rank) % 2**63)
        lr = get_lr(it)
        for group in param_groups:
            group["lr"] = lr * group["lr_scale"]

        # forward and backward passes: the mean of the micro-batches' gradients
        micro_batches = zip(*(t.tensor_split(micro_steps) for t in batch), strict=True)
        loss = torch.zeros((), device=device)
        for micro_step, micro_batch in enumerate(micro_batches):
            if world > 1 and not sharded:
                model.require_backward_grad_sync = micro_step == micro_steps - 1
            micro_loss = loss_of(model, *micro_batch) * (len(micro_batch[0]) / len(batch[0]))
            loss += micro_loss.detach()
            scaler.scale(micro_loss).backward()

        # clip the gradient
        for o in optimizers:
            scaler.unscale_(o)
        grad_norm = nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
        if sharded:
            grad_norm = grad_norm.full_tensor()

        # the next batch, while a GPU still computes; the log waits for the GPU
        next_batch = get_batch(it + 1)
        if it % log_interval == 0:  # a loss or norm that is not finite ends the run here
            loss, norm_of_all = summed(torch.stack((loss, grad_norm)) / world).tolist()
            log.step(it, loss, norm_of_all, lr, scaled=scaler.get_scale() > 1)

        # step the optimizers; not where the gradients of float16 have overflowed
        if not scaler.is_enabled() or grad_norm.isfinite():
            for o in optimizers:
                scaler.step(o)
        scaler.update()
        model.zero_grad()
        batch = next_batch
        it += 1
        stop = run.stopped_by(signals)

# the end
log.close()
if sample_tokens and not (eval_only or stop or unsaved):
    with user_errors():
        run.print_sample(c, raw_model, meta, amp, device)
code = 0
if unsaved:
    code = 2
elif stop:
    code = 128 + stop
    say(f"\nstopped by signal after {count(it, 'step')} and saved: --init_from=resume goes on")
if world > 1:
    atexit.register(os._exit, code)  # a thread of PyTorch that still runs could abort the process
sys.exit(code)
