"""One process or many: this one's rank, communication, and a model that several train."""

import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from errors import UserError

# torchrun starts the processes, and tells each its RANK and the WORLD_SIZE
world = int(os.environ.get("WORLD_SIZE", 1))  # the number of processes
rank = int(os.environ.get("RANK", 0)) % world  # 0 if only another job has left a RANK
master = rank == 0
# The folder that this call of torchrun has made on this machine, "" without torchrun. Processes
# that torchrun starts again have the same one; another call has another one. The file is
# FOLDER/attempt_0/0/error.json.
launch = os.environ.get("TORCHELASTIC_ERROR_FILE", "").rpartition("attempt_")[0]


def count(n: int, noun: str) -> str:
    """A number with its noun: "1 process", "2 processes"."""
    if n == 1:
        return f"{n} {noun}"
    return f"{n:,} {noun}{'es' if noun.endswith('s') else 's'}"


def say(text: str) -> None:
    """Prints a text, on the first process only.

    An error in printing ends no training: the line is lost.
    """
    if master:
        with contextlib.suppress(OSError):  # a full disk, a closed terminal, nobody reads a pipe
            print(text, flush=True)


def connect(backend: str) -> None:
    """Joins the other processes, if there are any: by NCCL for tensors on GPUs, else by gloo."""
    if world == 1:
        return
    if backend in ("auto", "nccl"):
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend)


def summed(x: torch.Tensor) -> torch.Tensor:
    """Replaces x by its sum over the processes, and returns x. Sums on the CPU wait for no GPU."""
    if world > 1:
        dist.all_reduce(x)
    return x


def by_all(f: Callable) -> list:
    """The list of all processes' f(). If one raises UserError or OSError, all of them raise it."""
    if world == 1:
        return [f()]
    try:
        answer = f()
    except (UserError, OSError) as error:
        answer = error

    answers = [None] * world
    dist.all_gather_object(answers, answer)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def by_master(f: Callable) -> object:
    """Calls f() on the first process; returns its result on every process. Errors: see by_all."""
    return by_all(f if master else lambda: None)[0]


def data_parallel(model: nn.Module, parallel: str, device: str, dtype: torch.dtype) -> nn.Module:
    """The GPT for several processes; its gradients are the mean of the gradients of their losses.

    device: the type of the processes' devices, such as cuda.

    ddp, context: each process has the whole model (Li et al. 2020). fsdp: each has its shard of
    every parameter, and gathers all of a block while it computes that block (Zhao et al. 2023, as
    fully_shard, in place). The gathered parameters are in dtype; gradients are summed in float32
    after each micro-batch, so no process holds all.
    """
    if parallel != "fsdp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = dist.init_device_mesh(device, (world,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model
