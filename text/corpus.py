"""Text of any size to tokens on disk, for data/*/prepare.py.

Documents come from text files, parquet files or the Hugging Face hub, as a stream. They are cut into pieces, which
threads tokenise (the tokenizers' own code runs outside of Python's lock) and which are written in their order: the
result does not depend on the number of workers. What is written grows beside the data set, as *.tmp with a journal, so
that the same command goes on after a kill, and is renamed at the end.
"""

import collections
import contextlib
import errno
import functools
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from configurator import UserError, first_line
from text import dataset, tokenizers
from text.files import replace, sha256, sync_folder
from text.sources import MANY, Document, Split, TextError, in_two, open_source, without_gutenberg
from text.tokenizers import SentencePieceTokenizer, Tokenizer

PIECE = 2**14  # characters that are tokenised together, about
BATCH = 2**20  # characters that a worker takes at once, about
JOURNAL = "prepare.tmp"  # how far it is
SYNC_BYTES = 2**26  # of text, between two entries of the journal
SAMPLE = 2 * 10**7  # characters that SentencePiece is trained on
PER_DOCUMENT = 10**5  # of them, where there are many documents


# -----------------------------------------------------------------------------
# what is done to a document


CUT = re.compile(rf".{{{PIECE},{8 * PIECE}}}?(?<!\s)(?=[ \n])", re.S)


def pieces(document: Document) -> Iterator[str]:
    """A document's text in pieces of about PIECE characters, each cut before whitespace that follows something else.

    There every tokenizer of tokenizers.py begins a token, whatever stands around it: none of GPT-2's patterns goes on
    over it, and SentencePiece's pieces begin with the space. So the tokens are those of the whole text. (But
    SentencePiece adds scores up in float32: of a text of 250,000 characters as a whole, one token in 40,000 is
    another.) Where there is no such place within 8 PIECE characters, it is cut there.
    """
    rest = ""
    for block in itertools.chain(document, [None]):
        at, rest = 0, rest + (block or "")
        while len(rest) - at > (0 if block is None else 8 * PIECE):  # the cut depends on what comes no more
            cut = CUT.match(rest, at)
            end = cut.end() if cut else at + 8 * PIECE
            yield rest[at:end]
            at = end
        rest = rest[at:]


# -----------------------------------------------------------------------------
# tokenising


@dataclass
class Batch:
    """Pieces of one file's tokens, with whether each ends its document, and where they stand in the corpus."""

    file: str
    split: str
    shard: int
    end: int  # pieces of the shard, up to and with these
    documents: int  # of the split, before the shard
    pieces: list[tuple[str, bool]]


def batches(splits: dict[str, Split], share: float, gutenberg: bool, begin: dict) -> Iterator[Batch]:
    """The corpus in its order, from where a journal says.

    share: of the documents of train are those of val, evenly spread; 0: none.
    """
    names = list(splits)
    for name in names[names.index(begin["split"]) :]:
        shard, skip, documents = (begin[k] if name == begin["split"] else 0 for k in ("shard", "pieces", "documents"))
        for i in range(shard, len(splits[name].shards)):
            first, n, batch, size = documents, 0, None, 0
            for document in splits[name].shards[i]():
                file = "val" if name == "train" and int((documents + 1) * share) > int(documents * share) else name
                document = pieces(without_gutenberg(document) if gutenberg else document)
                documents, piece = documents + 1, next(document, None)
                while piece is not None:
                    following = next(document, None)
                    n += 1
                    if n > skip:
                        if batch and (batch.file != file or size > BATCH):
                            yield batch
                            batch, size = None, 0
                        batch, size = batch or Batch(file, name, i, 0, first, []), size + len(piece)
                        batch.pieces.append((piece, following is None))
                        batch.end = n
                    piece = following
            if batch:
                yield batch
            skip = 0


COUNTS = ("tokens", "documents", "bytes", "words")  # of a file: text in UTF-8, and words between whitespace
OTHER_SPACES = [c for c in map(chr, range(128, 0x3001)) if c.isspace()]


def n_words(text: str, data: bytes) -> int:
    """len(text.split()), in a sixth of its time. data: text in UTF-8, not empty."""
    if not text.isascii() and any(c in text for c in OTHER_SPACES):
        return len(text.split())
    codes = np.frombuffer(data, dtype=np.uint8)
    space = (codes - np.uint8(9) < 5) | (codes - np.uint8(28) < 5)  # 9 to 13 and 28 to 32: smaller ones wrap around
    return int(np.count_nonzero(space[:-1] > space[1:])) + (not space[0])


