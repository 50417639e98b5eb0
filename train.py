"""Trains a GPT, on one CPU, one GPU or many.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char_cpu.py --attention=laser
    torchrun --standalone --nproc_per_node=4 train.py config/train_shakespeare_char.py

Writes to out_dir: ckpt.pt (the latest state), best.pt (the state with the lowest validation loss)
and log.jsonl. Ctrl-C and SIGTERM end a run after the current step, with a checkpoint. A loss that
is NaN or infinite ends the run where it next logs, evaluates or saves, with exit code 1; no
checkpoint has such numbers.

Read it from top to bottom: flags, set-up, one batch, one loss, one evaluation, the loop.
training/run.py has what a run needs around its loop: resuming, checks of flags, the first lines,
signals.
"""

import math
import sys
from typing import Literal

import torch
from torch import Tensor, nn

from attention.cache import run_definitions
from attention.probe import largest_logits
from configurator import can_compile, configure, pick_device, user_errors
from errors import NotFinite
from model import GPT, GPTConfig
from text.dataset import Tokens, folder_of, positions, prepare_shakespeare, read_meta
from training import checkpoint, run
from training.distributed import (
    by_master,
    connect,
    data_parallel,
    rank,
    say,
    summed,
    world,
)
from training.estimate import flops, peak_flops
from training.log import Log, diverged
from training.optimizers import OPTIMIZER, Settings
from training.origin import origin

# -----------------------------------------------------------------------------
# flags; GPT-2 (124M) on OpenWebText by default. The fields of GPTConfig are flags too.
# What is the model trained on?
dataset = "openwebtext"  # the data set: the name of a folder in data/, or the path of a folder
pack: Literal["none", "document"] = "none"  # document: a token sees only its own document
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
gpus: str | None = None  # dry_run for these GPUs, such as "8 x H100"; None: for A100 and H100
dry_run = False  # only print the number of parameters, FLOPs, and estimates of memory and time
log_interval = 1  # steps between two lines of the log
log_logits = False  # also log each layer's largest attention score; costs one more forward pass
sample_tokens = 300  # length of the text that the model writes at the end, in tokens; 0: no text
wandb_log = False  # also log to Weights & Biases
wandb_project = "owt"  # name of the project in Weights & Biases
wandb_run_name = "gpt2"  # name of the run in Weights & Biases
# What is saved, and where?
out_dir = "out"  # the folder for checkpoints and log.jsonl
always_save_checkpoint = True  # at every evaluation; False: at the end and if interrupted
save_interval = 0  # steps between two saves of ckpt.pt; 0: at every evaluation
keep_checkpoints = 2  # the latest to keep: ckpt.pt, before it ckpt-00000500.pt and so on
# What does it run on, and how?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: 16 bits on CUDA, else 32
tf32 = True  # compute matrix products of float32 in TF32, on GPUs that can
compile: bool | None = None  # compile the model with torch.compile; None: only on CUDA
plain = False  # run the definitions of the attentions themselves: slow, to study and to compare
parallel: Literal["ddp", "fsdp"] = "ddp"  # each process has the whole model (ddp) or a part (fsdp)
backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # auto, nccl: nccl on CUDA, else gloo
# fields of GPTConfig that have another default here
vocab_size: int | None = None  # number of different tokens; None: as many as the data set has
bias = False  # biases in Linears and LayerNorms; False is a bit better and faster
# -----------------------------------------------------------------------------
# set-up: what to resume, the device and the processes; the data; the model
config, given = configure(globals(), GPTConfig)
with user_errors():
    config, saved = run.resumed(config, given)  # saved: the state to go on from, or None
    globals().update(config)
    run.check_flags(config, given)
    device, dtype, amp = pick_device(device, dtype)  # amp: the context of mixed precision
    device_type = device.split(":")[0]
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if dry_run:
        run.print_estimates(config, given)
        sys.exit()
    connect(backend)
    start = saved["iter_num"] if saved else 0  # steps that are done
    launches = run.launches(start)
    torch.manual_seed(seed)  # the same weights everywhere
    torch.set_flush_denormal(True)  # tiny attention weights would cost a CPU several times a zero's
    by_master(lambda: prepare_shakespeare(dataset))
    data_dir = folder_of(dataset)
    meta = read_meta(data_dir)
    if vocab_size is None:
        config["vocab_size"] = meta["vocab_size"]
    if init_from == "scratch":
        model = GPT(GPTConfig(**run.model_args(config)))
    elif init_from == "resume":
        model = checkpoint.model_of(saved, **run.model_args(config))
    else:
        model = run.pretrained_model(config, given, meta)
    if plain:
        run_definitions(model)
    fields = vars(model.config) | {"window": model.config.resolved().window}
    config |= fields  # the window too: its default depends on block_size, which may change
    globals().update(fields)  # from here on block_size, n_embd, vocab_size ... are the model's
    run.check_vocabulary(model.config, meta, dataset)
    eot = run.end_of_documents(config, meta)  # a token id, or None without --pack=document
    data = {split: Tokens(data_dir, split, model.config.block_size) for split in ("train", "val")}
