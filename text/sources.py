"""Where documents come from: text files, parquet files, the Hugging Face hub. Read open_source first."""

import codecs
import contextlib
import hashlib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from errors import UserError, first_line, optional
from text.files import TextError, version

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # read by pyarrow: its own pools keep freed memory

Document = Iterable[str]  # its text, in blocks that end at line ends


@dataclass
class Split:
    """A part of a corpus: shards, each a function that returns its documents, from the first on."""

    shards: list[Callable[[], Iterator[Document]]]
    about: list  # names and versions of the files, to see whether they changed
    size: int  # bytes of text, roughly; 0: unknown

    def documents(self) -> Iterator[Document]:
        return itertools.chain.from_iterable(shard() for shard in self.shards)

    def count(self, most: int) -> int:
        """The number of documents, or `most` if there are more. Of parquet files it reads the first rows alone."""
        return sum(1 for _ in itertools.islice(self.documents(), most))


SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}  # to ours


def open_source(source: str, column: str = "text") -> dict[str, Split]:
    """The splits (train, and maybe val and test) of a source. Raises UserError and OSError naming what is wrong.

    source: a .txt file (one document) or a .parquet file (a document in each row); a folder of .parquet files or else
    of .txt files, or else of files that `datasets` reads (.jsonl, .csv, .json.gz); or owner/name or owner/name:config
    on the hub. In a folder, files whose names (or whose folders' names) begin with train, val, dev or test belong to
    that split, and all others to train. column: the name of the column that holds the text.
    """
    if os.path.isdir(source):
        files = _files(source)
    elif os.path.isfile(source):
        if source.endswith((".jsonl", ".json", ".csv", ".gz", ".zst", ".zip")):
            raise UserError(f"{source} is no .txt or .parquet file: --source= takes a folder of such files")
        files = [source]
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source) or source.endswith((".txt", ".parquet")):
        raise UserError(f"--source={source} is no file, no folder, and no owner/name of the Hugging Face hub")
    else:
        return _hub(source, column)
    parquet = [path for path in files if path.endswith(".parquet")]
    paths = parquet or [path for path in files if path.endswith(".txt") or path == source]
    if not paths:
        return _through_datasets(source, "", column, [[path, *version(path)] for path in files])
    if others := len(files) - len(paths):
        print(f"{source}: {len(paths)} {os.path.splitext(paths[0])[1]} files are read, {others} others are not")
    by_split = {}
    for path in paths:
        by_split.setdefault(_split_of(os.path.relpath(path, source)), []).append(path)
    read = partial(_parquet, column=column) if parquet else partial(_text_files, folder=source)
    return {split: read(found) for split, found in by_split.items()}


def _files(folder: str) -> list[str]:
    """The paths of all files below folder, sorted, without hidden ones. Links are followed, but no folder twice."""
    paths = []
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        is_new = os.path.realpath(root) not in seen
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in folders if is_new and name[0] != "."]
        paths += [os.path.join(root, name) for name in names if is_new and name[0] != "."]
    return sorted(filter(os.path.isfile, paths))


def _split_of(path: str) -> str:
    names = (re.match(r"[a-z]*", part.lower())[0] for part in path.split(os.sep))
    return next((SPLITS[name] for name in names if name in SPLITS), "train")


def _text_files(paths: list[str], folder: str) -> Split:
    """One document per file. Each file is read once here, to find one that is no text before anything is written."""
    versions = {path: version(path) for path in paths}
    for path in paths:
        if not sum(map(len, blocks_of_file(path))):
            raise TextError(f"{path} is empty")
    shards = [lambda path=path, first=first: iter([_unchanged(path, first)]) for path, first in versions.items()]
    about = [[os.path.relpath(path, folder), *first] for path, first in versions.items()]
    return Split(shards, about, sum(size for size, _ in versions.values()))


def _unchanged(path: str, first: list[int]) -> Document:
    """The blocks of a file. Raises TextError at its end if its version is not the `first` any more."""
    yield from blocks_of_file(path)
    if first != version(path):
        raise TextError(f"{path} has changed while it was read")


