"""Tokens on disk, and batches of them.

A prepared data set is a folder with train.bin, val.bin (token ids, nothing else) and meta.json (tokenizer, dtype,
counts, checksums). A batch is a pure function of (seed, step, rank, world size).
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import torch

from errors import UserError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VERIFY_BYTES = 2**30  # the checksum of a larger file is not compared: that would read the whole file


def folder_of(dataset: str) -> str:
    """The folder of a data set, given by its name in data/ or its path. Raises UserError, with the known names."""
    folder = os.path.join(ROOT, "data", dataset)
    path = os.path.abspath(dataset)
    if not os.path.isfile(os.path.join(folder, "meta.json")) and os.path.isfile(os.path.join(path, "meta.json")):
        return path
    if not os.path.isdir(folder):
        known = sorted(d for d in os.listdir(os.path.join(ROOT, "data")) if d[0] not in "._")
        raise UserError(f"there is no data set {dataset!r} ({folder}); there are: {', '.join(known)}")
    return folder


def prepare_shakespeare(dataset: str) -> None:
    """Prepares one of the two Shakespeares if it is missing. Does nothing for other data sets, which take long."""
    folder = os.path.join(ROOT, "data", dataset)
    prepare, meta = os.path.join(folder, "prepare.py"), os.path.join(folder, "meta.json")
    if dataset in ("shakespeare_char", "shakespeare") and not os.path.exists(meta):
        print(f"{dataset} is not prepared yet: running {os.path.relpath(prepare)}", flush=True)
        if subprocess.run([sys.executable, prepare]).returncode:
            raise UserError(f"{prepare} failed, see above")


def sha256(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _again(folder: str) -> str:
    """The command that prepares a folder: its own script or, for a user's own text, the general one."""
    own = os.path.relpath(os.path.join(folder, "prepare.py"))
    general = f"data/text/prepare.py --source=TEXT --out_dir={os.path.relpath(folder)}"
    return f"Run: python {own if os.path.exists(own) else general}"


def read_meta(folder: str) -> dict:
    """The content of a prepared folder's meta.json. Raises UserError, naming the command that prepares the folder."""
    path = os.path.join(folder, "meta.json")
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except (FileNotFoundError, ValueError):
        raise UserError(f"{folder} is not prepared: meta.json is missing or damaged. {_again(folder)}") from None


class Tokens:
    """One split of a prepared data set, memory-mapped and checked.

    Raises UserError for a file that is missing, not what meta.json promises, or shorter than block_size + 1 tokens.
    """

    def __init__(self, folder: str, split: str, block_size: int):
        self.meta = read_meta(folder)
        self.block_size = block_size
        path = os.path.join(folder, f"{split}.bin")
        entry = self.meta["files"].get(f"{split}.bin")
        if entry is None:
            splits = ", ".join(name.removesuffix(".bin") for name in self.meta["files"])
            raise UserError(f"{folder} has no split {split!r}, but {splits}")
        dtype, size, n = np.dtype(self.meta["dtype"]), os.path.getsize(path), entry["tokens"]
        if size != n * dtype.itemsize:
            sizes = f"has {size:,} bytes, but meta.json promises {n:,} tokens of {dtype}"
            raise UserError(f"{path} {sizes}: truncated, or of another data set. {_again(folder)}")
        if n < block_size + 1:
            few = f"{path} has {n:,} tokens, but block_size {block_size} needs at least {block_size + 1}"
            raise UserError(f"{few}. Use --block_size={max(1, n - 1)} or less, or more text")
        self.places = n - block_size  # the number of places where a window can begin
        self.apart = (n - 1) // max(1, block_size)  # the number of windows that fit without overlap
        self.ids = np.memmap(path, dtype=dtype, mode="r")  # stays, even if another file takes its name later
        if size <= VERIFY_BYTES and sha256(path) != entry["sha256"]:
            raise UserError(f"{path} does not have the checksum that meta.json promises. {_again(folder)}")

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, step: int, size: int, *, seed: int = 0, rank: int = 0, world: int = 1) -> tuple:
        """(x, y), int64 (size / world, T) each: this rank's rows of a step's global batch of `size` windows.

        y is x one token later. Windows are drawn uniformly, with replacement, from (seed, step) alone. Ranks take
        turns, so the global batch does not depend on world. Raises UserError for an id that is too large.
        """
        offsets = np.random.default_rng([seed, step]).integers(0, self.places, size)
        return self._windows(offsets[rank::world])

    def eval_batches(self, n: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """Yields (x, y), int64 (up to `size`, T) each. Together they are n * size fixed windows, evenly spaced.

        Every call, in every run, gives the same windows: at most as many as fit without overlap. Every rank gets the
        same number of batches. A rank that has no rows left for its last one gets a row whose y is -1 (ignored).
        """
        all_offsets = np.linspace(0, self.places - 1, min(n * size, self.apart)).astype(np.int64)
        offsets = all_offsets[rank::world]
        for i in range(0, len(all_offsets[::world]), size):
            has_rows = i < len(offsets)
            x, y = self._windows(offsets[i : i + size] if has_rows else all_offsets[:1])
            yield x, y if has_rows else torch.full_like(y, -1)

    def strided(self, stride: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """Yields (x, y), int64 (up to `size`, T) each: every token but the first is a target once.

        Windows begin `stride` tokens apart, and the last one ends with the split. A token is a target in the first
        window that reaches it; in every later one its y is -1 (ignored). So a target has at least T - stride tokens
        of context, except in the first window. Ranks take turns.
        """
        last = len(self) - 1 - self.block_size
        offsets = np.array([*range(0, last, stride), last])
        seen = self.block_size - np.diff(offsets, prepend=-self.block_size)  # how many were targets before
        offsets, seen = offsets[rank::world], torch.from_numpy(seen[rank::world, None])
        for i in range(0, len(offsets), size):
            x, y = self._windows(offsets[i : i + size])
            yield x, y.masked_fill(torch.arange(self.block_size) < seen[i : i + size], -1)

    def _windows(self, offsets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, y) of the windows that begin at the offsets."""
        windows = np.lib.stride_tricks.sliding_window_view(self.ids, self.block_size + 1)[offsets]
        largest, last = windows.max(initial=0), self.meta["vocab_size"] - 1
        if largest > last:  # in a damaged file: a GPU would only say that an index is wrong
            raise UserError(f"{self.ids.filename} holds the id {largest}, but the vocabulary ends at {last}")
        rows = torch.from_numpy(windows.astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


def positions(x: torch.Tensor, eot: int) -> torch.Tensor:
    """(B, T): the position of each token of x (B, T) in its document. The eot before a document is its position 0."""
    at = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return at - torch.where(x == eot, at, 0).cummax(1).values
