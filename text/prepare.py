"""Any text to token ids on disk, for data/*/prepare.py. Read run first; the rest follows in order.

Hugging Face's `datasets` reads the documents and turns them into ids, in several processes. It
keeps the text and the ids as Arrow files in its cache, ~/.cache/huggingface (HF_HOME moves it), so
the disk must hold the text once and the ids twice. If this is killed, the same command goes on with
what is in the cache. Later the cache can be deleted.
"""

import collections
import contextlib
import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from errors import UserError, optional
from text import dataset, tokenizers
from text.tokenizers import END, Tokenizer

SAMPLE = 2 * 10**7  # characters that SentencePiece is trained on
PER_DOCUMENT = 10**5  # of them from one document; more if there are fewer than 200 documents
# Names a version of this code. What is cached was made by the same code, or is made anew.
CODE = dataset.sha256(__file__) + dataset.sha256(tokenizers.__file__)
# The words for a split, between separators, and our names of them. The hub has the same words.
SPLIT = re.compile(
    r"(?i)(?<![^-._ 0-9])(?:(?P<train>train|training)|(?P<val>val|valid|validation|dev)"
    r"|(?P<test>test|testing|eval|evaluation))(?![^-._ 0-9])"
)
# Each kind of file, by its ending: the builder of `datasets` that reads it.
KINDS = {
    ".parquet": "parquet",
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
}
OPTIONS = {".txt": {"sample_by": "document"}, ".tsv": {"sep": "\t"}}  # of the builders
ALIASES = {
    ".text": ".txt",
    ".ndjson": ".jsonl",
    ".jsonlines": ".jsonl",
}
COMPRESSED = re.compile(r"\.(gz|zst|xz|bz2)$", re.IGNORECASE)
# Files that describe data and hold none of it: Kaggle's, those of `datasets`, and ours.
ABOUT = (
    "dataset-metadata.json dataset_info.json dataset_infos.json dataset_dict.json state.json "
    "meta.json"
).split()
# The first bytes of files that are not UTF-8 text: what such a file is, and what converts it.
NO_TEXT = {
    b"\xff\xfe\0\0": "UTF-32 text: iconv -f UTF-32 -t UTF-8 converts it",
    b"\xff\xfe": "UTF-16 text: iconv -f UTF-16 -t UTF-8 converts it",
    b"\xfe\xff": "UTF-16 text: iconv -f UTF-16 -t UTF-8 converts it",
    b"PK\x03\x04": "a zip archive or an office program's document: unzip it, or save it as text",
    b"%PDF": "a PDF: pdftotext converts it",
    b"\x1f\x8b": "compressed by gzip: give it a name such as a.txt.gz",
}
# From the beginning of a book to the last line of Project Gutenberg's header, and from the first
# line of its licence to the end. The header is looked for in the first million characters.
GUTENBERG = re.compile(
    r"(?ims)\A.{,1048576}?^\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG EBOOK[^*]*\*\*\*[^\n]*\n+"
    r"|^(\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG EBOOK|End of (the )?Project Gutenberg).*"
)


