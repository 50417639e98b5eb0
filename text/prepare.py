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
import operator
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from errors import UserError, optional
from text import dataset, tokenizers
from text.tokenizers import Tokenizer

SAMPLE = 2 * 10**7  # characters that SentencePiece is trained on
PER_DOCUMENT = 10**5  # of them from one document; more if there are fewer than 200 documents
# Names a version of this code. What is cached was made by the same code, or is made anew.
CODE = dataset.sha256(__file__) + dataset.sha256(tokenizers.__file__)
# Our name of a split, by its names elsewhere.
SPLITS = {
    "train": "train",
    "validation": "val",
    "valid": "val",
    "val": "val",
    "dev": "val",
    "test": "test",
}
# The builder of `datasets` that reads a file, by the file's ending.
BUILDERS = {
    ".parquet": "parquet",
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
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
    vocab_size: int = 8000,
    num_workers: int | None = None,
) -> None:
    """Write the tokens of a source into out_dir and print a report, unless they are there already.

    source: a text file (one document); a .parquet, .jsonl or .csv file (each row is a document); a
    folder of such files; owner/name or owner/name:config on the Hugging Face hub.
    column: the column of the rows that holds the text.
    tokenizer: a name in TOKENIZER (the vocabularies of char and sentencepiece are made from this
    text), or a prepared data set, whose tokenizer is taken.
    val_share: the share of the documents for val, if the source has no val split.
    gutenberg: leave out Project Gutenberg's headers and licences.
    num_workers: processes, which do not change the tokens; None: one for each core.

    Raises UserError for a mistake, OSError for a full disk.
    """
    if num_workers is not None and num_workers < 1:
        raise UserError(f"num_workers={num_workers} must be at least 1")
    meta = _requested(tokenizer)
    if tokenizer != "sentencepiece":
        vocab_size = None  # no other tokenizer depends on it
    contents = [
        (os.path.relpath(path, source), _builder_of(path), dataset.sha256(path))
        for path in _paths(source)
    ]
    settings = [contents or source, column, meta, vocab_size, val_share, gutenberg, CODE]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    with contextlib.suppress(UserError, OSError):  # not prepared, or damaged
        prepared = dataset.read_meta(out_dir)
        if prepared.get("id") == digest:
            for name in prepared["files"]:
                dataset.Tokens(out_dir, name.removesuffix(".bin"), 0)
            print(f"{out_dir} is already prepared and intact: nothing to do")
            return

    splits = _read(source, column, contents)
    if "train" not in splits:
        raise UserError(f"{source} has no train split, but {', '.join(splits)}")
    several = sum(map(len, splits.values())) > 1
    longest = max(PER_DOCUMENT, SAMPLE // max(1, len(splits["train"])))
    if "val" not in splits:
        splits |= _train_and_val(splits["train"], val_share, gutenberg)
    if vocab_size is not None:
        lines = _sample(splits["train"], longest, gutenberg)
        tok = tokenizers.train_sentencepiece(lines, vocab_size)
    elif meta == {"kind": "char"}:
        texts = (_clean(row["text"], gutenberg) for rows in splits.values() for row in rows)
        vocab = sorted(set(itertools.chain.from_iterable(texts)))
        tok = tokenizers.CharTokenizer("".join(vocab), several)
    else:
        tok = tokenizers.tokenizer(meta)
    end = several and tok.eot is not None
    if several and not end:
        print("this tokenizer has no token for the end of a document: nothing separates documents")
    options = {"tok": tok, "end": end, "gutenberg": gutenberg, "code": CODE}
    documents = (
        (split, document)
        for split, rows in splits.items()
        for document in _tokenised_rows(rows, options, num_workers)
    )
    _report(write(out_dir, tok, documents, {"from": source, "tokenizer": tokenizer}, id=digest))


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


def _paths(source):
    """Return the paths of a folder's files, or of the one file; none for a name of the hub."""
    inside = glob.glob(os.path.join(glob.escape(source), "**"), recursive=True)
    return sorted(filter(os.path.isfile, [source, *inside]))


def _read(source, column, contents):
    """Return the splits of a source: {split: rows}.

    rows: a Dataset of the column "text" alone; for a single text file a list of one row.
    """
    builder = _builder_of(source)
    if os.path.isfile(source) and (source.endswith(".txt") or builder is None):
        return {"train": [{"text": read_text(source)}]}
    files = {}
    if os.path.exists(source):
        builder, files = _local(source)
        options = {
            "data_files": files,
            "description": str(contents),  # `datasets` itself knows files by their names and times
        }
        if builder == "text":
            options["sample_by"] = "document"
    elif builder is None and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source):
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
        raise _cannot_read(source, files, error) from None
    return {SPLITS.get(name, name): _text_of(found[name], source, column) for name in found}


def _builder_of(path):
    """Return the builder of `datasets` that reads a file; None for unknown endings."""
    return BUILDERS.get(os.path.splitext(re.sub(r"\.(gz|zst|xz|bz2)$", "", path))[1])