made_by = origin(model.config)
run.describe(config, model, data["train"], device, dtype)
if compile is None:
    compile = device_type == "cuda"
rows = batch_size * gradient_accumulation_steps  # sequences of a step, of all processes together
micro_steps = math.ceil(rows / world / batch_size)  # micro-batches of this process, per step
sharded = parallel == "fsdp" and world > 1  # each process has a part of every weight


# -----------------------------------------------------------------------------
# one batch, one loss, one learning rate, one evaluation, one checkpoint
def get_batch(step: int) -> tuple:
    """This process's rows of a step's global batch, on the device: x and y, (rows / world, T)."""
    x, y = data["train"].batch(step, rows, seed=seed, rank=rank, world=world)
    return to_device(x, y)


def to_device(x: Tensor, y: Tensor) -> tuple:
    """(x, y) on the device; with --pack=document (x, y, positions in the documents)."""
    batch = [x, y]
    if eot is not None:
        batch.append(positions(x, eot))
    if device_type == "cuda":  # only pinned memory is copied while the GPU computes
        batch = [t.contiguous().pin_memory() for t in batch]
    return tuple(t.to(device, non_blocking=device_type == "cuda") for t in batch)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, pos: Tensor | None = None) -> Tensor:
    """The mean loss of a micro-batch."""
    with amp:
        return model(x, y, pos=pos)[1]


def get_lr(it: int) -> float:
    """Linear warm-up; then constant, or down to min_lr, as a cosine or (wsd) late and linear."""
    if not decay_lr:
        return learning_rate
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if schedule == "constant":
        return learning_rate
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
        losses = []  # of this process's batches, still on the device
        sizes = []  # windows; 0 of a batch without targets, on a process that has a window less
        for x, y in tokens.eval_batches(eval_iters, batch_size, rank=rank, world=world):
            losses.append(loss_of(eval_model, *to_device(x, y)))
            sizes.append((y >= 0).sum().item() / y.shape[1])
        losses = torch.stack(losses).tolist()
        total = sum(loss * n for loss, n in zip(losses, sizes, strict=True) if n)
        total, size = summed(torch.tensor([total, sum(sizes)], dtype=torch.float64))
        means[split] = (total / size).item()
    raw_model.train()
    return means


def largest_scores(x: Tensor, y: Tensor, pos: Tensor | None = None) -> list[float]:
    """The largest absolute attention score of each layer, on a micro-batch."""
    raw_model.eval()
    with amp, torch.compiler.set_stance("force_eager"):
        largest = largest_logits(raw_model, x, pos)
    raw_model.train()
    return largest


def save(it: int, latest: bool, best: bool) -> OSError | None:
    """Saves the state after `it` steps as the latest checkpoint, the best, or both.

    Returns the error if the disk is full; the training goes on, and the next save tries again.
    """
    state = {
        "version": checkpoint.VERSION,
        "model": checkpoint.gathered(raw_model.state_dict()),
        "optimizer": [checkpoint.gathered(o.state_dict()) for o in optimizers],
        "scaler": scaler.state_dict(),
        "model_args": run.model_args(config),
        "iter_num": it,  # random numbers depend only on the seed, this step and the rank
        "best_val_loss": best_val_loss,
        "config": config,
        "tokenizer": meta["tokenizer"],
        "data": {name: entry["sha256"] for name, entry in meta["files"].items()},
        "wandb_id": log.wandb_id,
        "launch": launches,
        "origin": made_by,
    }
    try:
        by_master(lambda: saver.save(state, latest, best))
    except NotFinite as error:
        diverged(it, error)
    except OSError as error:
        say(f"\n{error}", file=sys.stderr)
        return error