def run(
    out_dir: str,
    source: str,
    tokenizer: str,
    *,
    column: str = "text",
    val_share: float = 0.1,
    gutenberg: bool = False,
    split_documents: bool = False,
    vocab_size: int = 8000,
    num_workers: int | None = None,
) -> None:
    """Write the tokens of a source into out_dir and print a report, unless they are there already.

    source: a text file (one document); a file of KINDS (each row is a document); a folder of such
    files; owner/name or owner/name:config on the Hugging Face hub.
    column: the column of the rows that holds the text.
    tokenizer: a name in TOKENIZER (the vocabularies of char and sentencepiece are made from this
    text), or a prepared data set, whose tokenizer is taken.
    val_share: the share of the documents for val, if the source has no val split.
    gutenberg: leave out Project Gutenberg's headers and licences.
    split_documents: <|endoftext|> in a text ends a document.
    num_workers: processes, which do not change the tokens; None: one for each core.

    Raises UserError for a mistake, OSError for a full disk.
    """
    if num_workers is not None and num_workers < 1:
        raise UserError(f"num_workers={num_workers} must be at least 1")
    meta = _requested(tokenizer)
    if tokenizer != "sentencepiece":
        vocab_size = None  # no other tokenizer depends on it
    files = _files(source)
    contents = [
        (os.path.relpath(path, source), dataset.sha256(path))
        for paths in files.values()
        for path in paths
    ]
    cleaning = {"gutenberg": gutenberg, "split": split_documents}
    settings = [contents or source, column, meta, vocab_size, val_share, cleaning, CODE]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    with contextlib.suppress(UserError, OSError):  # not prepared, or damaged
        prepared = dataset.read_meta(out_dir)
        if prepared.get("id") == digest:
            for name in prepared["files"]:
                dataset.Tokens(out_dir, name.removesuffix(".bin"), 0)
            print(f"{out_dir} is already prepared and intact: nothing to do")
            return

    splits = _read(source, column, files, contents)
    if "train" not in splits:
        raise UserError(f"{source} has no train split, but {', '.join(splits)}")
    several = split_documents or sum(map(len, splits.values())) > 1
    longest = max(PER_DOCUMENT, SAMPLE // max(1, len(splits["train"])))
    if "val" not in splits:
        splits |= _train_and_val(splits["train"], val_share, cleaning)
    if vocab_size is not None:
        lines = _sample(splits["train"], longest, cleaning)
        tok = tokenizers.train_sentencepiece(lines, vocab_size)
    elif meta == {"kind": "char"}:
        vocab = set()
        for row in itertools.chain(*splits.values()):
            vocab.update(*_documents(row["text"], **cleaning))
        tok = tokenizers.CharTokenizer("".join(sorted(vocab)), several)
    else:
        tok = tokenizers.tokenizer(meta)
    end = several and tok.eot is not None
    if several and not end:
        print("this tokenizer has no token for the end of a document: nothing separates documents")
    options = {"tok": tok, "end": end, "code": CODE} | cleaning
    rows = {split: _tokenised_rows(splits[split], options, num_workers) for split in splits}
    _report(write(out_dir, tok, rows, {"from": source, "tokenizer": tokenizer}, id=digest))


def _requested(tokenizer):
    """Return the meta of a tokenizer; without a vocabulary if that is to be made from the text."""
    if tokenizer in tokenizers.TOKENIZER:
        return {"kind": tokenizer}
    try:
        return dataset.read_meta(dataset.folder_of(tokenizer))["tokenizer"]
    except UserError as error:
        raise UserError(
            f"tokenizer={tokenizer} is not one of {', '.join(tokenizers.TOKENIZER)}, "
            f"and no prepared data set: {error}"
        ) from None


def _files(source):
    """Return the files of a source by split: {split: paths}; nothing for a name of the hub.

    All are of one kind, the kind that has the most bytes. Prints how many files are read for each
    split, and which files are not read. A file belongs to the split whose name stands between
    separators in its own name or, if there is none, in the name of a folder above it.
    """
    if os.path.isfile(source):
        return {"train": [source]}
    if not os.path.exists(source):
        return {}
    kinds = {path: os.path.isfile(path) and _kind_of(path) for path in _paths_in(source)}
    sizes = collections.Counter()
    for path in filter(kinds.get, kinds):
        sizes[kinds[path]] += os.path.getsize(path)
    if not sizes:
        raise UserError(f"{source} holds no files of these kinds: {', '.join(KINDS)}")
    kind = max(sizes, key=sizes.get)
    files = collections.defaultdict(list)
    others = []
    for path in kinds:
        inside = os.path.relpath(path, source)
        if kinds[path] != kind:
            others.append(inside)
            continue
        words = filter(None, map(SPLIT.search, reversed(Path(inside).parts)))
        files[next((word.lastgroup for word in words), "train")].append(path)
    counts = [f"{len(files[split])} for {split}" for split in files]
    print(f"{source}: {kind} files: {', '.join(counts)}")
    if others:
        print(f"other files, not read: {len(others)} ({', '.join(others[:5])})")
    return files


def _paths_in(folder):
    """Return the paths of all files in a folder and in linked folders, but for hidden ones."""
    paths = []
    seen = set()
    left = collections.deque([folder])
    while left:
        root = left.popleft()
        real = os.path.realpath(root)
        if real in seen:
            continue
        seen.add(real)
        for entry in os.scandir(root):
            if entry.name[0] == ".":
                continue
            if not entry.is_dir():
                paths.append(entry.path)
            elif entry.is_symlink():  # comes last: a folder that is here keeps its own name
                left.append(entry.path)
            else:
                left.appendleft(entry.path)
    return sorted(paths)


def _kind_of(path):
    """Return a file's kind, a key of KINDS; None if it is of another kind, or about data."""
    name = COMPRESSED.sub("", os.path.basename(path).lower())
    ending = os.path.splitext(name)[1]
    ending = ALIASES.get(ending, ending)
    if ending in KINDS and name not in ABOUT:
        return ending


def _read(source, column, files, contents):
    """Return the splits of a source: {split: rows}.

    files: see _files. rows: a Dataset of the column "text" alone; for a single text file a list of
    one row. contents: what identifies the files.
    """
    paths = [*itertools.chain(*files.values())]
    kind = _kind_of(paths[0]) if paths else None
    is_plain = kind == ".txt" and not COMPRESSED.search(source)
    if paths == [source] and (is_plain or not kind):
        text = read_text(source)
        if not kind and re.match(r'\s*\[?\s*{\s*"', text):
            raise UserError(f"{source} looks like JSON: name it .jsonl, or .txt if it is text")
        return {"train": [{"text": text}]}
    if kind:
        builder = KINDS[kind]
        options = OPTIONS.get(kind, {}) | {
            "data_files": {split: list(map(glob.escape, files[split])) for split in files},
            "description": str(contents),  # `datasets` itself knows files by their names and times
        }
    elif not _kind_of(source) and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source):
        builder, _, config = source.partition(":")
        options = {"name": config or None}
    else:
        raise UserError(
            f"--source={source} is no file, no folder, and no owner/name of the Hugging Face hub"
        )
    datasets = optional("datasets", f"reading {source}")
    try:
        found = datasets.load_dataset(builder, **options)
    except Exception as error:  # of the classes of several libraries
        raise _cannot_read(source, paths, error) from None
    return {
        SPLIT.sub(lambda word: word.lastgroup, name): _text_of(found[name], source, column)
        for name in found
    }


