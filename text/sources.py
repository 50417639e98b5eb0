"""Where documents come from: text files, parquet files, the Hugging Face hub."""

import codecs
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from configurator import UserError, first_line

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # before pyarrow: its others keep what is no longer used

Document = Iterable[str]  # its text, in blocks that end at line ends


class TextError(ValueError):
    """Text that is none: to go on with it would be of no use."""


@dataclass
class Split:
    """A part of a corpus: shards, each a function that gives its documents, from the first on."""

    shards: list[Callable[[], Iterator[Document]]]
    about: list  # names and sizes: what they are, and that they have not changed
    size: int  # bytes of text, about
    documents: int
    characters: int | None = None  # where they have been counted


MANY = 10**9  # documents, where nobody knows


SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}  # to ours


def open_source(source: str, column: str = "text") -> dict[str, Split]:
    """The splits (train, and maybe val and test) of a text file, a folder or a data set of the hub.

    source: a .txt or .parquet file; a folder of .parquet files, or of .txt files, each a document, whose names or
    folders may begin with the split's name (train-00000.parquet, test/12.txt; else it is train), or of files that
    `datasets` reads (.jsonl, .csv, .json.gz); or owner/name, or owner/name:config, of the hub. column: the one of the
    text. Raises ValueError and OSError naming what is wrong.
    """
    if os.path.isfile(source):
        if source.endswith((".jsonl", ".json", ".csv", ".gz", ".zst", ".zip")):
            raise UserError(f"{source} is no .txt or .parquet file: --source= takes a folder of such files")
        return {"train": _parquet([source], column) if source.endswith(".parquet") else _text_files([source], source)}
    if os.path.isdir(source):
        files = _files(source)
        kinds = {end: [path for path in files if path.endswith(end)] for end in (".parquet", ".txt")}
        paths = kinds[".parquet"] or kinds[".txt"]
        if not paths:
            return _through_datasets(source, "", column, [[path, *_version(path)] for path in files])
        if others := len(files) - len(paths):
            print(f"{source}: {len(paths)} {os.path.splitext(paths[0])[1]} files are read, {others} others are not")
        by_split = {}
        for path in paths:
            by_split.setdefault(_split_of(os.path.relpath(path, source)), []).append(path)
        read = _parquet if kinds[".parquet"] else _text_files
        return {split: read(found, column if read is _parquet else source) for split, found in by_split.items()}
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source) or source.endswith((".txt", ".parquet")):
        raise UserError(f"--source={source} is no file, no folder, and no owner/name of the Hugging Face hub")
    return _hub(source, column)


def _files(folder: str) -> list[str]:
    """All files below folder, in order, but hidden ones; a folder that a link leads to again is left out."""
    found, seen = [], set()
    for root, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(root) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in folders if name[0] != "."]
        paths = (os.path.join(root, name) for name in names if name[0] != ".")
        found += [path for path in paths if os.path.isfile(path)]
    return sorted(found)


def _version(path: str) -> list[int]:
    """A file's size, and when it was changed."""
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns]


def _split_of(path: str) -> str:
    names = (re.match(r"[a-z]*", part.lower())[0] for part in path.split(os.sep))
    return next((SPLITS[name] for name in names if name in SPLITS), "train")


def _text_files(paths: list[str], folder: str) -> Split:
    """One document each. They are read once before anything is written: a file that is no text ends it here."""
    about, size, characters = [], 0, 0
    for path in paths:
        text = sum(map(len, blocks_of_file(path)))
        if not text:
            raise TextError(f"{path} is empty")
        about.append([os.path.relpath(path, folder), *_version(path)])
        size, characters = size + about[-1][1], characters + text
    shards = [lambda path=path, was=was: iter([_unchanged(path, was)]) for path, was in zip(paths, about, strict=True)]
    return Split(shards, about, size, len(paths), characters)


def _unchanged(path: str, was: list) -> Document:
    """The blocks of a file. Raises TextError at its end if it is no longer what it was at first."""
    yield from blocks_of_file(path)
    if was[1:] != _version(path):
        raise TextError(f"{path} has changed while it was read")