# -----------------------------------------------------------------------------
# the model as it is trained, the optimizers and the log
it = start
batch = get_batch(it)
raw_model = model if sharded else model.to(device)  # without compilation and DDP around it
is_own = run.is_own(model.config)  # may it see later tokens?
if is_own:
    run.try_causality(raw_model)
if compile and can_compile(device):
    model = run.compiled(model, sharded)
eval_model = model  # without DDP: its processes would need equal numbers of batches
if world > 1:
    model = data_parallel(model, parallel, device, getattr(torch, dtype))
settings = Settings(
    lr=learning_rate,
    betas=(beta1, beta2),
    weight_decay=weight_decay,
    eps=adam_eps,
    fused=device_type != "mps",
    muon_lr=muon_lr,
    muon_beta=muon_beta,
)
optimizers = OPTIMIZER[optimizer](raw_model, settings)
scaler = torch.amp.GradScaler(device_type, enabled=dtype == "float16")
best_val_loss = math.inf
with user_errors():
    if saved:
        best_val_loss = run.restored(config, saved, data["val"], optimizers, scaler)
    log = Log(
        config=config,
        start=start,
        wandb_id=(saved or {}).get("wandb_id"),
        flops=flops(raw_model),
        peak=peak_flops(device, dtype),
        origin=made_by,
    )
    if not eval_only:
        saver = checkpoint.Saver(out_dir, keep_checkpoints, best_val_loss == math.inf)
        signals = run.Signals()
saved = None  # frees its memory, and the file that holds it
param_groups = [group for o in optimizers for group in o.param_groups]
for group in param_groups:
    group["lr_scale"] = group["lr"] / learning_rate  # relative to the schedule's learning rate
stop = 0  # the signal that stops the run

# -----------------------------------------------------------------------------
# training
model.train()
while True:
    # evaluation and checkpoints, of the weights after `it` steps
    last = eval_only or it >= max_iters or stop
    evaluates = eval_only or (not stop and (it % eval_interval == 0 or it == max_iters))
    if save_interval:
        saves = it % save_interval == 0
    else:
        saves = evaluates and always_save_checkpoint
    best = False
    unsaved = None  # the error of the last save
    with log.paused():
        if evaluates:
            losses = estimate_loss()
            log.evaluation(it, losses)
            if losses["val"] < best_val_loss and it > 0:
                best = True
                best_val_loss = losses["val"]
        latest = it > start and (saves or last)
        if (latest or best) and not eval_only:
            unsaved = save(it, latest, best)
    if last:
        break

    # one step, on the mean of the micro-batches' gradients
    lr = get_lr(it)
    for group in param_groups:
        group["lr"] = lr * group["lr_scale"]
    # dropout's random numbers depend on seed, step and rank: a resumed run draws the same
    torch.manual_seed(((seed * 1_000_003 + it) * 4096 + rank) % 2**63)
    micro_batches = list(zip(*(t.tensor_split(micro_steps) for t in batch), strict=True))
    logs = it % log_interval == 0
    largest = largest_scores(*micro_batches[0]) if log_logits and logs else None
    loss = torch.zeros((), device=device)
    for micro_step, micro_batch in enumerate(micro_batches):
        if world > 1 and not sharded:
            model.require_backward_grad_sync = micro_step == micro_steps - 1
        micro_loss = loss_of(model, *micro_batch) * (len(micro_batch[0]) / len(batch[0]))
        loss += micro_loss.detach()
        scaler.scale(micro_loss).backward()
    for o in optimizers:
        scaler.unscale_(o)
    grad_norm = nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    if sharded:
        grad_norm = grad_norm.full_tensor()
    next_batch = get_batch(it + 1)  # while a GPU still computes
    if logs:  # the host waits for a GPU here; a loss or norm that is not finite ends the run
        loss, norm_of_all = summed(torch.stack((loss, grad_norm)) / world).tolist()
        log.step(it, loss, norm_of_all, lr, largest=largest, scaled=scaler.is_enabled())
    # float16's gradients may overflow: then no optimizer makes a step
    if not scaler.is_enabled() or grad_norm.isfinite():
        for o in optimizers:
            scaler.step(o)
    scaler.update()
    model.zero_grad(set_to_none=True)
    batch = next_batch
    it += 1
    stop = signals.received()

# the end
if is_own and not (eval_only or sharded):
    run.try_causality(raw_model)
if sample_tokens and not (eval_only or stop or unsaved):
    run.print_sample(config, raw_model, data["val"], amp, device)
log.close()
run.exit_with_code(it, stop, unsaved)