def _local(source):
    """Return (builder, {split: glob patterns}) of a file, or of a folder's files for one builder.

    The first word of a file's name, or of the name of a folder above it, may be its split.
    """
    paths = _paths(source)
    counts = collections.Counter(map(_builder_of, paths))
    builder = next(filter(counts.get, BUILDERS.values()), None)
    if builder is None:
        raise UserError(f"{source} holds no files of these kinds: {', '.join(BUILDERS)}")
    files = collections.defaultdict(list)
    for path in paths:
        if _builder_of(path) == builder:
            inside = path.removeprefix(source).lower()
            split = re.search(rf"(?:^|[/\\])({'|'.join(SPLITS)})(?![a-z])", inside)
            files[SPLITS[split[1]] if split else "train"].append(glob.escape(path))
    others = len(paths) - counts[builder]
    if others:
        print(f"{source}: {counts[builder]} {builder} files are read, {others} others are not")
    return builder, files


def read_text(path: str) -> str:
    """Return the text of a file, without a byte-order mark and with \\n as its line ends.

    Raises UserError if the file is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason}); "
            f"if it is latin-1: iconv -f LATIN1 -t UTF-8 {path} converts it"
        ) from None


def _cannot_read(source, files, error):
    """Return the sentence for an error of `datasets`."""
    if type(error).__name__ == "DatasetGenerationError":
        error = error.__cause__ or error
    if isinstance(error, UnicodeDecodeError):
        for path in _paths(source):
            if path.endswith((".txt", ".jsonl", ".json", ".csv")):  # not compressed
                read_text(path)  # raises the sentence that names the file
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    advice = "" if files else ". --source= takes local files as well"
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


def _clean(text, gutenberg):
    """Return a document's text with \\n as its line ends; gutenberg: without header and licence."""
    text = re.sub("\r\n?", "\n", (text or "").removeprefix("\ufeff"))
    return GUTENBERG.sub("", text) if gutenberg else text


def _train_and_val(rows, share, gutenberg):
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
        text = _clean(rows[0]["text"], gutenberg)
        cut = int(len(text) * (1 - share))
        return {"train": [{"text": text[:cut]}], "val": [{"text": text[cut:]}]}
    is_val = np.diff(np.floor(np.arange(n + 1) * share)) > 0
    return {
        "train": rows.select(np.flatnonzero(~is_val)),
        "val": rows.select(np.flatnonzero(is_val)),
    }


def _sample(rows, longest, gutenberg):
    """Yield lines to train SentencePiece on: SAMPLE characters, `longest` of each document."""
    total = 0  # characters so far
    for row in rows:
        taken = 0  # characters of this document
        for piece in pieces(_clean(row["text"], gutenberg)):
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


def tokenised(
    text: str | None, tok: Tokenizer, end: bool = False, gutenberg: bool = False, code: str = ""
) -> dict:
    """Return a document's ids as bytes, and its numbers of bytes (in UTF-8) and of words.

    end: eot follows the ids. code: a version, since `datasets` knows a cached result by this
    function's name and arguments. It calls this function in its processes.
    """
    text = _clean(text, gutenberg)
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    ids = b"".join(tok.ids(piece).astype(dtype).tobytes() for piece in pieces(text))
    if end:
        ids += np.array([tok.eot], dtype).tobytes()
    return {
        "ids": ids,
        "bytes": len(text.encode("utf-8", "surrogatepass")),
        "words": len(text.split()),
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
        features=Features(ids=Value("large_binary"), bytes=Value("int64"), words=Value("int64")),
        writer_batch_size=100,  # documents that each process has in memory
    )


def write(
    folder: str, tok: Tokenizer, documents: Iterable[tuple[str, dict]], source: dict, **fields
) -> dict:
    """Write <split>.bin and meta.json, each whole or not at all. Return the content of meta.json.

    documents: (split, what `tokenised` returns) of each document, one split after the other.
    source, fields: what else meta.json holds. Raises UserError for a split without tokens.
    """
    os.makedirs(folder, exist_ok=True)
    dtype = np.min_scalar_type(tok.n_vocab - 1)
    files = {}
    with tempfile.TemporaryDirectory(dir=folder, suffix=".tmp") as temporary:
        for split, group in itertools.groupby(documents, key=operator.itemgetter(0)):
            path = Path(temporary, f"{split}.bin")
            entry = {"tokens": 0, "documents": 0, "bytes": 0, "words": 0}
            with open(path, "wb") as f:
                for _, document in group:
                    f.write(document["ids"])
                    entry["documents"] += 1
                    entry["bytes"] += document["bytes"]
                    entry["words"] += document["words"]
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
        text = json.dumps(meta, indent=1, ensure_ascii=False)
        Path(temporary, "meta.json").write_text(text, "utf-8")
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
