"""Trains a GPT, on one CPU, one GPU or many.

    python train.py config/train_shakespeare_char_cpu.py
    python train.py config/train_shakespeare_char_cpu.py --attention=laser
    torchrun --standalone --nproc_per_node=4 train.py config/train_shakespeare_char.py

Writes to out_dir: ckpt.pt (the latest state), best.pt (the state with the lowest validation loss) and log.jsonl.
Ctrl-C and SIGTERM end a run after the current step, with a checkpoint. If a loss or a gradient becomes NaN or infinite,
the run ends with exit code 1, and without a new checkpoint.

Read train.py from top to bottom: flags, set-up, one batch, one loss, one evaluation, the loop. What a run needs around
its loop is in training/run.py: resuming, checks of flags, signals, the end.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from errors import NotFinite, UserError

# isort: split
import torch

from attention.cache import run_definitions
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
# What is the model trained on?
dataset = "openwebtext"  # the data set: the name of a folder in data/, or the path of a folder
pack: Literal["none", "document"] = "none"  # document: a token sees only its own document, where positions begin at 0
allow_other_data = False  # let a run resume even if the data set has changed since the run was saved
# Which weights does it start from?
init_from = "scratch"  # scratch, resume, or the weights of gpt2, gpt2-medium, ..., a model of the hub, a local folder
seed = 1337  # decides all random numbers: new weights, which batches are drawn, dropout
# How long is the training, and how large is a step?
max_iters = 600000  # steps in total
gradient_accumulation_steps = 5 * 8  # micro-batches per step, of all processes together
batch_size = 12  # sequences per micro-batch; a step has batch_size * gradient_accumulation_steps sequences
# Which optimizer?
optimizer: Literal[*OPTIMIZER] = "adamw"  # muon trains the matrices of the blocks, and AdamW the other weights
weight_decay = 1e-1  # weight decay of matrices and embeddings; biases and norms have none
beta1 = 0.9  # AdamW, NAdamW and LAMB: decay rate of the mean of the gradients
beta2 = 0.95  # AdamW, NAdamW and LAMB: decay rate of the mean of the squared gradients
adam_eps = 1e-8  # AdamW and NAdamW divide by the root of that mean plus this number
muon_beta = 0.95  # Muon: its momentum
grad_clip = 1.0  # a gradient with a larger norm is scaled down to this norm; 0.0: never
# How does the learning rate change?
learning_rate = 6e-4  # the highest learning rate, of AdamW, NAdamW and LAMB
muon_lr = 0.02  # the highest learning rate, of Muon
schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # the curve after warm-up; wsd: constant, then linear decay
decay_share = 0.2  # wsd: the decay is this share of lr_decay_iters; 1.0: it begins right after the warm-up
decay_lr = True  # False: the learning rate is constant and has no warm-up
warmup_iters = 2000  # steps in which the learning rate grows from almost 0 to its highest value
lr_decay_iters = 600000  # the step at which the learning rate reaches min_lr; often the same as max_iters
min_lr = 6e-5  # the lowest learning rate; a tenth of learning_rate is usual; Muon's falls by the same factor
# What is measured and printed?
eval_interval = 2000  # steps between two evaluations
eval_iters = 200  # batches of each split in an evaluation; every evaluation uses the same batches
eval_only = False  # evaluate once, write nothing, and exit
dry_run = False  # print the number of parameters, FLOPs, and estimates of memory and time; do nothing else
log_interval = 1  # steps between two lines of the log
log_logits = False  # also log the largest absolute attention score of each layer; costs one more forward pass
loss_spike = 0.0  # warn if 4 losses in a row are above this number times the mean of the last 100; 0.0: never
sample_tokens = 300  # length of the text that the model writes at the end, in tokens; 0: no text
wandb_log = False  # also log to Weights & Biases
wandb_project = "owt"  # name of the project in Weights & Biases
wandb_run_name = "gpt2"  # name of the run in Weights & Biases
tensorboard = False  # also log to TensorBoard: tensorboard --logdir=.
# What is saved, and where?
out_dir = "out"  # the folder for checkpoints and log.jsonl
always_save_checkpoint = True  # save ckpt.pt at every evaluation; False: only at the end and after an interruption
save_interval = 0  # steps between two saves of ckpt.pt; 0: at every evaluation
keep_checkpoints = 2  # number of latest checkpoints that are kept: ckpt.pt, and before it ckpt-00000500.pt and so on
save_in_background: bool | None = None  # continue to train while a checkpoint is written; None: only on CUDA
# What does it run on, and how?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 or float16 on CUDA, else float32
tf32 = True  # compute matrix products of float32 in TF32, on GPUs that can
compile: bool | None = None  # compile the model with torch.compile; None: only on CUDA
triton = False  # compute attention with the Triton kernels of attention/kernels.py, on CUDA
plain = False  # compute attention with the definitions in model.py themselves: slow, to study and to compare
parallel: Literal["ddp", "fsdp"] = "ddp"  # with several processes each holds the whole model (ddp) or a part (fsdp)
backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"  # how processes communicate; auto: nccl on CUDA, else gloo
# fields of GPTConfig that have another default here
vocab_size: int | None = None  # number of different tokens; None: as many as the data set has
bias = False  # biases in Linears and LayerNorms; False is a bit better and faster
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
        run_definitions(model)

model_args = vars(model.config) | {"window": model.config.resolved().window}  # a new block_size will not change it
config |= model_args
run.describe(model, data, meta)


# -----------------------------------------------------------------------------
# one batch, one loss, one learning rate, one evaluation, one checkpoint
def get_batch(step: int) -> tuple[torch.Tensor, ...]:
    """This process's rows of a step's global batch, on the device."""
    return to_device(data["train"].batch(step, run.rows, seed=seed, rank=rank, world=world))


def to_device(batch: tuple) -> tuple[torch.Tensor, ...]:
    """The batch on the device: (x, y) or, with --pack=document, (x, y, positions in the documents)."""
    batch = batch if eot is None else (*batch, positions(batch[0], eot))
    if run.device_type == "cuda":
        batch = (t.contiguous().pin_memory() for t in batch)  # only pinned memory is copied while the GPU computes
        return tuple(t.to(run.device, non_blocking=True) for t in batch)
    return tuple(t.to(run.device) for t in batch)


@contextlib.contextmanager
def forward_pass() -> Iterator[None]:
    """Turns on mixed precision, and ends the run if the model meets a NaN or an infinity."""
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
    """Linear warm-up; then down to min_lr, as a cosine or (wsd) stable and then linear; or constant."""
    if decay_lr and it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if not run.decays:
        return learning_rate
    progress = min(1.0, max(0.0, it - run.decay_from) / max(1, lr_decay_iters - run.decay_from))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress
    return min_lr + left * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss() -> dict[str, float] | None:
    """Mean loss over fixed windows of each split, divided among the processes; draws no random number.

    Returns None if a process is asked to stop meanwhile. If one process cannot read its data, all raise an error.
    """
    raw_model.eval()
    losses = {}
    for split, tokens in data.items():
        found, weights = [], []  # losses, still on the device; windows (of prompts and answers: their share of targets)
        for windows in read_by_all(tokens.eval_batches(eval_iters, batch_size, rank=rank, world=world)):
            if agreement.stops_now():
                return None
            found.append(loss_of(eval_model, *to_device(windows)))
            weights.append((windows[1] >= 0).sum().item() / windows[1].shape[1])
        total = torch.zeros(2, dtype=torch.float64)
        for loss, weight in zip(torch.stack(found).tolist(), weights, strict=True):
            if weight:  # a process with fewer windows than others gets windows without targets
                total += torch.tensor([loss * weight, weight], dtype=torch.float64)
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
    """The largest absolute attention score of each layer, on this process's first micro-batch."""
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
        "iter_num": it,  # random numbers depend only on the seed, this step and the rank
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
settings = Settings(learning_rate, (beta1, beta2), weight_decay, adam_eps, fused, muon_lr, muon_beta)
optimizers = OPTIMIZER[optimizer](raw_model, settings)
for group in (group for o in optimizers for group in o.param_groups):
    group["scale"] = group["lr"] / learning_rate  # relative to the schedule's learning rate
