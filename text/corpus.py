"""Text of any size to tokens on disk, for data/*/prepare.py.

Documents come as a stream (sources.py) and are cut into pieces. Threads tokenise the pieces: the tokenizers' own code
runs outside of Python's lock. The tokens are written in the order of the text, for any number of threads, to files
*.tmp beside the data set. A journal notes how far they are: after an interruption the same command goes on.
"""

import collections
import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from errors import UserError, optional
from text import dataset, tokenizers
from text.files import TextError, replace, sha256, sync_folder
from text.sources import Document, Split, in_two, mapped, open_source, without_gutenberg

PIECE = 2**14  # characters that are tokenised together, roughly
BATCH = 2**20  # characters that a thread takes at once, roughly
JOURNAL = "prepare.tmp"  # the name of the journal's file
SYNC_BYTES = 2**26  # bytes of text between two entries of the journal
SAMPLE = 2 * 10**7  # characters that SentencePiece is trained on
PER_DOCUMENT = 10**5  # of them, from one document; of fewer than 200 documents, an equal share of each
BEGINNING = {"shard": 0, "pieces": 0, "documents": 0}  # the place at which a corpus begins
CUT = re.compile(rf".{{{PIECE},{8 * PIECE}}}?(?<!\s)(?=[ \n])|.{{1,{8 * PIECE}}}", re.S)


def pieces(document: Document) -> Iterator[tuple[str, bool]]:
    """Yields (piece, whether it is the last) of a document. A piece: PIECE characters or more, up to a space or \\n.

    A piece ends where a space follows a visible character. Every tokenizer of tokenizers.py begins a token there: no
    pattern of GPT-2's matches across that place, and SentencePiece's tokens begin with the space. So the pieces have
    the tokens of the whole text. (SentencePiece adds scores up in float32: in a text of 250,000 characters, one token
    in 40,000 differs.) If there is no such place within 8 PIECE characters, the piece ends after them.
    """
    rest = ""
    for block in itertools.chain(document, [None]):
        rest += block or ""
        enough = 0 if block is None else 8 * PIECE  # with more characters, the next block cannot change the cut
        at = 0
        while len(rest) - at > enough:
            end = CUT.match(rest, at).end()
            yield rest[at:end], block is None and end == len(rest)
            at = end
        rest = rest[at:]


@dataclass
class Piece:
    text: str
    last: bool  # whether it ends its document
    file: str  # train, val or test: where its tokens go
    place: dict  # the shard's number, the piece's number in it, and the number of train's documents before the shard


def located(splits: dict[str, Split], share: float, begin: dict) -> Iterator[Piece | None]:
    """The pieces of a corpus from begin's shard on, and None after each shard. share: of train's documents, for val."""
    shards = [(name, shard) for name, split in splits.items() for shard in split.shards]
    documents = begin["documents"]
    for i, (name, shard) in itertools.islice(enumerate(shards), begin["shard"], None):
        place = {"shard": i, "pieces": 0, "documents": documents}
        for document in shard():
            is_val = name == "train" and int((documents + 1) * share) > int(documents * share)
            documents += name == "train"
            for text, last in pieces(document):
                place = place | {"pieces": place["pieces"] + 1}
                yield Piece(text, last, "val" if is_val else name, place)
        yield None


def batches(splits: dict[str, Split], share: float, begin: dict) -> Iterator[list[Piece]]:
    """The pieces of a corpus after `begin`, in batches. A batch has about BATCH characters of one shard and file."""
    batch, size = [], 0
    for piece in itertools.islice(located(splits, share, begin), begin["pieces"], None):
        if batch and (piece is None or piece.file != batch[0].file or size > BATCH):
            yield batch
            batch, size = [], 0
        if piece is not None:
            batch.append(piece)
            size += len(piece.text)


COUNTS = ("tokens", "documents", "bytes", "words")  # of a file: bytes of UTF-8, words between whitespace
OTHER_SPACES = [c for c in map(chr, range(128, 0x3001)) if c.isspace()]


