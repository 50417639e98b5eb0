"""One process or many: which one this is, what they tell each other, and a model that they share (DDP, FSDP2).

torchrun starts the processes, and tells each its RANK, its LOCAL_RANK on this machine and the WORLD_SIZE.
"""

import importlib.util
import inspect
import os
import signal
import socket
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from configurator import NotInstalled, UserError, first_line

rank, local_rank, world = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))
master = rank == 0


def launch() -> str | None:
    """A name for the torchrun that has started this process, and starts it again after one has died; None without one.

    --rdzv_id alone is not enough, since users may give it again, nor is a process number, which containers repeat.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    name = f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}"
    try:
        with open(f"/proc/{os.getppid()}/stat") as f:  # where there is one, when it was started
            return f"{name} {f.read().rpartition(')')[2].split()[19]}"
    except OSError:
        return name


def say(*args: object, **kwargs: object) -> None:
    """print, by one process. Where nobody reads any more, as after `| head`, it asks itself to stop."""
    if master:
        try:
            print(*args, flush=True, **kwargs)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            os.kill(os.getpid(), signal.SIGTERM)


def connect(backend: str) -> None:
    """Joins the other processes, if there are any: NCCL between GPUs, gloo between CPUs and for tensors on them."""
    if world > 1 and not dist.is_initialized():
        if backend == "nccl" and not torch.cuda.is_available():
            raise UserError("--backend=nccl needs CUDA, which is not here; gloo works")
        if backend in ("auto", "nccl"):
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend)
        except RuntimeError as error:
            raise UserError(f"--backend={backend} does not work here: {first_line(error)}") from None


def summed(x: torch.Tensor) -> torch.Tensor:
    """The sum of x over the processes, in its place."""
    if world > 1:
        dist.all_reduce(x)
    return x


def gathered(value: object) -> list:
    """The plain Python values of all processes, on each of them."""
    values = [value] * world
    if world > 1:
        dist.all_gather_object(values, value)
    return values


def by_master(f: Callable) -> object:
    """What f() gives the master, on every process, where its ValueError, OSError or ImportError is raised as well."""
    result = error = None
    if master:
        try:
            result = f()
        except (UserError, OSError) as problem:
            error = problem
    result, error = gathered((result, error))[0]
    if error is not None:
        raise error
    return result


def shared(model: torch.nn.Module, kind: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    """The GPT as the processes train it together; what they compute is the mean of their losses' gradients.

    ddp: each has all of it (Li et al. 2020). fsdp: each has its share of every parameter, and the whole of a
    block while it computes that block (Zhao et al. 2023, as fully_shard, in place): its parameters are in
    dtype there, gradients are summed in float32, after every micro-batch, so that no process holds all of them.
    """
    if kind == "fsdp":
        return _sharded(model, device.split(":")[0], dtype)
    if world == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # before PyTorch 2.13
    device_ids = [device] if device.startswith("cuda") else None
    settings = {buffers: False, "gradient_as_bucket_view": True}  # buffers are constants; gradients are there once
    return DistributedDataParallel(model, device_ids=device_ids, **settings)


def _sharded(model, device_type, dtype):
    if importlib.util.find_spec("safetensors") is None:
        raise NotInstalled("--parallel=fsdp saves through safetensors: pip install safetensors")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(None if dtype == torch.float32 else dtype, torch.float32)
    settings = {"mesh": init_device_mesh(device_type, (world,)), "mp_policy": policy}
    positions = dict.fromkeys(block.attn.position for block in model.transformer.h)
    for part in (part for p in positions if p is not None and p.shared for part in p.children()):
        fully_shard(part, reshard_after_forward=False, **settings)  # what all blocks share is no part of any
    for block in model.transformer.h:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def whole(x: torch.Tensor) -> torch.Tensor:
    """x itself, or all of it where the processes have a share each (every process must ask)."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A copy of x, which every process has, on a parameter's device and shared out as the parameter is."""
    if not hasattr(parameter, "placements"):
        return x.to(parameter.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    x = x.to(parameter.device, copy=True)
    return distribute_tensor(x, parameter.device_mesh, parameter.placements, src_data_rank=None)