scaler = torch.amp.GradScaler(run.device_type, enabled=run.dtype == "float16")
with user_errors():
    best_val_loss = run.restore(meta, optimizers, scaler)
    log = Log(run, raw_model)
run.saved = None  # frees the memory of the checkpoint that was loaded
# On CUDA the host reads a step's outcome during the next step, so that it never waits.
lag = int(run.device_type == "cuda" and optimizer in ("adamw", "muon") and not scaler.is_enabled())
agreement = Agreement(log, keeper, scaler, lag, listen=not eval_only)
generator = {"cuda": torch.cuda, "mps": torch.mps}.get(run.device_type, torch.default_generator)  # for dropout
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
        it = agreement.outcome.step  # the step that was given up
    with log.paused():
        best = evaluate(it) if evaluates and not agreement.failed else False
        last = eval_only or it >= max_iters or agreement.stop or agreement.failed
        latest = it > run.start and (saves or last)
        if not eval_only and (latest or best):
            save(it, latest, best, last)
    if last:
        break

    # one step, on the mean of the micro-batches' gradients
    upcoming = loader.submit(get_batch, it + 1)  # it is read while this step computes
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
    for o in optimizers if lag else ():  # found_inf = 1: no update, on the GPU, before the host has read the status
        o.found_inf = (~status[:2].isfinite().all() | (status[3] > 0)).float()
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