def n_words(text: str, data: bytes) -> int:
    """len(text.split()), six times as fast. data: text in UTF-8, not empty."""
    if not text.isascii() and any(c in text for c in OTHER_SPACES):
        return len(text.split())
    codes = np.frombuffer(data, dtype=np.uint8)
    space = (codes - np.uint8(9) < 5) | (codes - np.uint8(28) < 5)  # 9 to 13, 28 to 32: smaller codes wrap around
    return int(np.count_nonzero(space[:-1] > space[1:])) + (not space[0])


def tokenised(tok: tokenizers.Tokenizer, eot: int | None, dtype: np.dtype, batch: list[Piece]) -> tuple[bytes, dict]:
    """A batch's tokens, with eot (if any) after each document, and their COUNTS. TextError for unknown characters."""
    ids = []
    counts = collections.Counter()
    for piece in batch:
        ids.append(tok.ids(piece.text))
        if piece.last and eot is not None:
            ids.append(np.array([eot]))
        data = piece.text.encode("utf-8", "surrogatepass")
        counts.update(documents=piece.last, bytes=len(data), words=n_words(piece.text, data))
    counts["tokens"] = sum(map(len, ids))
    return np.concatenate(ids).astype(dtype).tobytes(), counts


def in_order(f: Callable, items: Iterable, workers: int) -> Iterator[tuple]:
    """(item, f(item)) in the order of the items, computed a few items ahead by `workers` threads.

    If reading an item raises a UserError or an OSError, the results of the items before it come first.
    """

    def submitted() -> Iterator[tuple]:
        try:
            for item in items:
                yield item, pool.submit(f, item)
        except (UserError, OSError) as error:
            failed = Future()
            failed.set_exception(error)
            yield None, failed

    pool, stream = ThreadPoolExecutor(workers), submitted()
    try:
        ahead = collections.deque(itertools.islice(stream, max(8, 2 * workers)))
        while ahead:
            ahead.extend(itertools.islice(stream, 1))
            item, result = ahead.popleft()
            yield item, result.result()
    finally:
        pool.shutdown(cancel_futures=True)


