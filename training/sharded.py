"""A checkpoint of an FSDP run: a folder to which each process writes its shards of the tensors.

shard-*.safetensors, in the format of torch.distributed.checkpoint, hold the tensors under their paths in the state
("optimizer/0/state/3/exp_avg"). run.pt holds everything else, and the shards' sizes and checksums.
"""

import glob
import os
import shutil
import warnings
import zlib
from collections.abc import Callable

import torch

from errors import UserError
from text.files import sync_folder, written_aside
from training import distributed
from training.state import check_finite, mapped, tensors, writing


def save_sharded(path: str, state: dict, before: Callable = lambda: None) -> None:
    """Writes a sharded state as checkpoint.save does. Every process must call it; the first one calls before()."""
    import torch.distributed.checkpoint as dcp

    def publish() -> None:
        rest = mapped(lambda _, x: None if isinstance(x, torch.Tensor) else x, state)
        with writing(path, state), written_aside(os.path.join(aside, "run.pt")) as f:
            torch.save(rest | {"shards": shards, "aliases": aliases}, f)
        before()  # before the new folder takes its place
        put(aside, path)

    distributed.by_all(lambda: check_finite(path, state))
    aside = path + ".tmp"
    distributed.by_master(lambda: shutil.rmtree(aside, ignore_errors=True))
    found, aliases = tensors(state)
    aliases = distributed.gathered(aliases)[0]  # the first process's: empty shards of others have no place in memory
    found = {name: x for name, x in found.items() if name not in aliases}
    mine = os.path.join(glob.escape(aside), f"shard-{distributed.rank + 1:05d}-*")
    try:
        with writing(path, state):
            try:
                dcp.save(found, storage_writer=dcp.HuggingFaceStorageWriter(aside, save_distributed=True))
            except dcp.CheckpointException as error:  # raised on every process, with the errors of those that failed
                raise next(iter(error.failures.values()))[0] from error
        parts = distributed.by_all(lambda: {os.path.basename(file): measured(file) for file in glob.glob(mine)})
        shards = {name: entry for part in parts for name, entry in part.items()}
        distributed.by_master(publish)
    except OSError:  # on every process
        distributed.by_master(lambda: shutil.rmtree(aside, ignore_errors=True))
        raise


def put(aside: str, path: str) -> None:
    """Renames a finished file or folder, aside, to path. A crash leaves the old one, as path or path + ".old"."""
    if os.path.isdir(path):
        shutil.rmtree(path + ".old", ignore_errors=True)
        os.rename(path, path + ".old")
    os.replace(aside, path)
    sync_folder(os.path.dirname(path))
    shutil.rmtree(path + ".old", ignore_errors=True)


def measured(path: str) -> tuple[int, int]:
    """(bytes, crc32) of a file."""
    value = 0
    with open(path, "rb") as f:  # not mapped: if the file were cut off meanwhile, this process would be killed
        while block := f.read(2**22):
            value = zlib.crc32(block, value)
    return os.path.getsize(path), value


def check_shards(path: str, state: dict, verify: bool) -> None:
    """Raises UserError if a shard of run.pt's state is missing, has another size or, with verify, another checksum."""
    if missing := [key for key in ("shards", "aliases") if not isinstance(state.get(key), dict)]:
        raise UserError(f"{path} is not a checkpoint of train.py: its run.pt has no {missing[0]}")
    for name, (size, checksum) in state["shards"].items():
        shard = os.path.join(path, name)
        if not os.path.exists(shard) or os.path.getsize(shard) != size:
            raise UserError(f"{path} is damaged: {name} is missing or not {size:,} bytes long")
        if verify and measured(shard) != (size, checksum):
            raise UserError(f"{path} is damaged: {name} does not match its checksum")


def read_tensors(path: str, prefix: str, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """{name: tensor} for names that begin with prefix: sharded as a parameter of its shape, or whole on the CPU."""
    import torch.distributed.checkpoint as dcp

    found = {}
    reader = dcp.HuggingFaceStorageReader(path)
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix):
            p = parameters.get(os.path.dirname(name))  # of "optimizer/0/state/3", for ".../3/exp_avg"
            alike = p if p is not None and p.shape == entry.size else torch.empty(entry.size)
            found[name] = torch.zeros_like(alike, dtype=entry.properties.dtype)
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns that there is no process group
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found