def tokenised(tok: Tokenizer, eot: int | None, dtype: np.dtype, batch: Batch) -> tuple[bytes, dict]:
    """A batch's tokens, with eot, if there is one, after each document; and counts of what is in them.

    Raises TextError for text that the vocabulary lacks.
    """
    ids, counts = [], dict.fromkeys(COUNTS, 0)
    for text, last in batch.pieces:
        try:
            ids.append(tok.ids(text))
        except ValueError as error:
            raise TextError(str(error)) from None
        if last and eot is not None:
            ids.append(np.array([eot]))
        data = text.encode("utf-8", "surrogatepass")
        counts["bytes"] += len(data)
        counts["words"] += n_words(text, data)
        counts["documents"] += last
    counts["tokens"] = sum(map(len, ids))
    return np.concatenate(ids).astype(dtype).tobytes(), counts


def in_order(f: Callable, items: Iterable, workers: int) -> Iterator[tuple]:
    """(item, f(item)) in the order of the items, by so many threads; a few items wait.

    Where the items end with an error, those before it come first.
    """
    waiting, items, problem = collections.deque(), iter(items), None
    pool = ThreadPoolExecutor(workers)
    try:
        while problem is None:
            try:
                item = next(items)
            except (StopIteration, ValueError, OSError) as end:
                problem = end
                continue
            waiting.append((item, pool.submit(f, item)))
            if len(waiting) > max(8, 2 * workers):
                item, result = waiting.popleft()
                yield item, result.result()
        while waiting:
            item, result = waiting.popleft()
            yield item, result.result()
        if not isinstance(problem, StopIteration):
            raise problem
    finally:
        pool.shutdown(cancel_futures=True)