def prepare(
    folder: str, splits: dict[str, Split], tokenizer: dict, source: dict, *,
    val_share: float = 0.0, gutenberg: bool = False, num_workers: int | None = None,
) -> dict:  # fmt: skip
    """Writes <split>.bin for each split, and meta.json, into folder. Returns the content of meta.json.

    splits: by name. tokenizer: a meta for new_tokenizer. source: where the text came from, for meta.json.
    val_share: without a val split, this share of train's documents, or of the characters of its one document, is val.
    gutenberg: leaves Project Gutenberg's licences out. num_workers: threads; None: one per core.
    A folder that is prepared from the same source is left as it is. Raises TextError for content that is not text and
    OSError for a full disk, and then deletes what it wrote. After any other interruption the same call goes on.
    """
    if num_workers is not None and num_workers < 1:
        raise UserError(f"num_workers={num_workers} must be at least 1")
    several = sum(split.count(2) for split in splits.values()) > 1
    if gutenberg:
        splits = {name: mapped(split, without_gutenberg) for name, split in splits.items()}
    splits, val_share = _with_val(splits, val_share)
    what = [source, {name: split.about for name, split in splits.items()}, val_share, gutenberg, PIECE]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    os.makedirs(folder, exist_ok=True)
    with locked(folder):
        journal = Journal(folder, source, digest, [*splits, "val"] if val_share else splits)
        meta = intact(folder)
        if meta.get("id") == digest:
            print(f"{folder} is already prepared and intact: nothing to do")
            if not journal.others:
                journal.discard()
            return meta
        with contextlib.suppress(UserError):
            old = dataset.read_meta(folder)
            print(f"{folder} has {old['tokenizer']['kind']} tokens of {old['source'].get('from')}: replacing them")
        try:
            if not journal.state["done"]:
                _tokenise(journal, splits, tokenizer, several, val_share, num_workers)
            return journal.finish()
        except (UserError, OSError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            if full:
                error = OSError(error.errno, f"{error.strerror}: {folder} (what was written is deleted)")
            if full or isinstance(error, TextError) or not journal.n_tokens():  # nothing to go on with
                journal.discard()
                raise error from None
            kind = OSError if isinstance(error, OSError) else UserError  # their subclasses may take other arguments
            raise kind(f"{error}: stopped; the same command goes on from there") from None


def _with_val(splits: dict[str, Split], share: float) -> tuple[dict[str, Split], float]:
    """(splits, the share of train's documents that goes to val; 0 if there is a val split, or if one is cut here)."""
    if "val" in splits:
        return splits, 0.0
    if not 0 < share < 1:
        raise UserError(f"val_share={share} must be between 0 and 1: the source has no validation split")
    n = splits["train"].count(math.ceil(1 / share) + 1)  # enough for one of val
    if n == 1:
        return splits | in_two(splits["train"], share), 0.0
    if int(n * share) == 0:
        hint = f"; --val_share={1.1 / n:.2g} fits" if n > 1 else ""
        few = f"the number of documents is {n}{hint}"
        raise UserError(f"val_share={share} leaves no document for train or for val: {few}")
    return splits, share


@contextlib.contextmanager
def locked(folder: str, wait: bool = False) -> Iterator[None]:
    """Keeps other processes from preparing the folder. If one does now: waits until it is done, or raises OSError."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # on Windows there is no lock
            import fcntl

            number = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, number)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise OSError(f"another process is preparing {folder}") from None
        yield


def _tokenise(journal, splits, meta: dict, several: bool, val_share: float, workers: int | None) -> None:
    """Writes the tokens that the files lack. After an interruption the journal has the tokenizer already."""
    state = journal.state
    workers = workers or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    tok = new_tokenizer(state["tokenizer"] or meta, splits, val_share, several)
    if several and tok.eot is None:
        print("this tokenizer has no token for the end of a document: nothing will separate the documents")
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    state |= {"tokenizer": tok.meta, "vocab_size": tok.n_vocab, "dtype": dtype.name}
    work = partial(tokenised, tok, tok.eot if several else None, dtype)
    total = sum(split.size for split in splits.values())
    before = sum(entry["bytes"] for entry in state["files"].values())
    done = 0  # bytes, by this call
    began = time.perf_counter()
    wait = 0.2 if sys.stderr.isatty() else 30.0  # seconds; a log file gets few lines
    tqdm = optional("tqdm", "the progress bar").tqdm
    bar = tqdm(None, "tokenising", total or None, initial=before, unit="B", unit_scale=True, mininterval=wait, delay=1)
    with bar, journal.writing():
        free = shutil.disk_usage(journal.folder).free / 1e6
        for batch, (tokens, counts) in in_order(work, batches(splits, val_share, dict(state)), workers):
            mb = (total - before) * len(tokens) / max(1, counts["bytes"]) / 1e6
            if not done and free < mb * 1.02 + 1:
                needs = f"{journal.folder} needs about {mb:,.1f} MB for the tokens"
                raise UserError(f"{needs}, but its disk has {free:,.1f} MB free")
            journal.add(batch[-1], tokens, counts)
            done += counts["bytes"]
            bar.update(counts["bytes"])
    seconds = time.perf_counter() - began
    if empty := [name for name, entry in state["files"].items() if not entry["tokens"]]:
        raise TextError(f"there is too little text: {empty[0]} would be empty")
    if seconds > 1:
        print(f"{done / 1e6:,.1f} MB of text in {seconds:.1f} s: {done / 1e6 / seconds:.1f} MB/s, {workers} threads")


def intact(folder: str) -> dict:
    """The meta.json of a folder that holds a complete data set; {} for other folders."""
    try:
        meta = dataset.read_meta(folder)
        counted = all(set(COUNTS) <= entry.keys() for entry in meta["files"].values())  # earlier versions did not count
        return meta if counted and all(dataset.Tokens(folder, name[:-4], 0) for name in meta["files"]) else {}
    except UserError:
        return {}


class Journal:
    """Notes in a file how far prepare is: what is in each file of tokens, and where in the corpus this ends."""

    def __init__(self, folder: str, source: dict, digest: str, names: Iterable[str]):
        self.folder = folder
        self.path = os.path.join(folder, JOURNAL)
        self.unwritten = 0  # bytes of text since the last entry
        self.state = {"id": digest, "source": source, "tokenizer": None, "vocab_size": None, "dtype": None}
        self.state |= {"files": {f"{name}.bin": dict.fromkeys(COUNTS, 0) for name in names}, "done": False, **BEGINNING}
        found = {}
        with contextlib.suppress(OSError, ValueError, TypeError), open(self.path, encoding="utf-8") as f:
            found = dict(json.load(f))
        self.others = found.get("id", digest) != digest  # whether a different command was interrupted
        same = found.keys() == self.state.keys() and not self.others  # other keys: an earlier version wrote it
        if same and all(self._is_there(name, found) for name in found["files"]):
            self.state = found
            if self.n_tokens():
                print(f"{folder}: going on after {self.n_tokens():,} tokens")

    def n_tokens(self) -> int:
        return sum(entry["tokens"] for entry in self.state["files"].values())

    def _aside(self, name: str) -> str:
        return os.path.join(self.folder, f"{name}.tmp")

    def _is_there(self, name: str, state: dict) -> bool:
        """Whether a file is as long as state says. If all tokens are done, it may have its final name already."""
        paths = [self._aside(name)] + ([os.path.join(self.folder, name)] if state["done"] else [])
        size = state["files"][name]["tokens"] * np.dtype(state["dtype"]).itemsize
        return any(os.path.exists(path) and os.path.getsize(path) >= size for path in paths)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which tokens can be added. If it ends with an error, the next call goes on from there."""
        if not self.n_tokens():
            self.discard()  # what an interrupted command left
        self._sync()  # first: no journal may promise more than the files hold
        try:
            yield
        finally:
            self._sync()

    def add(self, piece: Piece, tokens: bytes, counts: dict) -> None:
        """Appends the tokens up to this piece to what the journal notes of their file, and notes the new end."""
        name = f"{piece.file}.bin"
        entry = self.state["files"][name]
        with open(self._aside(name), "ab") as f:
            f.truncate(entry["tokens"] * np.dtype(self.state["dtype"]).itemsize)
            f.write(tokens)
        entry = {key: entry[key] + counts[key] for key in COUNTS}
        self.state |= piece.place | {"files": self.state["files"] | {name: entry}}  # at once: Ctrl-C may come any time
        self.unwritten += counts["bytes"]
        if self.unwritten >= SYNC_BYTES:
            self._sync()

    def _sync(self) -> None:
        """Flushes the files to the disk, and then writes the journal."""
        for name in self.state["files"]:
            with open(self._aside(name), "ab") as f:
                os.fsync(f.fileno())
        replace(self.path, json.dumps(self.state).encode())
        self.unwritten = 0

    def finish(self) -> dict:
        """Renames the files, writes meta.json and returns its content. After an interruption it can be called again."""
        if not self.state["done"]:
            for name, entry in self.state["files"].items():
                entry["sha256"] = sha256(self._aside(name))
            self.state["done"] = True
            self._sync()
        meta_path = os.path.join(self.folder, "meta.json")
        with contextlib.suppress(UserError):  # it is missing or damaged
            old = dataset.read_meta(self.folder)["files"]
            os.remove(meta_path)  # first, because it describes the others
            self._remove(old.keys() - self.state["files"].keys())
        for name in self.state["files"]:
            if os.path.exists(self._aside(name)):
                os.replace(self._aside(name), os.path.join(self.folder, name))
        sync_folder(self.folder)
        meta = {key: self.state[key] for key in ("tokenizer", "vocab_size", "dtype", "source", "id", "files")}
        replace(meta_path, json.dumps(meta, indent=1, ensure_ascii=False).encode())
        os.remove(self.path)
        return meta

    def discard(self) -> None:
        self._remove(name for name in os.listdir(self.folder) if name.endswith(".bin.tmp") or name == JOURNAL)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(self.folder, name))


