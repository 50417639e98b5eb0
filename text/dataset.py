"""Tokens on disk, and batches of them.

A prepared data set is a folder with train.bin and val.bin (token ids, nothing else) and meta.json
(tokenizer, dtype, counts, checksums). A batch is a pure function of (seed, step, rank, world size).
"""

import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from errors import UserError

DATA = Path(__file__).absolute().parents[1] / "data"
VERIFY_BYTES = 2**30  # a larger file's checksum is not compared: that would read the whole file


def folder_of(dataset: str) -> str:
    """Return the folder of a data set, which is the name of a folder in data/ or a path.

    A prepared folder comes before one that is not. Raises UserError, with the names in data/.
    """
    folder = DATA / dataset
    for candidate in (folder, Path(dataset).absolute()):
        if (candidate / "meta.json").is_file():
            return str(candidate)
    if not folder.is_dir():
        names = sorted(path.name for path in DATA.glob("[!.]*"))
        raise UserError(
            f"there is no data set {dataset!r} ({folder}); there are: {', '.join(names)}"
        )
    return str(folder)


def prepare_shakespeare(dataset: str) -> None:
    """Prepare one of the two Shakespeares if it is missing. Other data sets take too long for that.

    Raises UserError if its script fails.
    """
    folder = DATA / dataset
    if dataset not in ("shakespeare_char", "shakespeare") or (folder / "meta.json").exists():
        return
    script = folder / "prepare.py"
    print(f"{dataset} is not prepared yet: running {script}", flush=True)
    if subprocess.run([sys.executable, script]).returncode:
        raise UserError(f"{script} failed, see above")


def sha256(path: str | Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_meta(folder: str) -> dict:
    """Return the content of meta.json of a prepared folder. Raises UserError if it has none."""
    try:
        meta = json.loads(Path(folder, "meta.json").read_text(encoding="utf-8"))
        # Each of these raises an error if another program wrote the file
        np.dtype(meta["dtype"]), meta["vocab_size"], meta["tokenizer"]["kind"]
        [(entry["tokens"], entry["sha256"]) for entry in meta["files"].values()]
        return meta
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"{folder} is not prepared: meta.json is missing, damaged or of another program. "
            f"Run: python {shlex.quote(f'{folder}/prepare.py')}, "
            "or for your own text data/text/prepare.py"
        ) from None


class Tokens:
    """One split of a prepared data set, memory-mapped and checked.

    Raises UserError for a split that is not there, for a file that is not what meta.json says, and
    for fewer than block_size + 1 tokens; OSError for a file that is missing.
    """

    def __init__(self, folder: str, split: str, block_size: int):
        self.meta = read_meta(folder)
        self.block_size = block_size
        files = self.meta["files"]
        name = f"{split}.bin"
        if name not in files:
            raise UserError(f"{folder} has no split {split!r}, but {', '.join(files)}")
        path = Path(folder, name)
        size = path.stat().st_size
        dtype = np.dtype(self.meta["dtype"])
        entry = files[name]
        n = entry["tokens"]
        to_verify = size <= VERIFY_BYTES
        if size != n * dtype.itemsize or (to_verify and sha256(path) != entry["sha256"]):
            raise UserError(
                f"{path} is not the file of {n:,} tokens of {dtype} that meta.json describes: "
                f"it is damaged, or of another data set. Prepare {folder} again"
            )
        if n < block_size + 1:
            raise UserError(
                f"{path} has {n:,} tokens, but block_size {block_size} needs at least "
                f"{block_size + 1}. Use --block_size={max(1, n - 1)} or less, or more text"
            )
        self.places = n - block_size  # the number of places where a window can begin
        self.apart = (n - 1) // max(1, block_size)  # the number of windows that fit without overlap
        # The map stays on this file, even if another file takes the file's name later.
        self.ids = np.memmap(path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, step: int, size: int, *, seed: int = 0, rank: int = 0, world: int = 1) -> tuple:
        """Return (x, y), int64 (size / world, T) each: this rank's rows of a step's global batch.

        The global batch has `size` windows, drawn uniformly and with replacement from (seed, step)
        alone; y is x one token later. Ranks take turns, so the global batch does not depend on
        world. Raises UserError for an id that is not in the vocabulary.
        """
        offsets = np.random.default_rng([seed, step]).integers(0, self.places, size)
        return self._windows(offsets[rank::world])

    def eval_batches(self, n: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """Yield (x, y), int64 (up to `size`, T) each: n * size fixed windows, evenly spaced.

        Every call, in every run, gives the same windows: at most as many as fit without overlap.
        All ranks get the same number of batches. A rank without rows for its last batch gets one
        row whose y is -1 (ignored).
        """
        all_offsets = np.linspace(0, self.places - 1, min(n * size, self.apart)).astype(np.int64)
        offsets = all_offsets[rank::world]
        for i in range(0, len(all_offsets[::world]), size):
            rows = offsets[i : i + size]
            x, y = self._windows(rows if len(rows) else all_offsets[:1])
            yield x, y if len(rows) else torch.full_like(y, -1)

    def strided(self, stride: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """Yield (x, y), int64 (up to `size`, T) each: every token but the first is a target once.

        Windows begin `stride` tokens apart, and the last window ends with the split. A token is a
        target in the first window that reaches it; in later windows its y is -1 (ignored). So a
        target has at least T - stride tokens of context, except in the first window. Ranks take
        turns.
        """
        last = len(self) - 1 - self.block_size
        offsets = np.array([*range(0, last, stride), last])
        # The number of targets of each window that were targets of the window before.
        seen = self.block_size - np.diff(offsets, prepend=-self.block_size)
        offsets = offsets[rank::world]
        seen = torch.from_numpy(seen[rank::world, None])
        for i in range(0, len(offsets), size):
            x, y = self._windows(offsets[i : i + size])
            yield x, y.masked_fill(torch.arange(self.block_size) < seen[i : i + size], -1)

    def _windows(self, offsets):
        """Return (x, y) of the windows that begin at the offsets."""
        windows = np.lib.stride_tricks.sliding_window_view(self.ids, self.block_size + 1)[offsets]
        largest = windows.max(initial=0)
        n_vocab = self.meta["vocab_size"]
        if largest >= n_vocab:  # in a damaged file: a GPU would only say that an index is wrong
            raise UserError(
                f"{self.ids.filename} holds the id {largest}, but the vocabulary has {n_vocab} ids"
            )
        rows = torch.from_numpy(windows.astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


def positions(x: torch.Tensor, eot: int) -> torch.Tensor:
    """Return the position (B, T) of each token of x (B, T) in its document.

    The eot before a document is the document's position 0.
    """
    index = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return index - torch.where(x == eot, index, 0).cummax(1).values
