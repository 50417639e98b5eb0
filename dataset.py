"""Tokens on disk, tokenizers and batches.

A prepared data set is a folder with train.bin, val.bin (token ids, nothing else) and meta.json
(tokenizer, dtype, counts, checksums). A batch is a pure function of (seed, step, rank, world size).
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import torch

ROOT = os.path.dirname(os.path.abspath(__file__))
VERIFY_BYTES = 2**30  # larger files are checked by size and by a sample of their ids, not read whole

# -----------------------------------------------------------------------------
# tokenizers: encode(text) -> ids, decode(ids) -> text, n_vocab; those of data sets have meta, for tokenizer()


class CharTokenizer:
    """One id per character of `vocab`."""

    def __init__(self, vocab: str):
        self.vocab, self.n_vocab = vocab, len(vocab)
        self.meta = {"kind": "char", "vocab": vocab}
        self._id = {c: i for i, c in enumerate(vocab)}

    def encode(self, text: str) -> list[int]:
        """Raises ValueError naming the characters that are not in the vocabulary."""
        if unknown := sorted(set(text) - set(self.vocab)):
            raise ValueError(
                f"the text holds {', '.join(map(repr, unknown[:10]))}, which the {self.n_vocab} "
                f"characters of this vocabulary lack: {self.vocab!r}"
            )
        return [self._id[c] for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.vocab[i] for i in ids)


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, through tiktoken (which downloads its two files once)."""

    meta = {"kind": "gpt2"}

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise ImportError("the GPT-2 tokenizer needs tiktoken: pip install tiktoken") from None
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' own exception classes
            raise OSError(f"tiktoken could not load its gpt2 files (is there a network?): {error}") from None
        self.n_vocab = self._bpe.n_vocab

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text, allowed_special={"<|endoftext|>"})

    def decode(self, ids: list[int]) -> str:
        return self._bpe.decode(ids)


class HubTokenizer:
    """The tokenizer that lies beside a model of transformers'."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer  # the model came through it

        try:
            self._tok = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # of several libraries
            raise ValueError(f"{name} has no tokenizer that loads: {str(error).splitlines()[0]}") from None
        self.n_vocab = len(self._tok)

    def encode(self, text: str) -> list[int]:
        return self._tok.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self._tok.decode(ids, skip_special_tokens=True)


def pretrained_tokenizer(name: str, vocab_size: int) -> GPT2Tokenizer | HubTokenizer:
    """The tokenizer of pretrained weights: the one beside them; for GPT-2's own names, and a folder of weights
    alone with a vocabulary of its size, GPT-2's."""
    folder = os.path.isdir(name)
    alone = folder and not any("token" in f or "vocab" in f for f in os.listdir(name))
    if alone and vocab_size != 50257:
        raise ValueError(f"{name} has no tokenizer beside its weights, and its {vocab_size} tokens are not GPT-2's")
    if alone or not (folder or "/" in name):
        return GPT2Tokenizer()
    return HubTokenizer(name)


def tokenizer(meta: dict) -> CharTokenizer | GPT2Tokenizer:
    """The tokenizer that a meta.json (its "tokenizer") or a checkpoint describes."""
    if meta.get("kind") == "char":
        return CharTokenizer(meta["vocab"])
    if meta.get("kind") == "gpt2":
        return GPT2Tokenizer()
    raise ValueError(f"unknown tokenizer {meta.get('kind')!r}; known are char and gpt2")


# -----------------------------------------------------------------------------
# writing


