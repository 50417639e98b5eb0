"""Trains a GPT, on one CPU, one GPU or many.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char_cpu.py --attention=laser
    torchrun --standalone --nproc_per_node=4 train.py config/train_shakespeare_char.py

Writes ckpt.pt (the latest state), best.pt (the lowest validation loss) and log.jsonl to out_dir.

This file is read from top to bottom: flags, set-up, one batch, one loss, one evaluation, the loop. What a run needs
around its loop is in training/run.py: resuming, checks of flags, signals, the end. Where a loss or a gradient is NaN
or infinite the run ends, with exit code 1 and no new checkpoint. Ctrl-C and SIGTERM end it after the step, with one.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from configurator import NotFinite, UserError, configure, user_errors  # first: from here on Ctrl-C prints a sentence

# isort: split
import torch

from attention.probe import largest_logits
from model import GPT, GPTConfig
from text.dataset import Tokens, positions
from training import checkpoint
from training.distributed import rank, say, shared, summed, whole, world
from training.log import Log
from training.optimizers import OPTIMIZER, Settings
from training.run import MODEL_FIELDS, RESHAPABLE, Agreement, Run, diverged, finish, read_by_all

_began = time.perf_counter()

# -----------------------------------------------------------------------------
# flags; GPT-2 (124M) on OpenWebText by default. The fields of GPTConfig are flags too.
# I/O
out_dir = "out"  # where checkpoints and the log go
eval_interval = 2000  # steps between evaluations
log_interval = 1  # steps between log lines
log_logits = False  # log the largest absolute attention score of each layer too, which costs a forward pass
eval_iters = 200  # batches per evaluation, always the same pieces of each split
eval_only = False  # evaluate once, write nothing, exit
dry_run = False  # print parameters, FLOPs, and estimates of memory and time, touch nothing, exit
always_save_checkpoint = True  # ckpt.pt at every evaluation; False: only at the end and when interrupted
save_interval = 0  # steps between saves of ckpt.pt; 0: at every evaluation
keep_checkpoints = 2  # how many of the latest: ckpt.pt, and the ones before it as ckpt-00000500.pt
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
allow_other_data = False  # resume although the data are not those of the saved run
gradient_accumulation_steps = 5 * 8  # micro-batches per step, over all processes
batch_size = 12  # sequences per micro-batch; batch_size * gradient_accumulation_steps: in a step of all processes
# model
vocab_size: int | None = None  # rows of the embedding, at least the data's vocabulary, which is the default
bias = False  # in Linears and LayerNorms; False is a bit better and faster
# optimizer
optimizer: Literal[*OPTIMIZER] = "adamw"  # muon: for the matrices of the blocks, AdamW for the rest
learning_rate = 6e-4  # the peak, of AdamW or LAMB
muon_lr = 0.02  # the peak, of Muon
muon_beta = 0.95  # Muon's momentum
max_iters = 600000  # steps
weight_decay = 1e-1  # of matrices and embeddings
beta1 = 0.9  # AdamW's and LAMB's
beta2 = 0.95  # AdamW's and LAMB's
grad_clip = 1.0  # largest gradient norm, 0.0: no clipping
loss_spike = 0.0  # warn if 4 losses in a row exceed this many times the mean of the last 100; 0.0: never
# learning rate: linear warm-up, then what schedule says
schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # down to min_lr; wsd: stable, then a linear decay to it
decay_share = 0.2  # wsd: the share of lr_decay_iters, at their end, in which it decays; 1.0: from the warm-up on
decay_lr = True  # False: learning_rate throughout, with no warm-up
warmup_iters = 2000  # steps of warm-up
lr_decay_iters = 600000  # the step at which min_lr is reached
min_lr = 6e-5  # the smallest, learning_rate / 10 by Chinchilla; for Muon in proportion to its peak
# system
parallel: Literal["ddp", "fsdp"] = "ddp"  # several processes: each has the whole model (ddp) or a share of it (fsdp)
backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # of torch.distributed: nccl on CUDA, gloo elsewhere
device = "auto"  # auto (cuda, mps or cpu, the first there is), cpu, cuda, cuda:0, mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # bfloat16 on a GPU that has it, else float16
tf32 = True  # matrix products of float32 in TF32, on GPUs that have it
compile: bool | None = None  # torch.compile the model; None: on CUDA only
triton = False  # attention by the Triton kernels of attention/kernels.py, on CUDA
plain = False  # attention by the definitions of model.py as they stand: slow, for study and for comparison
seed = 1337  # of weights, batches, dropout
# -----------------------------------------------------------------------------
config, given = configure(globals(), GPTConfig)

# -----------------------------------------------------------------------------
# set-up: what to resume, processes and device; data; the model
with user_errors():
    run = Run(config, given)  # puts a resumed run's settings into config
    globals().update(config)
    data_dir, meta = run.prepared()
    if vocab_size is None:
        config["vocab_size"] = meta["vocab_size"]
    if init_from == "scratch":
        model = GPT(GPTConfig(**{name: config[name] for name in MODEL_FIELDS}))
    elif init_from == "resume":
        model = checkpoint.model_of(run.saved, **{name: config[name] for name in (*RESHAPABLE, "block_size")})
    else:
        model = run.pretrained_model(meta)
    eot = run.check_data(model, meta)  # the token between documents, with --pack=document
    data = {split: Tokens(data_dir, split, model.config.block_size) for split in ("train", "val")}
    if triton:
        run.use_triton(model)
    if plain:
        model.run_definitions()

model_args = vars(model.config) | {"window": model.config.resolved().window}  # block_size changes it no more
config |= model_args
run.describe(model, data, meta)


# -----------------------------------------------------------------------------
# one batch, one loss, one learning rate, one evaluation, one checkpoint
def get_batch(step: int) -> tuple[torch.Tensor, ...]:
    """This process's rows of a step's global batch, on the device."""
    return to_device(data["train"].batch(step, run.rows, seed=seed, rank=rank, world=world))


def to_device(batch: tuple) -> tuple[torch.Tensor, ...]:
    """(x, y) or, with --pack=document, (x, y, positions in their documents)."""
    batch = batch if eot is None else (*batch, positions(batch[0], eot))
    if run.device_type == "cuda":
        batch = (t.contiguous().pin_memory() for t in batch)  # only pinned memory is copied while the GPU computes
        return tuple(t.to(run.device, non_blocking=True) for t in batch)
    return tuple(t.to(run.device) for t in batch)


@contextlib.contextmanager
def forward_pass() -> Iterator[None]:
    """Mixed precision. Ends the run if the model meets a NaN or an infinity."""
    try:
        with run.amp:
            yield
    except NotFinite as error:
        diverged(it, error, keeper)


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, pos: torch.Tensor | None = None) -> torch.Tensor:
    """The mean loss of a micro-batch."""
    with forward_pass():
        return model(x, y, pos=pos)[1]


def get_lr(it: int) -> float:
    """Linear warm-up, then a cosine, or stable and a linear decay, to min_lr, then min_lr; or constant."""
    if decay_lr and it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if not run.decays:
        return learning_rate
    progress = min(1.0, max(0.0, it - run.decay_from) / max(1, lr_decay_iters - run.decay_from))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return min_lr + left * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss() -> dict[str, float] | None:
    """Mean loss over fixed windows of each split, shared out over the processes; draws no random number.

    Returns None if a process is asked to stop meanwhile. If one cannot read its data, all of them raise UserError.
    """
    raw_model.eval()
    losses = {}
    for split, tokens in data.items():
        total = torch.zeros(2, dtype=torch.float64)  # loss, windows
        for windows in read_by_all(tokens.eval_batches(eval_iters, batch_size, rank=rank, world=world)):
            if agreement.stops_now():
                return None
            loss = loss_of(eval_model, *to_device(windows)).item()
            if (windows[1] >= 0).any():  # a process with fewer windows than others gets some without targets
                total += torch.tensor([loss * len(windows[0]), len(windows[0])])
        total = summed(total)
        losses[split] = (total[0] / total[1]).item()
    raw_model.train()
    return losses


def evaluate(it: int) -> bool:
    """Logs the losses of both splits after `it` steps. Returns whether the validation loss is the lowest so far."""
    global best_val_loss
    try:
        losses = estimate_loss()
    except (UserError, OSError) as error:
        agreement.fail(str(error))
        return False
    if losses is None:
        return False
    if not all(map(math.isfinite, losses.values())):
        diverged(it, f"the losses of the evaluation are {losses}", keeper)
    log.evaluation(it, losses)
    # <=, not <: after a crash between writing ckpt.pt and best.pt, an equal loss must write best.pt again
    best = losses["val"] <= best_val_loss and it > 0 and not eval_only
    best_val_loss = losses["val"] if best else best_val_loss
    return best


def largest_of_layers() -> list[float]:
    """Of each layer the largest absolute attention score, on this process's first micro-batch."""
    raw_model.eval()
    with forward_pass(), torch.compiler.set_stance("force_eager"):
        x, _, *pos = (t.tensor_split(run.micro_steps)[0] for t in batch)
        largest = largest_logits(raw_model, x, *pos)
    raw_model.train()
    return largest