def blocks_of_file(path: str) -> Iterator[str]:
    """A file's text without a BOM, in blocks of about a million characters up to line ends. TextError if not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # open() in text mode takes four times as long
    decoder = io.IncrementalNewlineDecoder(decoder, translate=True)
    try:
        with open(path, "rb") as f:
            if f.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise TextError(f"{path} is UTF-16, not UTF-8: iconv -f UTF-16 -t UTF-8 {path} converts it")
            f.seek(0)
            while data := f.read(2**20) + f.readline(2**16):
                block = decoder.decode(data)
                if "\0" in block:
                    raise TextError(f"{path} holds NUL characters: is it text?")
                yield block
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        what = f"{error.reason}, byte {error.object[error.start]:#x}"
        other = f"if it is text in another encoding, as latin-1: iconv -f LATIN1 -t UTF-8 {path} converts it"
        raise TextError(f"{path} is not UTF-8 text ({what}); {other}") from None


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turns a library's errors in reading `name` into sentences. Our own code must stay outside: its are bugs."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if type(error).__name__ == "ArrowInvalid" and name.endswith(".parquet"):
            raise UserError(f"{name} is no intact parquet file: {first_line(error)}") from None
        is_content = isinstance(error, UnicodeError) or getattr(error, "errno", 0) is None  # and not the network
        kind = TextError if is_content and os.path.isfile(name) else OSError
        raise kind(f"cannot read {name} ({type(error).__name__}: {_why(error)})") from None


def _each(items: Iterable, name: str) -> Iterator:
    """The items that a library reads from `name`."""
    with _reading(name):
        yield from items


def _why(error: Exception) -> str:
    """The first two lines of an error: in the second one `datasets` lists names, and the hub's client gives the URL."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "more information" not in line]
    return " ".join(lines[:2]) or type(error).__name__


def _parquet(paths: list[str], column: str, revision: str | None = None) -> Split:
    """The rows of parquet files: local ones or, with a revision, files of the hub (hf://...)."""
    optional("pyarrow", "a parquet file")
    split = Split([], [revision, column], 0)
    for path in paths:
        with _parquet_file(path) as file:
            _has_column(path, column, file.schema_arrow.names)
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
        split.size += sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == column)
        split.shards.append(partial(_rows, path, column))
        split.about.append([os.path.basename(path), *([] if revision else version(path))])
    return split


@contextlib.contextmanager
def _parquet_file(path: str) -> Iterator:
    """An open pyarrow.parquet.ParquetFile. docs/data.md says why `datasets` does not read it, and the memory."""
    import pyarrow.parquet

    hub = optional("huggingface_hub", "the hub") if path.startswith("hf://") else None
    with _reading(path):
        stream = hub.HfFileSystem().open(path, "rb") if hub else open(path, "rb")
        file = pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
    with stream:
        yield file


def _rows(path: str, column: str) -> Iterator[Document]:
    with _parquet_file(path) as file:
        batches = file.iter_batches(8, columns=[column], use_threads=False)
        for text in _each((text for batch in batches for text in batch.column(0).to_pylist()), path):
            yield _document(text, path, column)


def _has_column(name: str, column: str, columns: Iterable[str]) -> None:
    if column not in columns:
        raise UserError(f"{name} has no column {column!r}, but {', '.join(columns)}: give one as --column=")