def sha256(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@contextlib.contextmanager
def written_aside(path: str) -> Iterator[BinaryIO]:
    """A file that is flushed to the disk and renamed to path at the end: there whole, or as it was before."""
    try:
        with open(path + ".tmp", "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
        sync_folder(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        raise


def sync_folder(folder: str) -> None:
    """Flushes a folder's names to the disk, as after a renaming."""
    if os.name == "posix":
        number = os.open(folder or ".", os.O_RDONLY)
        os.fsync(number)
        os.close(number)


def replace(path: str, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    with written_aside(path) as f:
        f.write(data)


def write(folder: str, tok: CharTokenizer, splits: dict[str, list[int]], source: dict) -> dict:
    """Writes <split>.bin for each split and meta.json, in the smallest unsigned dtype that fits.

    source: where the text came from, recorded as it is. Returns the meta data.
    """
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    meta = {"tokenizer": tok.meta, "vocab_size": tok.n_vocab, "dtype": dtype.name, "source": source, "files": {}}
    for split, ids in splits.items():
        data = np.asarray(ids, dtype=dtype).tobytes()
        replace(os.path.join(folder, f"{split}.bin"), data)
        meta["files"][f"{split}.bin"] = {"tokens": len(ids), "sha256": hashlib.sha256(data).hexdigest()}
    replace(os.path.join(folder, "meta.json"), json.dumps(meta, indent=1, ensure_ascii=False).encode())
    return meta


# -----------------------------------------------------------------------------
# reading


def folder_of(dataset: str) -> str:
    """The folder of a data set, whatever the working directory. Raises ValueError naming what there is."""
    folder = os.path.join(ROOT, "data", dataset)
    if not os.path.isdir(folder):
        known = sorted(d for d in os.listdir(os.path.join(ROOT, "data")) if d[0] not in "._")
        raise ValueError(f"there is no data set {dataset!r} ({folder}); there are: {', '.join(known)}")
    return folder


def _again(folder: str) -> str:
    """The command that prepares a folder: its own script or, for a user's own text, the general one."""
    own = os.path.relpath(os.path.join(folder, "prepare.py"))
    if os.path.exists(own):
        return f"Run: python {own}"
    return f"Run: python data/shakespeare_char/prepare.py --input=TEXT_FILE --out_dir={os.path.relpath(folder)}"


def read_meta(folder: str) -> dict:
    """meta.json of a prepared folder. Raises ValueError, naming the command that prepares it."""
    path = os.path.join(folder, "meta.json")
    if not os.path.exists(path):
        raise ValueError(f"{folder} is not prepared: meta.json is missing. {_again(folder)}")
    try:
        with open(path, encoding="utf-8") as f:
            meta = json.load(f)
        np.dtype(meta["dtype"]), range(meta["vocab_size"]), meta["source"].get("from")
        if meta["tokenizer"]["kind"] == "char":
            CharTokenizer(meta["tokenizer"]["vocab"])
        for entry in meta["files"].values():
            int(entry["tokens"]), entry["sha256"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}). {_again(folder)}") from None
    return meta


class Tokens:
    """One split of a prepared data set, memory-mapped and checked.

    Raises ValueError where the file is missing, truncated, not what meta.json says, holds ids past the
    vocabulary, or is shorter than block_size + 1 tokens.
    """

    def __init__(self, folder: str, split: str, block_size: int):
        self.meta, self.block_size = read_meta(folder), block_size
        path = os.path.join(folder, f"{split}.bin")
        again = _again(folder)
        entry = self.meta["files"].get(f"{split}.bin")
        if entry is None or not os.path.exists(path):
            raise ValueError(f"{path} is missing. {again}")
        dtype, size = np.dtype(self.meta["dtype"]), os.path.getsize(path)
        if size != entry["tokens"] * dtype.itemsize:
            raise ValueError(
                f"{path} has {size:,} bytes, but meta.json promises {entry['tokens']:,} tokens of {dtype} "
                f"({entry['tokens'] * dtype.itemsize:,} bytes): truncated, or from another run. {again}"
            )
        if entry["tokens"] < block_size + 1:
            raise ValueError(
                f"{path} has {entry['tokens']:,} tokens, but block_size {block_size} needs at least "
                f"{block_size + 1}. Use --block_size={max(1, entry['tokens'] - 1)} or less, or more text"
            )
        self._file = open(path, "rb")  # what is put in its place under this name later changes nothing here
        self.ids = np.memmap(self._file, dtype=dtype, mode="r")
        self._state = self._now()
        if size <= VERIFY_BYTES and sha256(path) != entry["sha256"]:
            raise ValueError(f"{path} does not have the checksum that meta.json promises. {again}")
        stride = 1 + size // VERIFY_BYTES  # of a larger file one block of 2^20 ids in so many
        largest = max(int(self.ids[i : i + 2**20].max()) for i in range(0, len(self), stride * 2**20))
        if largest >= self.meta["vocab_size"]:
            raise ValueError(f"{path} holds the id {largest}, but the vocabulary ends at {self.meta['vocab_size'] - 1}")

    def __len__(self) -> int:
        return len(self.ids)

    def _now(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def batch(self, step: int, size: int, *, seed: int = 0, rank: int = 0, world: int = 1) -> tuple:
        """(x, y), int64 (size / world, T): this rank's rows of step's global batch of `size` windows.

        y is x one token later. Windows are drawn uniformly, with replacement, and depend on (seed, step)
        alone: ranks take turns, so that any world size sees the same global batch.
        Raises ValueError where the file has been changed since it was opened, or holds an id past the vocabulary.
        """
        offsets = np.random.default_rng([seed, step]).integers(0, len(self) - self.block_size, size)
        return self._windows(offsets[rank::world])

    def eval_batches(self, n: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """(x, y) batches of up to `size` rows that cover n * size fixed windows, evenly spaced.

        The same windows at every call, in every run; at most as many as fit without overlap. Every rank gets as
        many batches: where one has no rows left, there is one row in its last, whose y are -1, to be ignored.
        """
        room = (len(self) - 1) // self.block_size
        count = min(n * size, room)
        all_offsets = np.linspace(0, len(self) - 1 - self.block_size, count).astype(np.int64)
        offsets = all_offsets[rank::world]
        for i in range(0, len(all_offsets[::world]), size):
            if i < len(offsets):
                yield self._windows(offsets[i : i + size])
            else:
                x, y = self._windows(all_offsets[:1])
                yield x, torch.full_like(y, -1)

    def _windows(self, offsets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if self._now() != self._state:  # and to read past the end of a shorter file would end the process
            raise ValueError(f"{self._file.name} has been changed while it was in use")
        rows = self.ids[offsets[:, None] + np.arange(self.block_size + 1)].astype(np.int64)
        if rows.max() >= self.meta["vocab_size"]:
            row = int(rows.max(axis=1).argmax())
            raise ValueError(
                f"{self._file.name} holds the id {rows.max()} after {offsets[row]:,} tokens, but the vocabulary ends "
                f"at {self.meta['vocab_size'] - 1}"
            )
        rows = torch.from_numpy(rows)
        return rows[:, :-1], rows[:, 1:]
