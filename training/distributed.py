"""One process or many: the rank of this one, communication, and a model that several train (DDP, FSDP2)."""

import inspect
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from errors import UserError, first_line

# torchrun starts the processes, and tells each its RANK, its LOCAL_RANK on this machine and the WORLD_SIZE
rank = int(os.environ.get("RANK", 0))
local_rank = int(os.environ.get("LOCAL_RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
master = rank == 0


def count(n: int, noun: str) -> str:
    """A number with its noun: "1 process", "2 processes"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def say(*args: object, **kwargs: object) -> None:
    """print, on the first process only."""
    if master:
        print(*args, flush=True, **kwargs)


def connect(backend: str) -> None:
    """Joins the other processes, if there are any: NCCL between GPUs, gloo between CPUs and for tensors on them."""
    if world == 1:
        return
    if backend in ("auto", "nccl"):
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend)
    except (RuntimeError, ValueError) as error:  # no such backend, nobody answers, no MASTER_ADDR
        raise UserError(f"--backend={backend} does not work here: {first_line(error)}") from None


def summed(x: torch.Tensor) -> torch.Tensor:
    """Replaces x by its sum over the processes, in place, and returns it. For a tensor on the CPU no GPU waits."""
    if world > 1:
        dist.all_reduce(x)
    return x


def by_all(f: Callable) -> list:
    """The list of all processes' f(), on every process. If one raises UserError or OSError, all of them raise it."""
    try:
        answer = f(), None
    except (UserError, OSError) as error:
        answer = None, error
    answers = [answer] * world
    if world > 1:
        dist.all_gather_object(answers, answer)
    for error in (error for _, error in answers if error is not None):
        raise error
    return [result for result, _ in answers]


def by_master(f: Callable) -> object:
    """Calls f() on the first process, and returns its result on every process. Errors: see by_all."""
    return by_all(f if master else lambda: None)[0]


def data_parallel(model: torch.nn.Module, kind: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """The GPT for training by several processes; its gradients are the mean of the gradients of their losses.

    ddp: each process has the whole model (Li et al. 2020). fsdp: each has its shard of every parameter, and gathers
    the whole of a block while it computes that block (Zhao et al. 2023, as fully_shard, in place). The gathered
    parameters are in dtype; gradients are summed in float32 after every micro-batch, so no process holds all of them.
    """
    if kind == "ddp":
        ddp = torch.nn.parallel.DistributedDataParallel
        new = "forward_sync_buffers" in inspect.signature(ddp).parameters  # since PyTorch 2.13
        buffers = "forward_sync_buffers" if new else "broadcast_buffers"
        settings = {buffers: False, "gradient_as_bucket_view": True}  # buffers are constants; gradients are kept once
        return ddp(model, device_ids=[device] if device.startswith("cuda") else None, **settings)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, torch.float32)
    settings = {"mesh": dist.init_device_mesh(device.split(":")[0], (world,)), "mp_policy": policy}
    positions = dict.fromkeys(block.attn.position for block in model.transformer.h)
    for position in (p for p in positions if p is not None and p.shared):
        for child in position.children():  # all blocks share it, so it is no part of one block
            fully_shard(child, reshard_after_forward=False, **settings)
    for block in model.transformer.h:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)
