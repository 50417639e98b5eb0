"""A run's state, a nested dict of tensors and plain Python values: a walk over its parts, a copy, and checks."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator

import torch

from errors import UserError, first_line

WRITE_ERRORS = ("unexpected pos", "PytorchStreamWriter failed")  # what torch.save says when a disk is full or fails


def mapped(f: Callable, state: object, path: str = "") -> object:
    """A copy of the state with f(path, leaf) in place of each leaf; a path looks like "optimizer/0/state/3/step"."""
    if isinstance(state, dict):
        return {key: mapped(f, value, f"{path}/{key}".lstrip("/")) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(mapped(f, value, f"{path}/{i}") for i, value in enumerate(state))
    return f(path, state)


def tensors(state: object) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, aliases): {path: tensor}, and {second path: first path} of tensors that the state holds twice."""
    held = {}  # {where in memory: [(path, tensor), ...]}

    def note(path: str, x: object) -> None:
        if isinstance(x, torch.Tensor):
            shard = x.to_local() if hasattr(x, "to_local") else x
            place = (shard.data_ptr(), shard.shape, shard.stride()) if shard.numel() else path
            held.setdefault(place, []).append((path, x))

    mapped(note, state)
    found = dict(same[0] for same in held.values())
    return found, {path: same[0][0] for same in held.values() for path, _ in same[1:]}


def snapshot(state: object) -> object:
    """A copy of the state in the CPU's memory, which training does not change. Tied tensors stay tied."""
    found, aliases = tensors(state)
    copies = {path: x.detach().to("cpu", copy=True) for path, x in found.items()}
    copies |= {alias: copies[path] for alias, path in aliases.items()}
    return mapped(lambda path, x: copies.get(path, x), state)


def check_finite(path: str, state: dict) -> None:
    """Raises UserError if a tensor of the state holds a NaN or an infinity. path: the file, for the message."""
    for name, x in tensors(state)[0].items():
        x = x.to_local() if hasattr(x, "to_local") else x
        if x.is_floating_point() and not torch.isfinite(x.sum()) and not x.isfinite().all():
            raise UserError(f"{name} holds values that are not finite; {path} was not written")


@contextlib.contextmanager
def writing(path: str, state: dict) -> Iterator[None]:
    """Turns an error of the disk within it into an OSError that says why path was not written. Bugs stay bugs."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        by_torch = any(words in str(error) for words in WRITE_ERRORS)
        if not by_torch and not isinstance(error, OSError):
            raise
        reason = first_line(error)
        if by_torch or any(os.strerror(code) in reason for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)):
            needed = sum(x.numel() * x.element_size() for x in tensors(state)[0].values()) / 2**20
            free = shutil.disk_usage(os.path.dirname(path) or ".").free / 2**20
            reason += f". Is the disk full? The checkpoint needs {needed:,.1f} MiB, and {free:,.1f} MiB are free"
        raise OSError(f"cannot write {path}: {reason}. An older file of this name is unchanged") from None