def report(meta: dict) -> None:
    """Prints what was prepared, in a few lines."""
    print(f"source: {meta['source'].get('from')}\nvocab size: {meta['vocab_size']:,}")
    for name, entry in meta["files"].items():
        counts = f"{entry['documents']:,} documents, {entry['words']:,} words, {entry['bytes']:,} bytes"
        print(f"{name[:-4]} has {entry['tokens']:,} tokens ({counts})")


def run(
    out_dir: str, source: str, column: str, tokenizer: str, *, val_share: float, num_workers: int | None,
    gutenberg: bool = False, vocab_size: int | None = None,
) -> None:  # fmt: skip
    """What a prepare.py does with its flags: opens the source, tokenises it into out_dir, prints a report.

    tokenizer: a kind of TOKENIZER, for this text (sentencepiece with vocab_size tokens); or a prepared data set's name.
    """
    splits = open_source(source, column)
    if "train" not in splits:
        raise UserError(f"{source} has no train split, but {', '.join(splits)}")
    about = {"from": source, "tokenizer": tokenizer} | ({"vocab_size": vocab_size} if vocab_size else {})
    meta = {"kind": tokenizer} | ({"vocab_size": vocab_size} if tokenizer == "sentencepiece" else {})
    if tokenizer not in tokenizers.TOKENIZER:
        try:
            meta = dataset.read_meta(dataset.folder_of(tokenizer))["tokenizer"]
        except UserError as error:
            known = ", ".join(tokenizers.TOKENIZER)
            raise UserError(f"tokenizer={tokenizer} is not one of {known}, and no prepared data set: {error}") from None
        about["of"] = hashlib.sha256(json.dumps(meta).encode()).hexdigest()
    report(prepare(out_dir, splits, meta, about, val_share=val_share, gutenberg=gutenberg, num_workers=num_workers))


