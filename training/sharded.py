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

from configurator import UserError
from text.files import sync_folder, written_aside
from training import distributed
from training.state import check_finite, mapped, tensors, writing


def save_sharded(path: str, state: dict, before: Callable = lambda: None) -> None:
    """Writes a sharded state as checkpoint.save does. Every process must call it; the first one calls before()."""
    distributed.by_all(lambda: check_finite(path, state))
    aside = path + ".tmp"
    distributed.by_master(lambda: shutil.rmtree(aside, ignore_errors=True))

    def publish() -> None:
        with writing(path, state), written_aside(os.path.join(aside, "run.pt")) as f:
            torch.save(rest | {"shards": shards, "aliases": aliases}, f)
        before()  # before the new folder takes its place
        put(aside, path)

    rest = mapped(lambda _, x: None if isinstance(x, torch.Tensor) else x, state)
    try:
        shards, aliases = _write_shards(path, aside, state)
        distributed.by_master(publish)
    except OSError:  # on every process
        distributed.by_master(lambda: shutil.rmtree(aside, ignore_errors=True))
        raise


def _write_shards(path: str, aside: str, state: dict) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Writes the tensors to the folder aside. Returns ({file: (bytes, crc32)} of all processes, aliases)."""
    import torch.distributed.checkpoint as dcp

    found, aliases = tensors({key: state[key] for key in ("model", "optimizer")})
    aliases = distributed.gathered(aliases)[0]  # other processes may hold empty shards, which lie nowhere in memory
    found = {name: x for name, x in found.items() if name not in aliases}
    with writing(path, state):
        try:
            dcp.save(found, storage_writer=dcp.HuggingFaceStorageWriter(aside, save_distributed=True))
        except dcp.CheckpointException as error:  # raised on every process, with the errors of those that failed
            first, _ = next(iter(error.failures.values()))
            raise first from error
    mine = glob.glob(os.path.join(glob.escape(aside), f"shard-{distributed.rank + 1:05d}-*"))
    parts = distributed.by_all(lambda: {os.path.basename(file): (os.path.getsize(file), crc32(file)) for file in mine})
    return {name: entry for part in parts for name, entry in part.items()}, aliases


def put(aside: str, path: str) -> None:
    """Renames what was written aside, a file or a folder, to path; a crash leaves the old one, or path + ".old"."""
    if os.path.isdir(path):
        shutil.rmtree(path + ".old", ignore_errors=True)
        os.rename(path, path + ".old")
    os.replace(aside, path)
    sync_folder(os.path.dirname(path))
    shutil.rmtree(path + ".old", ignore_errors=True)


def crc32(path: str) -> int:
    value = 0
    with open(path, "rb") as f:
        while block := f.read(2**22):
            value = zlib.crc32(block, value)
    return value


def check_shards(path: str, shards: dict[str, tuple[int, int]], verify: bool) -> None:
    """Raises UserError if a shard is missing or has another size or, with verify, another checksum."""
    for name, (size, checksum) in shards.items():
        file = os.path.join(path, name)
        if not os.path.exists(file) or os.path.getsize(file) != size:
            raise UserError(f"{path} is damaged: {name} is missing or does not have its {size:,} bytes")
        if verify and crc32(file) != checksum:
            raise UserError(f"{path} is damaged: {name} does not have its checksum")


def read_tensors(path: str, prefix: str, parameters: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """{name: tensor} of the tensors whose names begin with prefix, whole and on the CPU.

    parameters: {"optimizer/0/state/3": the parameter that this is the state of}, as for checkpoint.optimizer_states.
    """
    import torch.distributed.checkpoint as dcp

    found = {}
    reader = dcp.HuggingFaceStorageReader(path)
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if not name.startswith(prefix):
            continue
        p = (parameters or {}).get(os.path.dirname(name))
        if p is not None and p.shape == entry.size:
            found[name] = torch.zeros_like(p, dtype=entry.properties.dtype)
        else:
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that no process group takes part
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found