def save(it: int, latest: bool, best: bool, last: bool) -> None:
    """Writes the run's state after `it` steps as the latest checkpoint, the best, or both."""
    state = {
        "version": checkpoint.VERSION,
        "model": raw_model.state_dict(),
        "optimizer": [o.state_dict() for o in optimizers],
        "scaler": scaler.state_dict(),
        "model_args": model_args,
        "iter_num": it,  # random numbers depend on the seed, this and the rank alone
        "best_val_loss": best_val_loss,
        "config": config,
        "tokenizer": meta["tokenizer"],
        "data": {name: entry["sha256"] for name, entry in meta["files"].items()},
        "launch": run.launches,
        "wandb_id": log.wandb_id,
    }
    error = keeper.save(state, latest, best)
    if isinstance(error, UserError):  # weights that are not finite
        agreement.problem = str(error)
    elif error and not last:
        say(f"\n{error}. Training goes on, and the next save tries again")


# -----------------------------------------------------------------------------
# the model as it is trained, the optimizers, checkpoints and the log
it = run.start
with user_errors():
    keeper = run.keeper()
    batch = get_batch(it)
raw_model = model if run.sharded else model.to(run.device)  # without compilation and DDP around it
if compile or (compile is None and run.device_type == "cuda"):  # it is tried on the first micro-batch
    model = run.compiled(model, lambda fast: loss_of(fast, *(t[:batch_size] for t in batch)).backward())