def new_tokenizer(meta: dict, splits: dict[str, Split], val_share: float, eot: bool) -> tokenizers.Tokenizer:
    """The tokenizer of a meta; of {"kind": "char"} and {"kind": "sentencepiece", "vocab_size": n} made of the text."""
    if "vocab_size" in meta:
        return tokenizers.train_sentencepiece(_sample(splits["train"], val_share), meta["vocab_size"])
    if meta == {"kind": "char"}:
        documents = itertools.chain.from_iterable(split.documents() for split in splits.values())
        characters = itertools.chain.from_iterable(itertools.chain.from_iterable(documents))
        return tokenizers.CharTokenizer("".join(sorted(set(characters))), eot)
    return tokenizers.tokenizer(meta)


def _sample(train: Split, val_share: float) -> Iterator[str]:
    """The lines that SentencePiece is trained on, SAMPLE characters: the beginnings of train's first documents."""
    n = train.count(SAMPLE // PER_DOCUMENT)
    share = SAMPLE // max(1, n)
    total = of_this = 0  # characters: of all documents so far, and of the current one
    for batch in (b for b in batches({"train": train}, val_share, BEGINNING) if b[0].file == "train"):
        for piece in batch:
            if of_this < share:
                yield from (line for line in piece.text.split("\n") if line.strip())
                total += len(piece.text)
            of_this = 0 if piece.last else of_this + len(piece.text)
        if total >= SAMPLE:
            return
