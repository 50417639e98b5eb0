"""Tokens on disk, and batches of them.

A prepared data set is a folder with train.bin and val.bin (token ids, nothing else) and meta.json
(tokenizer, dtype, counts, checksums). A batch is a pure function of (seed, step, rank, world size).
"""

import hashlib
import json
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
    """Return the folder of a prepared data set, which is the name of a folder in data/ or a path.

    Raises UserError if there is none, with the names in data/.
    """
    for folder in (DATA / dataset, Path(dataset).absolute()):
        if (folder / "meta.json").is_file():
            return str(folder)
    names = sorted(path.name for path in DATA.glob("[!.]*"))
    raise UserError(
        f"there is no data set {dataset!r}, or it is not prepared. "
        f"python data/NAME/prepare.py prepares one of these: {', '.join(names)}"
    )


def prepare_small(dataset: str) -> None:
    """Prepare a small data set if it is missing. Other data sets take too long for that.

    If that fails, its script says why, and folder_of finds no data set.
    """
    script = DATA / dataset / "prepare.py"
    is_small = dataset in "shakespeare_char shakespeare python".split()
    if is_small and not script.with_name("meta.json").exists():
        print(f"{dataset} is not prepared yet: running {script}", flush=True)
        subprocess.run([sys.executable, script])


def sha256(path: str | Path) -> str:
    """Return the SHA-256 checksum of a file, in hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_meta(folder: str) -> dict:
    """Return the content of meta.json of a prepared folder. Raises UserError if it has none."""
    try:
        return json.loads(Path(folder, "meta.json").read_bytes())
    except (FileNotFoundError, ValueError):
        raise UserError(
            f"{folder} is not prepared: meta.json is missing or damaged. "
            f"Run: python {folder}/prepare.py, or for your own text data/text/prepare.py"
        ) from None


class Tokens:
    """One split of a prepared data set, memory-mapped and checked.

    Raises UserError for a split that is not there, for a file that is not what meta.json says, and
    for fewer than block_size + 1 tokens; OSError for a file that is missing.
    """

    def __init__(self, folder: str, split: str, block_size: int):
        self.meta = read_meta(folder)
        self.block_size = block_size

        # Is it the file that meta.json describes, and long enough?
        files = self.meta["files"]
        name = f"{split}.bin"
        if name not in files:
            raise UserError(f"{folder} has no split {split!r}, but {', '.join(files)}")

        path = Path(folder, name)
        size = path.stat().st_size
        dtype = np.dtype(self.meta["dtype"])
        entry = files[name]
        n = entry["tokens"]
        if size != n * dtype.itemsize or (size <= VERIFY_BYTES and sha256(path) != entry["sha256"]):
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
        # The map stays on this file, even if another file takes the file's name later.
        self.ids = np.memmap(path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, step: int, size: int, *, seed: int = 0, rank: int = 0, world: int = 1) -> tuple:
        """Return (x, y), int64 (size / world, T) each: this rank's rows of a step's global batch.

        The global batch has `size` windows, drawn uniformly and with replacement from (seed, step)
        alone; y is x one token later. Ranks take turns, so the global batch does not depend on
        world.
        """
        offsets = np.random.default_rng([seed, step]).integers(0, self.places, size)
        return self._windows(offsets[rank::world])

    def eval_batches(self, n: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """Yield (x, y), int64 (up to `size`, T) each: n * size fixed windows, evenly spaced.

        Every call, in every run, gives the same windows: at most as many as fit without overlap.
        All ranks get the same number of batches. A rank without rows for its last batch gets one
        row whose y is -1 (ignored).
        """
        n_windows = min(n * size, (len(self) - 1) // self.block_size)
        all_offsets = np.linspace(0, self.places - 1, n_windows).astype(np.int64)
        offsets = all_offsets[rank::world]

        for i in range(0, len(all_offsets[::world]), size):
            rows = offsets[i : i + size]
            x, y = self._windows(rows if len(rows) else [0])
            yield x, y if len(rows) else torch.full_like(y, -1)

    def strided(self, stride: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """Yield (x, y), int64 (up to `size`, T) each: every token but the first is a target once.

        Windows begin `stride` tokens apart, and the last window ends with the split. A token is a
        target in the first window that reaches it; in later windows its y is -1 (ignored). So a
        target has at least T - stride tokens of context, except in the first window. Ranks take
        turns.
        """
        last = self.places - 1
        offsets = np.array([*range(0, last, stride), last])
        # The number of targets of each window that were targets of the window before.
        seen = self.block_size - np.diff(offsets, prepend=-self.block_size)

        offsets = offsets[rank::world]
        seen = torch.from_numpy(seen[rank::world, None])  # (windows, 1)
        for i in range(0, len(offsets), size):
            x, y = self._windows(offsets[i : i + size])
            yield x, y.masked_fill(torch.arange(self.block_size) < seen[i : i + size], -1)

    def _windows(self, offsets):
        """Return (x, y) of the windows that begin at the offsets."""
        windows = np.lib.stride_tricks.sliding_window_view(self.ids, self.block_size + 1)
        rows = torch.from_numpy(windows[offsets].astype(np.int64))  # (B, T + 1)
        return rows[:, :-1], rows[:, 1:]
