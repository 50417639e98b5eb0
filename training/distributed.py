"""One process or many: this one's rank, communication, and a model that several train."""

import inspect
import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from errors import UserError, first_line

# torchrun starts the processes, and tells each its RANK and the WORLD_SIZE
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
rank = int(os.environ.get("RANK") or 0)
world = int(os.environ.get("WORLD_SIZE") or 1)  # the number of processes
master = rank == 0
# The folder that this call of torchrun has made on this machine, "" without torchrun. Processes
# that torchrun starts again have the same one; another call has another one. The file is
# FOLDER/attempt_0/0/error.json.
launch = os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("attempt_")[0]


def count(n: int, noun: str) -> str:
    """A number with its noun: "1 process", "2 processes"."""
    if n == 1:
        return f"{n} {noun}"
    return f"{n:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def say(*args: object, **kwargs: object) -> None:
    """print, on the first process only. An error in printing ends no training: the line is lost.

    If nobody reads the lines any more (`| head`), a training ends as with SIGTERM.
    """
    if not master:
        return
    try:
        print(*args, flush=True, **kwargs)
    except BrokenPipeError:
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            raise  # no training, or none that could be saved
        file = kwargs.get("file", sys.stdout)
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        signal.raise_signal(signal.SIGTERM)
    except OSError:  # a full disk, a closed terminal
        pass


def check_environment() -> None:
    """Raises UserError if the environment has only some of LAUNCHED, perhaps from another job."""
    there = [name for name in LAUNCHED if name in os.environ]
    if there and len(there) < len(LAUNCHED):
        raise UserError(
            f"the environment has {', '.join(there)}, but not all of {', '.join(LAUNCHED)}: "
            f"torchrun sets them. For a single process: unset {' '.join(there)}"
        )


def connect(backend: str) -> None:
    """Joins the other processes, if there are any: by NCCL for tensors on GPUs, else by gloo."""
    check_environment()
    if world == 1:
        return
    if backend in ("auto", "nccl"):
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:  # no such backend, nobody answers, no MASTER_ADDR
        raise UserError(f"--backend={backend} does not work here: {first_line(error)}") from None


def summed(x: torch.Tensor) -> torch.Tensor:
    """Replaces x by its sum over the processes, and returns x. Sums on the CPU wait for no GPU."""
    if world > 1:
        dist.all_reduce(x)
    return x


def by_all(f: Callable) -> list:
    """The list of all processes' f(). If one raises UserError or OSError, all of them raise it."""
    try:
        answer = f(), None
    except (UserError, OSError) as error:
        answer = None, error
    answers = [answer] * world
    if world > 1:
        dist.all_gather_object(answers, answer)
    for _, error in answers:
        if error:
            raise error
    return [result for result, _ in answers]


def by_master(f: Callable) -> object:
    """Calls f() on the first process; returns its result on every process. Errors: see by_all."""
    return by_all(f if master else lambda: None)[0]


def data_parallel(
    model: torch.nn.Module, parallel: str, device: str, dtype: torch.dtype
) -> torch.nn.Module:
    """The GPT for several processes; its gradients are the mean of the gradients of their losses.

    ddp: each process has the whole model (Li et al. 2020). fsdp: each has its shard of every
    parameter, and gathers all of a block while it computes that block (Zhao et al. 2023, as
    fully_shard, in place). The gathered parameters are in dtype; gradients are summed in float32
    after each micro-batch, so no process holds all.
    """
    if parallel == "ddp":
        DDP = torch.nn.parallel.DistributedDataParallel
        since_2_13 = "forward_sync_buffers" in inspect.signature(DDP).parameters
        settings = {"forward_sync_buffers" if since_2_13 else "broadcast_buffers": False}
        if device.startswith("cuda"):
            settings["device_ids"] = [device]
        return DDP(model, gradient_as_bucket_view=True, **settings)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {
        "mesh": dist.init_device_mesh(device.split(":")[0], (world,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    }
    blocks = model.transformer.h
    for position in {block.attn.position for block in blocks}:
        if getattr(position, "shared", False):  # all blocks use it: it is sharded apart from them
            for child in position.children():
                fully_shard(child, reshard_after_forward=False, **settings)
    for block in blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)