def read_text(path: str) -> str:
    """Return the text of a file, without a byte-order mark and with \\n as its line ends.

    Raises UserError if the file is not UTF-8.
    """
    content = Path(path).read_bytes()
    _check_text(path, content)
    try:
        return re.sub("\r\n?", "\n", content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason}); "
            f"if it is latin-1: iconv -f LATIN1 -t UTF-8 {shlex.quote(path)} converts it"
        ) from None


def _check_text(path, content):
    """Raise UserError if a file's content, or the beginning of it, shows that it is no text."""
    for first_bytes, what in NO_TEXT.items():
        if content.startswith(first_bytes):
            raise UserError(f"{path} is {what}")
    if 0 in content:
        raise UserError(f"{path} is no UTF-8 text: it holds bytes that are 0, as binary files do")


def _cannot_read(source, paths, error):
    """Return the sentence for an error of `datasets`."""
    if type(error).__name__ == "DatasetGenerationError":
        error = error.__cause__ or error
    for path in paths:
        if not COMPRESSED.search(path) and _kind_of(path) not in (".parquet", ".arrow"):
            with open(path, "rb") as f:  # files may be large: a beginning is enough
                _check_text(path, f.read(4096))
            if isinstance(error, UnicodeDecodeError):
                read_text(path)  # raises a sentence that names the file
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    advice = "" if paths else ". --source= takes local files as well"
    return UserError(f"cannot read {source} ({why}){advice}")


def _text_of(rows, source, column):
    """Return the rows of a Dataset with this column alone, under the name "text"."""
    texts = [
        name for name, feature in rows.features.items() if "string" in getattr(feature, "dtype", "")
    ]
    if column not in texts:
        raise UserError(
            f"{source} has no column {column!r} of text, but {', '.join(texts)}: "
            "give one as --column="
        )
    return rows.select_columns([column]).rename_columns({column: "text"})


def _documents(text, gutenberg=False, split=False):
    """Return the documents of a row's text: one, or with split those between the ENDs.

    Their line ends are \\n. gutenberg: without Project Gutenberg's header and licence.
    """
    text = re.sub("\r\n?", "\n", (text or "").removeprefix("\ufeff"))
    if gutenberg:
        text = GUTENBERG.sub("", text)
    if not split:
        return [text]
    return [part.strip("\n") for part in text.split(END) if part.strip()]


def _train_and_val(rows, share, cleaning):
    """Split the rows of train: every 1/share-th is for val.

    Of a single document the last characters are for val, as in nanoGPT.
    """
    n = len(rows)
    if not 0 < share < 1 or (n != 1 and n * share < 1):
        raise UserError(
            f"val_share={share} must be between 0 and 1, and leave a document for val: "
            f"the source has no validation split and {n} documents"
        )
    if n == 1:
        (text,) = _documents(rows[0]["text"], cleaning["gutenberg"])
        cut = int(len(text) * (1 - share))
        if cleaning["split"]:
            cut = len(text[:cut].rpartition(END)[0]) or cut  # the end of a document
        return {"train": [{"text": text[:cut]}], "val": [{"text": text[cut:]}]}
    is_val = np.diff(np.floor(np.arange(n + 1) * share)) > 0
    return {
        "train": rows.select(np.flatnonzero(~is_val)),
        "val": rows.select(np.flatnonzero(is_val)),
    }