eval_model = model  # without DDP, whose processes would need equal numbers of batches; FSDP2 shards it in place
if world > 1:
    with user_errors():
        model = shared(model, parallel, run.device, getattr(torch, run.dtype))
fused = run.device_type in ("cuda", "cpu")
settings = Settings(learning_rate, (beta1, beta2), weight_decay, fused, muon_lr, muon_beta)
optimizers = OPTIMIZER[optimizer](raw_model, settings)
for group in (group for o in optimizers for group in o.param_groups):
    group["scale"] = group["lr"] / learning_rate  # a factor of the schedule's learning rate
scaler = torch.amp.GradScaler(run.device_type, enabled=run.dtype == "float16")
with user_errors():
    best_val_loss = run.restore(meta, optimizers, scaler)
    log = Log(run, raw_model)
run.saved = None  # frees the memory of the checkpoint that was loaded
# On CUDA the host reads a step's outcome during the next step, so that it never waits.
lag = int(run.device_type == "cuda" and optimizer == "adamw" and not scaler.is_enabled())
agreement = Agreement(log, keeper, scaler, lag, listen=not eval_only)
generator = {"cuda": torch.cuda, "mps": torch.mps}.get(run.device_type, torch.default_generator)  # dropout's
loader = ThreadPoolExecutor(1, initializer=lambda: run.device_type == "cuda" and torch.cuda.set_device(run.device))

# -----------------------------------------------------------------------------
# training
model.train()
while True:
    # evaluation and checkpoints, of the weights after `it` steps
    evaluates = eval_only or it % eval_interval == 0 or it == max_iters
    saves = it % save_interval == 0 if save_interval else evaluates and always_save_checkpoint
    if evaluates or saves or agreement.stop or it >= max_iters:
        agreement.settle(left=0)
    if agreement.failed:
        it = agreement.outcome.step  # the step that was not made
    with log.paused():
        best = evaluate(it) if evaluates and not agreement.failed else False
        last = eval_only or it >= max_iters or agreement.stop or agreement.failed
        latest = it > run.start and (saves or last)
        if not eval_only and (latest or best):
            save(it, latest, best, last)
    if last:
        break

    # one step, on the mean of the micro-batches' gradients
    upcoming = loader.submit(get_batch, it + 1)  # is read while this step computes
    lr = get_lr(it)
    for group in (group for o in optimizers for group in o.param_groups):
        group["lr"] = lr * group["scale"]
    generator.manual_seed(((seed * 1_000_003 + it) * 4096 + rank) % 2**63)  # a resumed run draws the same numbers
    largest = largest_of_layers() if log_logits and it % log_interval == 0 else None
    loss = torch.zeros((), device=run.device)
    for micro, part in enumerate(zip(*(t.tensor_split(run.micro_steps) for t in batch), strict=True)):
        if world > 1 and not run.sharded:
            model.require_backward_grad_sync = micro == run.micro_steps - 1
        micro_loss = loss_of(model, *part) * (len(part[0]) / len(batch[0]))
        loss += micro_loss.detach()
        scaler.scale(micro_loss).backward()
    for o in optimizers:
        scaler.unscale_(o)
    norm = whole(torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf))
    # [loss, norm, 1 if a process was asked to stop, 1 if one has a problem] of all processes, still on the device
    status = agreement.put(it, lr, loss, norm, largest)
    if lag:  # found_inf = 1 makes AdamW skip the update on the GPU, before the host has read the status
        optimizers[0].found_inf = (~status[:2].isfinite().all() | (status[3] > 0)).float()
    agreement.settle(left=lag)
    if agreement.makes_step():
        for o in optimizers:
            scaler.step(o)
    scaler.update()
    model.zero_grad(set_to_none=True)
    if agreement.failed:
        continue
    try:
        batch = upcoming.result()
    except (UserError, OSError) as error:
        # The other processes learn of the problem in the next step's status, before any of them updates its weights.
        agreement.problem = str(error)
    it += 1

# the end: a sample of the model's text, unless the run was stopped
finish(run, agreement, it, time.perf_counter() - _began, raw_model, meta, data["val"])