def _document(text: object, name: str, column: str) -> Document:
    """The document of a row with this text. A null is an empty document."""
    if not isinstance(text, str | None):
        raise TextError(f"{name}: the column {column!r} holds {type(text).__name__}, not text: give another --column=")
    return [(text or "").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")]


def _through_datasets(name: str, config: str, column: str, about: list) -> dict[str, Split]:
    """The splits of files that are neither .parquet nor .txt, as `datasets` streams them."""
    datasets = optional("datasets", f"{name}, which holds no .parquet or .txt files,")
    try:
        found = datasets.load_dataset(name, config or None, streaming=True)
        first_row = next(iter(next(iter(found.values()))))
    except Exception as error:  # the classes of several libraries
        why = _why(error)
        raise UserError(f"{name} holds no .parquet or .txt files, and `datasets` cannot read it: {why}") from None
    _has_column(name, column, first_row)

    def rows(stream, i: int) -> Iterator[Document]:
        for row in _each(stream.shard(stream.num_shards, i), name):
            yield _document(row[column], name, column)

    splits = {}
    for split, stream in found.items():
        shards = [partial(rows, stream, i) for i in range(stream.num_shards)]
        known = (stream.info.splits or {}).get(split)  # its size, if the hub has it
        size = known.num_bytes if known else 0
        splits[SPLITS.get(str(split), str(split))] = Split(shards, [*about, column], size or 0)
    return splits


def _hub(source: str, column: str) -> dict[str, Split]:
    datasets = optional("datasets", "the hub")
    hub = optional("huggingface_hub", "the hub")
    name, _, config = source.partition(":")
    try:
        revision = hub.HfApi().dataset_info(name, timeout=10).sha  # without a network `datasets` would try for 23 s
        found = datasets.load_dataset_builder(name, config or None).config.data_files or {}
    except Exception as error:  # the classes of several libraries
        other = "--source= takes a local folder of .parquet or .txt files as well"
        if type(error).__name__ == "RepositoryNotFoundError":  # not its subclass for gated data sets
            raise UserError(f"the Hugging Face hub has no data set {name}: {other}") from None
        why = f"{type(error).__name__}: {_why(error)}"
        raise OSError(f"cannot read {name} on the Hugging Face hub ({why}): {other}") from None
    files = {str(split): [str(file) for file in paths] for split, paths in found.items()}
    if files and all(file.endswith(".parquet") for paths in files.values() for file in paths):
        return {SPLITS.get(split, split): _parquet(paths, column, revision) for split, paths in files.items()}
    return _through_datasets(name, config, column, [revision])


def of_text(text: str) -> Split:
    """The split of one document that is in memory."""
    data = text.encode("utf-8", "surrogatepass")
    return Split([lambda: iter([[text]])], [hashlib.sha256(data).hexdigest()], len(data))


def mapped(split: Split, f: Callable[[Document], Document]) -> Split:
    """The split with f(document) in the place of each document."""
    return Split([lambda shard=shard: map(f, shard()) for shard in split.shards], split.about, split.size)


def in_two(split: Split, share: float) -> dict[str, Split]:
    """A split of one document as two: train, its first 1 - share characters, and val, the rest (as in nanoGPT)."""
    n = sum(len(block) for document in split.documents() for block in document)
    cut = int(n * (1 - share))
    parts = {}
    for name, start, end in (("train", 0, cut), ("val", cut, n)):
        shards = mapped(split, partial(_excerpt, start=start, end=end)).shards
        parts[name] = Split(shards, [*split.about, start], (end - start) * split.size // max(1, n))
    return parts


def _excerpt(document: Document, start: int, end: int) -> Document:
    """The characters from start up to end."""
    before = 0
    for block in document:
        yield block[max(0, start - before) : max(0, end - before)]
        before += len(block)


# the last line of Project Gutenberg's header, in the first million characters, and the first line of its licence
GUTENBERG_START = re.compile(r"(?im)^\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG EBOOK[^*]*\*\*\*[^\n]*\n+")
GUTENBERG_END = re.compile(r"(?im)^(\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG EBOOK|End of (the )?Project Gutenberg)")


def without_gutenberg(document: Document) -> Document:
    """A document without the text up to GUTENBERG_START and from GUTENBERG_END on, where it has these lines."""
    for i, block in enumerate(document):
        start = GUTENBERG_START.search(block, 0, 2**20) if i == 0 else None
        block = block[start.end() :] if start else block
        end = GUTENBERG_END.search(block) if "utenberg" in block or "UTENBERG" in block else None
        yield block[: end.start()] if end else block
        if end:
            return