def prepare(
    folder: str,
    splits: dict[str, Split],
    new_tokenizer: Callable[[dict[str, Split], float, bool], Tokenizer],
    source: dict,
    *,
    val_share: float = 0.0,
    gutenberg: bool = False,
    num_workers: int | None = None,
) -> dict:
    """Writes <split>.bin for each split, and meta.json, into folder, and returns the meta data.

    After each document, if there is more than one, comes the tokenizer's boundary.
    new_tokenizer: makes the tokenizer, of the splits, the val_share and whether there are several documents, unless an
    interrupted call has done so. source: says where the text came from, and how it was tokenised. val_share: of the
    documents of train make val, where the source has none; of one document alone, its end. num_workers: threads; None:
    one per core.
    Nothing is done where the folder is prepared from the same source; an interrupted call is gone on with.
    Raises TextError for text that is none and OSError for a full disk, with nothing left behind; other ValueErrors and
    OSErrors, as of a network, leave what is done for the same call to go on with.
    """
    boundaries = sum(split.documents for split in splits.values()) > 1
    if "val" in splits:
        val_share = 0.0
    elif not 0 < val_share < 1:
        raise UserError(f"val_share={val_share} must be between 0 and 1: the source has no validation split")
    elif splits["train"].documents == len(splits["train"].shards) == 1:
        splits, val_share = splits | in_two(splits["train"], val_share, gutenberg), 0.0
    n = splits["train"].documents
    if val_share and n < MANY and not 0 < int(n * val_share) < n:
        hint = f": --val_share={1.1 / n:.2g}" if n > 1 else ""
        raise UserError(f"val_share={val_share} of {n} document(s) leaves none for train or for val{hint}")
    what = [source, {name: split.about for name, split in splits.items()}, val_share, gutenberg, PIECE]
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    os.makedirs(folder, exist_ok=True)
    with locked(folder):
        journal = Journal(folder, source, digest)
        if intact(folder, lambda meta: meta.get("id") == digest):
            print(f"{folder} is already prepared and intact: nothing to do")
            if not journal.others:
                journal.discard()
            return dataset.read_meta(folder)
        with contextlib.suppress(ValueError):
            meta = dataset.read_meta(folder)
            print(f"{folder} has {meta['tokenizer']['kind']} tokens of {meta['source'].get('from')}: replacing them")
        try:
            if not journal.state["done"]:
                _tokenise(journal, splits, new_tokenizer, boundaries, val_share, gutenberg, num_workers or _cores())
            return journal.finish()
        except (UserError, OSError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            if full or isinstance(error, TextError) or not journal.n_tokens():
                journal.discard()
                if full:
                    raise OSError(error.errno, f"{error.strerror}: {folder} (what was written is deleted)") from None
                raise
            kind = OSError if isinstance(error, OSError) else ValueError  # and not one that takes other arguments
            raise kind(f"{error}: stopped; the same command goes on from there") from None


@contextlib.contextmanager
def locked(folder: str, wait: bool = False) -> Iterator[None]:
    """Within it no other process prepares the folder. Raises OSError where one does; or waits until it has done so."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError):  # on Windows
            import fcntl

            number = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, number)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise OSError(f"another process is preparing {folder}") from None
        yield


def _tokenise(journal, splits, new_tokenizer, boundaries, val_share, gutenberg, workers):
    state, folder = journal.state, journal.folder
    made = state["tokenizer"]
    tok = tokenizers.tokenizer(made) if made else new_tokenizer(splits, val_share, boundaries)
    dtype, total = np.min_scalar_type(tok.n_vocab - 1), sum(split.size for split in splits.values())
    if boundaries and tok.eot is None:
        print("these tokens have no boundary of documents: none will be between them")
    state |= {"tokenizer": tok.meta, "vocab_size": tok.n_vocab, "dtype": dtype.name}
    state["split"] = state["split"] or next(iter(splits))
    for name in [*splits, *(["val"] if val_share else [])]:
        state["files"].setdefault(f"{name}.bin", dict.fromkeys(COUNTS, 0))
    bar = _bar(total, sum(entry["bytes"] for entry in state["files"].values()))
    began, before = time.perf_counter(), bar.n
    stream = batches(splits, val_share, gutenberg, dict(state))
    eot = tok.eot if boundaries else None
    stream = in_order(lambda batch: tokenised(tok, eot, dtype, batch), stream, workers)
    with bar, journal.parts() as parts:
        for i, (batch, (data, counts)) in enumerate(stream):
            if i == 0:  # before anything is written
                _check_space(folder, (total - before) * len(data) / max(1, counts["bytes"]))
            name = f"{batch.file}.bin"
            parts[name].write(data)
            entry = {key: state["files"][name][key] + counts[key] for key in COUNTS}
            now = {"split": batch.split, "shard": batch.shard, "pieces": batch.end, "documents": batch.documents}
            state |= now | {"files": state["files"] | {name: entry}}  # in one go, whenever Ctrl-C comes
            bar.update(counts["bytes"])
            journal.entry(counts["bytes"])
        seconds, done = time.perf_counter() - began, bar.n - before
    if empty := [name for name, entry in state["files"].items() if not entry["tokens"]]:
        raise TextError(f"there is too little text: {empty[0]} would be empty")
    if seconds > 1:
        print(f"{done / 1e6:,.1f} MB of text in {seconds:.1f} s: {done / 1e6 / seconds:.1f} MB/s, {workers} threads")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bar(total: int, done: int) -> object:
    from tqdm import tqdm

    often = 0.2 if sys.stderr.isatty() else 30.0  # seconds: a file gets a line now and then
    return tqdm(
        total=total or None, initial=done, unit="B", unit_scale=True, mininterval=often, delay=1.0, desc="tokenising"
    )


def _check_space(folder: str, need: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < need * 1.02 + 2**20:
        raise UserError(
            f"{folder} needs about {need / 1e6:,.1f} MB for the tokens, but its disk has {free / 1e6:,.1f} MB free"
        )


def intact(folder: str, wanted: Callable[[dict], bool]) -> bool:
    """Whether folder holds a whole data set whose meta data are wanted."""
    try:
        meta = dataset.read_meta(folder)
        counted = all(set(COUNTS) <= entry.keys() for entry in meta["files"].values())  # older ones are not
        return counted and wanted(meta) and all(dataset.Tokens(folder, name[:-4], 0) for name in meta["files"])
    except ValueError:
        return False


class Journal:
    """How far a call of prepare is: what is in each file, and where in the corpus that ends, as a file beside them."""

    def __init__(self, folder: str, source: dict, digest: str):
        self.folder, self.path, self.unwritten = folder, os.path.join(folder, JOURNAL), 0
        self.state = {"id": digest, "source": source, "tokenizer": None, "dtype": None, "files": {}, "done": False}
        self.state |= {"split": None, "shard": 0, "pieces": 0, "documents": 0}
        self.others = []  # files of another command that was interrupted
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(self.path, encoding="utf-8") as f:
                state = json.load(f)
            if state["id"] == digest and all(self._there(name, state) for name in state["files"]):
                self.state = state
                if self.n_tokens():
                    print(f"{folder}: going on after {self.n_tokens():,} tokens")
            else:
                self.others = list(state["files"])

    def n_tokens(self) -> int:
        return sum(entry["tokens"] for entry in self.state["files"].values())

    def _part(self, name: str) -> str:
        return os.path.join(self.folder, f"{name}.tmp")

    def _there(self, name: str, state: dict) -> bool:
        paths = [self._part(name)] + ([os.path.join(self.folder, name)] if state["done"] else [])
        size = state["files"][name]["tokens"] * np.dtype(state["dtype"]).itemsize
        return any(os.path.exists(path) and os.path.getsize(path) >= size for path in paths)

    @contextlib.contextmanager
    def parts(self) -> Iterator[dict]:
        """The files to write to, each at the end of what the journal says is in it."""
        self._remove(self._part(name) for name in self.others if name not in self.state["files"])
        replace(self.path, json.dumps(self.state).encode())  # before any is touched: an older journal holds no more
        with contextlib.ExitStack() as stack:
            self.files = {}
            for name, entry in self.state["files"].items():
                self.files[name] = stack.enter_context(open(self._part(name), "ab"))
                self.files[name].truncate(entry["tokens"] * np.dtype(self.state["dtype"]).itemsize)
            try:
                yield self.files
            except BaseException:  # what is done is done
                with contextlib.suppress(OSError):
                    self.entry(SYNC_BYTES)
                raise
            self.entry(SYNC_BYTES)

    def entry(self, n_bytes: int) -> None:
        """So many bytes of text more are in the files: to the disk, from time to time."""
        self.unwritten += n_bytes
        if self.unwritten >= SYNC_BYTES:
            for file in self.files.values():
                file.flush()
                os.fsync(file.fileno())
            replace(self.path, json.dumps(self.state).encode())
            self.unwritten = 0

    def finish(self) -> dict:
        """The data set, under its names. Can be repeated where it was interrupted."""
        if not self.state["done"]:
            for name, entry in self.state["files"].items():
                entry["sha256"] = sha256(self._part(name))
            self.state["done"] = True
            replace(self.path, json.dumps(self.state).encode())
        meta_path = os.path.join(self.folder, "meta.json")
        before = []
        with contextlib.suppress(ValueError):
            before = dataset.read_meta(self.folder)["files"]
        with contextlib.suppress(FileNotFoundError):
            os.remove(meta_path)  # of other files
        self._remove(os.path.join(self.folder, name) for name in before if name not in self.state["files"])
        for name in self.state["files"]:
            if os.path.exists(self._part(name)):
                os.replace(self._part(name), os.path.join(self.folder, name))
        sync_folder(self.folder)
        meta = {key: self.state[key] for key in ("tokenizer", "vocab_size", "dtype", "source", "id", "files")}
        replace(meta_path, json.dumps(meta, indent=1, ensure_ascii=False).encode())
        os.remove(self.path)
        return meta

    def discard(self) -> None:
        self._remove((*map(self._part, {*self.state["files"], *self.others}), self.path))

    @staticmethod
    def _remove(paths: Iterable[str]) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                os.remove(path)


def report(meta: dict) -> None:
    """What was prepared, in a few lines."""
    print(f"source: {meta['source'].get('from')}\nvocab size: {meta['vocab_size']:,}")
    for name, entry in meta["files"].items():
        print(
            f"{name[:-4]} has {entry['tokens']:,} tokens ({entry['documents']:,} documents, {entry['words']:,} words, "
            f"{entry['bytes']:,} bytes)"
        )


def run(
    out_dir: str, source: str, column: str, tokenizer: str, val_share: float, num_workers: int | None,
    gutenberg: bool = False, vocab_size: int | None = None,
) -> None:  # fmt: skip
    """A prepare.py, from its flags: the source is opened, tokenised into out_dir, and what came of it printed.

    tokenizer: a kind in tokenizers.TOKENIZER, made of the text, or a prepared data set, whose tokens are taken.
    """
    if num_workers is not None and num_workers < 1:
        raise UserError(f"num_workers={num_workers} must be at least 1")
    splits = open_source(source, column)
    if "train" not in splits:
        raise UserError(f"{source} has no train split, but {', '.join(splits)}")
    about = {"from": source, "tokenizer": tokenizer} | ({"vocab_size": vocab_size} if vocab_size else {})
    make = functools.partial(new_tokenizer, tokenizer, vocab_size, gutenberg)
    if tokenizer not in tokenizers.TOKENIZER:
        try:
            theirs = dataset.read_meta(dataset.folder_of(tokenizer))["tokenizer"]
        except ValueError as error:
            known = ", ".join(tokenizers.TOKENIZER)
            raise UserError(f"tokenizer={tokenizer} is none of {known}, nor a prepared data set: {error}") from None
        about["of"] = hashlib.sha256(json.dumps(theirs).encode()).hexdigest()
        make = lambda *_: tokenizers.tokenizer(theirs)  # noqa: E731
    settings = {"val_share": val_share, "gutenberg": gutenberg, "num_workers": num_workers}
    report(prepare(out_dir, splits, make, about, **settings))


# -----------------------------------------------------------------------------
# tokenizers that are made of the text, and what is fetched with pip


def new_tokenizer(
    kind: str, vocab_size: int | None, gutenberg: bool, splits: dict[str, Split], val_share: float, several: bool
) -> Tokenizer:
    """A tokenizer of a kind in tokenizers.TOKENIZER for a corpus.

    char is made of all of its text, sentencepiece of the train split. several: whether there are several documents.
    """
    if kind == "sentencepiece":
        return train_sentencepiece(_sample(splits["train"], val_share, gutenberg), vocab_size)
    if kind == "char":
        found = set()
        for shard in (shard for split in splits.values() for shard in split.shards):
            for document in shard():
                for block in without_gutenberg(document) if gutenberg else document:
                    found |= set(block)
        return tokenizers.CharTokenizer("".join(sorted(found)), eot=several)
    return tokenizers.tokenizer({"kind": kind})


def _sample(train: Split, val_share: float, gutenberg: bool) -> Iterator[str]:
    """Lines of the first SAMPLE characters of the documents of train, of each at most its share, or PER_DOCUMENT."""
    share, total, of_this = max(PER_DOCUMENT, SAMPLE // train.documents), 0, 0
    begin = {"split": "train", "shard": 0, "pieces": 0, "documents": 0}
    for batch in batches({"train": train}, val_share, gutenberg, begin):
        for text, last in batch.pieces if batch.file == "train" else ():
            if of_this < share:
                yield from (line for line in text.split("\n") if line.strip())
                total += len(text)
            of_this = 0 if last else of_this + len(text)
        if total >= SAMPLE:
            return


def train_sentencepiece(lines: Iterator[str], vocab_size: int) -> SentencePieceTokenizer:
    """A unigram vocabulary with NMT_NFKC normalisation, as the long-short paper's for PG-19 (section 5.1).

    Beyond what the paper says: characters that are too rare for the vocabulary are bytes, so that no text is unknown,
    and </s> is the boundary of documents. The result depends on the lines alone (on 16 threads, as many cores as there
    are). Raises ValueError where the text is too short for so many tokens, ImportError without sentencepiece.
    """
    if not 259 <= vocab_size <= 10**6:
        raise UserError(f"vocab_size={vocab_size} must be between 259, 256 of them bytes, and 1,000,000")
    spm, model, problem = tokenizers.sentencepiece(), io.BytesIO(), []

    def watched() -> Iterator[str]:  # SentencePiece makes an error of its own of the lines'
        try:
            yield from lines
        except Exception as error:
            problem.append(error)
            raise

    print(f"training a SentencePiece vocabulary of {vocab_size:,}...", flush=True)
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=watched(), model_writer=model, vocab_size=vocab_size, model_type="unigram",
            normalization_rule_name="nmt_nfkc", byte_fallback=True, unk_id=0, eos_id=1, bos_id=-1, pad_id=-1,
            max_sentence_length=2**20, num_threads=16, minloglevel=2,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        if problem:
            raise problem[0] from None
        why = f"{first_line(error)} ".rpartition("] ")[2].strip() or "it holds no words"
        no = f"SentencePiece makes no vocabulary of {vocab_size:,} out of this text"
        raise UserError(f"{no}: {why.removesuffix('.')} (--vocab_size=)") from None
    return SentencePieceTokenizer.of(model.getvalue())