def _sample(rows, longest, cleaning):
    """Yield lines to train SentencePiece on: SAMPLE characters, `longest` of each row."""
    total = 0  # characters so far
    for row in rows:
        taken = 0  # characters of this row
        for piece in pieces("\n".join(_documents(row["text"], **cleaning))):
            if taken >= longest:
                break
            yield from filter(str.strip, piece.split("\n"))
            taken += len(piece)
        total += taken
        if total >= SAMPLE:
            return


def pieces(text: str, size: int = 2**14) -> Iterator[str]:
    """Yield pieces of a text of `size` characters or more.

    A piece ends where a space or \\n follows a visible character, or after 8 size characters.
    Every tokenizer begins a token at such a place: no pattern of GPT-2's matches across it, and
    SentencePiece's tokens begin with the space. So the pieces have the tokens of the whole text,
    except for SentencePiece's rounding (one token in 40,000 with 250,000 characters).
    """
    cut = re.compile(rf".{{{size},{8 * size}}}?(?<!\s)(?=[ \n])|.{{1,{8 * size}}}", re.S)
    return (match[0] for match in cut.finditer(text))


COUNTS = ("documents", "bytes", "words", "end_marks")


def tokenised(
    text: str | None, tok: Tokenizer, end: bool = False, code: str = "", **cleaning: bool
) -> dict:
    """Return the ids of a row's text as bytes, and its numbers of documents, bytes and words.

    end: eot follows each document. cleaning: see _documents. "end_marks" counts END as plain text.
    code: a version, since `datasets` knows a cached result by this function's name and arguments.
    It calls this function in its processes.
    """
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    documents = _documents(text, **cleaning)
    ids = []
    for document in documents:
        ids += [tok.ids(piece).astype(dtype).tobytes() for piece in pieces(document)]
        if end:
            ids.append(np.array([tok.eot], dtype).tobytes())
    text = " ".join(documents)
    return {
        "ids": b"".join(ids),
        "documents": len(documents),
        "bytes": len("".join(documents).encode("utf-8", "surrogatepass")),
        "words": len(text.split()),
        "end_marks": text.count(END),
    }


def _tokenised_rows(rows, options, num_workers):
    """Return `tokenised` of each row, in order."""
    if isinstance(rows, list):
        return (tokenised(row["text"], **options) for row in rows)
    from datasets import Features, Value

    n = min(num_workers or os.cpu_count(), len(rows))
    return rows.map(
        tokenised,
        input_columns=["text"],
        remove_columns=["text"],
        fn_kwargs=options,
        num_proc=n if n > 1 else None,
        features=Features(ids=Value("large_binary"), **dict.fromkeys(COUNTS, Value("int64"))),
        writer_batch_size=100,  # documents that each process has in memory
    )


def write(
    folder: str, tok: Tokenizer, rows: dict[str, Iterable[dict]], source: dict, **fields
) -> dict:
    """Write <split>.bin and meta.json, each whole or not at all. Return the content of meta.json.

    rows: {split: what `tokenised` returns for each of its rows}.
    source, fields: what else meta.json holds. Raises UserError for a split without tokens.
    """
    os.makedirs(folder, exist_ok=True)
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    files = {}
    with tempfile.TemporaryDirectory(dir=folder, suffix=".tmp") as temporary:
        for split, rows_of_split in rows.items():
            path = Path(temporary, f"{split}.bin")
            entry = dict.fromkeys(("tokens", *COUNTS), 0)
            with open(path, "wb") as f:
                for row in rows_of_split:
                    f.write(row["ids"])
                    for key in COUNTS:
                        entry[key] += row[key]
                entry["tokens"] = f.tell() // dtype.itemsize
            if not entry["tokens"]:
                raise UserError(f"there is too little text: {path.name} would be empty")
            files[path.name] = entry | {"sha256": dataset.sha256(path)}
        meta = {
            "tokenizer": tok.meta,
            "vocab_size": tok.n_vocab,
            "dtype": dtype.name,
            "source": source,
            **fields,
            "files": files,
        }
        Path(temporary, "meta.json").write_text(json.dumps(meta, indent=1))
        for name in (*files, "meta.json"):
            Path(temporary, name).replace(Path(folder, name))
    return meta


def _report(meta):
    """Print what was prepared, in a few lines."""
    print(f"source: {meta['source']['from']}\nvocab size: {meta['vocab_size']:,}")
    for name, file in meta["files"].items():
        print(
            f"{name.removesuffix('.bin')} has {file['tokens']:,} tokens "
            f"({file['documents']:,} documents, {file['words']:,} words, {file['bytes']:,} bytes)"
        )
        if file["end_marks"]:
            print(
                f"{END} stands {file['end_marks']:,} times in this text, as plain text: "
                "with data/text/prepare.py --split_documents it ends a document"
            )