def blocks_of_file(path: str) -> Iterator[str]:
    """Its text in blocks of a million characters, up to a line's end, whose ends are \\n, without a BOM.

    Raises TextError where it is not UTF-8 text.
    """
    with open(path, "rb") as f:
        start = f.read(2)
    if start in (b"\xff\xfe", b"\xfe\xff"):
        raise TextError(f"{path} is UTF-16, not UTF-8: iconv -f UTF-16 -t UTF-8 {path} converts it")
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # open() as text takes four times as long
    try:
        with open(path, "rb") as f:
            rest = ""
            while data := f.read(2**20) + f.readline(2**16):
                block = rest + decoder.decode(data)
                rest = "\r" if block.endswith("\r") else ""  # a \n may follow
                block = _line_ends(block.removesuffix("\r"))
                if "\0" in block:
                    raise TextError(f"{path} holds NUL characters: is it text?")
                yield block
            yield decoder.decode(b"", final=True) + _line_ends(rest)
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text ({error.reason}, byte {error.object[error.start]:#x}); if it is text in "
            f"another encoding, as latin-1: iconv -f LATIN1 -t UTF-8 {path} converts it"
        ) from None


def _parquet(files: list[str], column: str, version: str | None = None) -> Split:
    """The rows of parquet files: local ones, or hf:// ones of a version.

    Through pyarrow's own reader: that of `datasets` (5.2) takes 2.4 GB for a row group of 440 MB, this one 1.0 GB.
    """
    import pyarrow

    about, size, documents = [version, column], 0, 0
    for path in files:
        with _parquet_file(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise UserError(f"{path} has no column {column!r}, but {', '.join(names)}: --column=")
            kind = file.schema_arrow.field(column).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view"):
                raise UserError(f"{path}: the column {column!r} holds {kind}, not text: --column=")
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            at = [g.column(j).path_in_schema for g in groups[:1] for j in range(g.num_columns)]
            size += sum(g.column(at.index(column)).total_uncompressed_size for g in groups)
            documents += file.metadata.num_rows
        about.append([os.path.basename(path), *([] if version else _version(path))])
    if not documents:
        raise UserError(f"{' and '.join(files)} holds no rows")
    shards = [lambda path=path: _rows(path, column) for path in files]
    return Split(shards, about, size, documents)


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    """Within it an error of the libraries that read, and httpx's are no OSErrors, is an OSError that names what."""
    try:
        yield
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        damaged = isinstance(error, OSError) and error.errno is None and os.path.isfile(name)  # by its contents
        kind = TextError if damaged else OSError
        raise kind(f"cannot read {name} ({type(error).__name__}: {_why(error)})") from None


def _why(error: Exception) -> str:
    """Its first two lines, as one: the second of `datasets` has the names there are, that of the hub the URL."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "more information" not in line]
    return " ".join(lines[:2]) or type(error).__name__


@contextlib.contextmanager
def _parquet_file(path: str) -> Iterator:
    import pyarrow
    import pyarrow.parquet

    with _reading(path), contextlib.ExitStack() as stack:
        if path.startswith("hf://"):
            from huggingface_hub import HfFileSystem

            stream = stack.enter_context(HfFileSystem().open(path, "rb"))
        else:
            stream = stack.enter_context(open(path, "rb"))
        try:
            yield pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=2**20)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path} is no intact parquet file: {first_line(error)}") from None


def _rows(path: str, column: str) -> Iterator[Document]:
    with _parquet_file(path) as file:
        for batch in file.iter_batches(8, columns=[column], use_threads=False):
            for row in batch.column(0):
                try:
                    text = row.as_py()
                except UnicodeDecodeError as error:
                    raise TextError(f"{path} holds a text that is not UTF-8: {error.reason}") from None
                yield _document(text, path, column)


def _document(text: object, path: str, column: str) -> Document:
    """The text of a row; none is an empty one."""
    text = "" if text is None else text
    if not isinstance(text, str):
        raise TextError(f"{path}: the column {column!r} holds a {type(text).__name__}, not text")
    return [_line_ends(text.removeprefix("\ufeff"))]


def _line_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _through_datasets(name: str, config: str, column: str, about: list) -> dict[str, Split]:
    """The splits of files that are neither .parquet nor .txt, as `datasets` streams them."""
    import datasets

    try:
        found = datasets.load_dataset(name, config or None, streaming=True)
        columns = list(next(iter(next(iter(found.values())))))
    except Exception as error:  # of several libraries
        why = _why(error)
        raise UserError(f"{name} holds no .parquet or .txt files, and `datasets` cannot read it: {why}") from None
    if column not in columns:
        raise UserError(f"{name} has no column {column!r}, but {', '.join(columns)}: --column=")

    def rows(stream, i):
        with _reading(name):
            yield from (_document(row[column], name, column) for row in stream.shard(stream.num_shards, i))

    splits = {}
    for split, stream in found.items():
        shards = [lambda stream=stream, i=i: rows(stream, i) for i in range(stream.num_shards)]
        known = (stream.info.splits or {}).get(split)  # how much there is
        size, n = (known.num_bytes, known.num_examples) if known else (0, MANY)
        splits[SPLITS.get(str(split), str(split))] = Split(shards, [*about, column], size or 0, n or MANY)
    return splits


def _hub(source: str, column: str) -> dict[str, Split]:
    import datasets
    from huggingface_hub import HfApi

    name, _, config = source.partition(":")
    try:
        version = HfApi().dataset_info(name, timeout=10).sha  # `datasets` tries for 23 s until it finds no network
        found = datasets.load_dataset_builder(name, config or None).config.data_files or {}
        files = {str(split): [str(file) for file in paths] for split, paths in found.items()}
        parquet = files and all(file.endswith(".parquet") for paths in files.values() for file in paths)
    except Exception as error:  # of several libraries
        other = "--source= takes a local folder of .parquet or .txt files as well"
        if type(error).__name__ == "RepositoryNotFoundError":  # and not that of a gated one
            raise UserError(f"the Hugging Face hub has no data set {name}: {other}") from None
        why = f"{type(error).__name__}: {_why(error)}"
        raise OSError(f"cannot read {name} on the Hugging Face hub ({why}): {other}") from None
    if not parquet:
        return _through_datasets(name, config, column, [version])
    return {SPLITS.get(split, split): _parquet(files[split], column, version) for split in files}


def of_text(text: str) -> Split:
    """One document that is in memory."""
    data = text.encode("utf-8", "surrogatepass")
    return Split([lambda: iter([[text]])], [hashlib.sha256(data).hexdigest()], len(data), 1, len(text))


def in_two(split: Split, share: float, gutenberg: bool) -> dict[str, Split]:
    """A split of one document as train, its first 1 - share characters, and val, the rest (as nanoGPT).

    Of a split whose characters are not counted yet, or in which Project Gutenberg's are, they are counted here.
    """
    (shard,) = split.shards

    def text() -> Document:
        document = next(shard())
        return without_gutenberg(document) if gutenberg else document

    n = sum(map(len, text())) if gutenberg or split.characters is None else split.characters
    cut = int(n * (1 - share))

    def part(start: int, end: int) -> Iterator[Document]:
        def blocks() -> Iterator[str]:
            seen = 0
            for block in text():
                yield block[max(0, start - seen) : max(0, end - seen)]
                seen += len(block)

        return iter([blocks()])

    ends = {"train": (0, cut), "val": (cut, n)}
    size = split.size / max(1, n)
    return {
        name: Split([lambda a=a, b=b: part(a, b)], [*split.about, a], int((b - a) * size), 1, b - a)
        for name, (a, b) in ends.items()
    }


# the last line of Project Gutenberg's header, and the first of its licence
GUTENBERG_START = re.compile(r"^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG EBOOK[^*]*\*\*\*[^\n]*\n+", re.M | re.I)


GUTENBERG_END = re.compile(
    r"^(?:\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG EBOOK|End of (?:the )?Project Gutenberg)", re.M | re.I
)


def without_gutenberg(document: Document) -> Document:
    """A document without Project Gutenberg's header and licence.

    That is the text after "*** START OF THE (or THIS) PROJECT GUTENBERG EBOOK ... ***", if it has that line in its
    first million characters, up to "*** END OF ..." or "End of Project Gutenberg's ...", the first of them at the
    beginning of a line.
    """
    for i, block in enumerate(document):
        start = GUTENBERG_START.search(block, 0, 2**20) if i == 0 else None
        block = block[start.end() :] if start else block
        end = GUTENBERG_END.search(block) if "utenberg" in block or "UTENBERG" in block else None
        yield block[: end.start()] if end else block
        if end:
            return
