"""Any text to token ids on disk, for data/*/prepare.py. Read run first; the rest follows in order.

Hugging Face's `datasets` reads the documents and turns them into ids, in several processes. It
keeps the text and the ids as Arrow files in its cache, ~/.cache/huggingface (HF_HOME moves it), so
the disk must hold the text once and the ids twice. If this is killed, the same command goes on with
what is in the cache. Later the cache can be deleted. A single text file is read without `datasets`.
"""

import collections
import contextlib
import glob
import itertools
import json
import os
import re
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from configurator import configure, cores, user_errors

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
    r"(?i)(?<![^-._ 0-9/\\])(?:(?P<train>train|training)|(?P<val>val|valid|validation|dev)"
    r"|(?P<test>test|testing|eval|evaluation))(?![^-._ 0-9/\\])"
)

# The ending of a file that is read. The group's name is the builder of `datasets` for such a file.
# The names before json are of files about data: Kaggle's, those of `datasets`, and ours.
KIND = re.compile(
    r"\.(?:(?P<text>txt)|(?P<csv>csv|tsv)|(?P<parquet>parquet)|(?P<arrow>arrow)"
    r"|(?<!^dataset-metadata\.)(?<!^dataset_info\.)(?<!^dataset_infos\.)(?<!^dataset_dict\.)"
    r"(?<!^state\.)(?<!^meta\.)(?P<json>json|jsonl|jsonlines|ndjson))(?:\.(?:gz|zst|xz|bz2))?$"
)

# From the beginning of a book to the last line of Project Gutenberg's header, and from the first
# line of its licence to the end. The header is looked for in the first million characters.
GUTENBERG = re.compile(
    r"(?ims)\A.{,1048576}?^\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG EBOOK[^*]*\*\*\*[^\n]*\n+"
    r"|^(\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG EBOOK|End of (the )?Project Gutenberg).*"
)


def run_with_flags(script: dict) -> None:
    """Prepare the text that the flags of data/*/prepare.py name. script: its globals()."""
    config, _ = configure(script)
    config["out_dir"] = config["out_dir"] or os.path.dirname(script["__file__"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as by Ctrl-C
    with user_errors():
        run(**config)
    print(f"train.py and eval.py take it as --dataset={config['out_dir']}")


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
    num_workers: int = 1,
) -> None:
    """Write the tokens of a source into out_dir and print a report.

    source: a text file (one document); a file that KIND knows (each row is a document); a folder of
    such files; owner/name or owner/name:config on the Hugging Face hub.
    column: the column of the rows that holds the text.
    tokenizer: a name in TOKENIZER (the vocabularies of char and sentencepiece are made from this
    text), or a prepared data set, whose tokenizer is taken.
    val_share: the share of the documents for val, if the source has no val split.
    gutenberg: leave out Project Gutenberg's headers and licences.
    split_documents: <|endoftext|> in a text ends a document.
    num_workers: processes, which do not change the tokens; 0 or less: one for each core.

    Raises UserError for a mistake, OSError for a full disk.
    """
    # A tokenizer whose vocabulary is known, perhaps that of a prepared data set
    if tokenizer not in ("char", "sentencepiece"):
        meta = {"kind": tokenizer}
        if tokenizer not in tokenizers.TOKENIZER:
            with contextlib.suppress(UserError):  # there is no such data set
                meta = dataset.read_meta(dataset.folder_of(tokenizer))["tokenizer"]
        tok = tokenizers.tokenizer(meta)

    # The documents of each split
    cleaning = {"gutenberg": gutenberg, "split": split_documents}
    splits = _read(source, column)
    if "train" not in splits:
        raise UserError(f"{source} has no train split, but {', '.join(splits)}")
    several = split_documents or sum(map(len, splits.values())) > 1
    longest = max(PER_DOCUMENT, SAMPLE // max(1, len(splits["train"])))
    if "val" not in splits:
        splits |= _train_and_val(splits["train"], val_share, cleaning)

    # A tokenizer whose vocabulary is made from the text
    if tokenizer == "sentencepiece":
        tok = tokenizers.train_sentencepiece(
            _sample(splits["train"], longest, cleaning), vocab_size
        )
    elif tokenizer == "char":
        vocab = set()
        for row in itertools.chain(*splits.values()):
            vocab.update(*_documents(row["text"], **cleaning))
        tok = tokenizers.CharTokenizer("".join(sorted(vocab)), several)

    # The tokens. eot follows each document, if there are several and the tokenizer has one.
    options = {"tok": tok, "end": several and tok.eot is not None, "code": CODE} | cleaning
    rows = {split: _tokenised_rows(splits[split], options, num_workers) for split in splits}
    _report(write(out_dir, tok, rows, {"from": source, "tokenizer": tokenizer}))


def _read(source, column):
    """Return the splits of a source: {split: rows}.

    rows: a Dataset of the column "text" alone; for a single text file a list of one row.
    """
    kind = _kind_of(source)
    files = {"train": [source]}
    if os.path.isdir(source):
        kind, files = _files_in(source)
    elif os.path.exists(source) and kind in (None, ".txt"):
        return {"train": [{"text": read_text(source)}]}

    # What `datasets` is asked for: files, or a data set of the hub
    if os.path.exists(source):
        builder = KIND.search(kind).lastgroup
        options = {"data_files": {split: list(map(glob.escape, files[split])) for split in files}}
        if builder == "text":
            options["sample_by"] = "document"
        # A mark, which _documents removes, makes texts of all cells, also of "null" and "00001".
        # Empty cells stay empty: so pandas can tell a separator at the end of each row.
        if builder == "csv":
            options |= {
                "converters": dict.fromkeys(range(9999), lambda cell: cell and "\ufeff" + cell),
                "keep_default_na": False,
                "sep": "\t" if ".tsv" in kind else ",",
                "index_col": False,
            }
            # pandas only warns of a row that has more cells than the header, and drops them
            warnings.filterwarnings("error", "Length of header")
    elif not kind and re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source):
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
        if getattr(error, "filename", None):  # an OSError, perhaps of the cache's folder
            raise
        if kind in (".txt", ".csv", ".tsv"):
            for path in itertools.chain(*files.values()):
                read_text(path)  # raises a sentence that names the file
        error = error.__cause__ or error  # of a DatasetGenerationError
        raise UserError(
            f"cannot read {source} ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from None

    # The column with the text, under the name "text"
    splits = {}
    for name, rows in found.items():
        if column not in rows.column_names:
            raise UserError(
                f"{source} has no column {column!r}, but {', '.join(rows.column_names)}: "
                "give one as --column="
            )
        kind = getattr(
            rows.features[column],
            "dtype",
            f"lists (jq -c '.{column}[]' makes rows of a list) or several types",
        )
        if kind not in ("string", "large_string"):
            raise UserError(f"{source} has no texts in {column!r}, but {kind}")
        split = SPLIT.sub(lambda word: word.lastgroup, name)
        splits[split] = rows.select_columns(column).rename_columns({column: "text"})
    return splits


def _files_in(folder):
    """Return (kind, {split: paths}) of the files of a folder: of the kind that has the most bytes.

    Prints how many files are read for each split, and how many are not. A file belongs to the split
    whose name stands between separators in its own name or, if there is none, in the name of a
    folder above it. Linked folders are read too, hidden files are not.
    """
    # Which kind of file has the most bytes?
    paths = sorted(filter(os.path.isfile, glob.glob(glob.escape(folder) + "/**", recursive=True)))
    sizes = collections.Counter()
    for path in paths:
        sizes[_kind_of(path)] += os.path.getsize(path)
    del sizes[None]
    if not sizes:
        raise UserError(
            f"{folder} holds no files of these kinds: "
            ".parquet, .txt, .jsonl, .json, .csv, .tsv, .arrow"
        )
    kind = max(sizes, key=sizes.get)

    # The last word for a split decides: a file's own name comes after its folders' names.
    files = collections.defaultdict(list)
    for path in paths:
        split = "train"
        for word in SPLIT.finditer(os.path.relpath(path, folder)):
            split = word.lastgroup
        if _kind_of(path) == kind:
            files[split].append(path)

    counts = [f"{len(files[split])} for {split}" for split in files]
    print(
        f"{folder}: {kind} files: {', '.join(counts)}\n"
        f"files not read: {len(paths) - sum(map(len, files.values()))}"
    )
    return kind, files


def _kind_of(path):
    """Return a file's ending, as KIND knows it; None for another kind, and for files about data."""
    ending = KIND.search(os.path.basename(path).lower())
    return ending and ending[0]


def read_text(path: str) -> str:
    """Return the text of a file, without a byte-order mark and with \\n as its line ends.

    Raises UserError if the file is not UTF-8, or no text.
    """
    text = Path(path).read_text(encoding="utf-8-sig", errors="surrogateescape")
    if re.search("[\0\udc80-\udcff]", text):  # \udc80 to \udcff stand for bytes that are not UTF-8
        raise UserError(
            f"{path} is not UTF-8 text. If its encoding is another one, iconv -f LATIN1 -t UTF-8 "
            "(or -f UTF-16) converts it. A PDF, an archive or an office document is no text yet"
        )
    return text


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
        end = total + longest
        for piece in pieces("\n".join(_documents(row["text"], **cleaning))):
            if total >= end:
                break
            yield from filter(str.strip, piece.split("\n"))
            total += len(piece)
        if total >= SAMPLE:
            return


def pieces(text: str, size: int = 2**14) -> Iterator[str]:
    """Yield pieces of a text of `size` characters or more.

    A piece ends where a space or \\n follows a visible character, or after 8 size characters.
    Every tokenizer begins a token at such a place: no pattern of GPT-2's matches across it, and
    SentencePiece's tokens begin with the space. So the pieces have the tokens of the whole text,
    except for SentencePiece's rounding (one token in 40,000 with 250,000 characters).
    """
    piece = rf".{{{size},{8 * size}}}?(?<!\s)(?=[ \n])|.{{1,{8 * size}}}"
    return (match[0] for match in re.finditer(piece, text, re.S))


def tokenised(
    text: str | None, tok: Tokenizer, end: bool = False, code: str = "", **cleaning: bool
) -> dict:
    """Return the ids of a row's text as bytes, and its numbers of tokens, documents and so on.

    end: eot follows each document. cleaning: see _documents. "end_marks" counts END as plain text.
    code: a version, since `datasets` knows a cached result by this function's name and arguments.
    It calls this function in its processes.
    """
    # The ids of each document, and of the boundary after it
    documents = _documents(text, **cleaning)
    boundary = [tok.eot] * end
    parts = [[]]
    for document in documents:
        parts += [*map(tok.ids, pieces(document)), boundary]
    ids = np.concatenate(parts, dtype=np.min_scalar_type(tok.n_vocab - 1), casting="unsafe")

    text = " ".join(documents)
    return {
        "ids": ids.tobytes(),
        "tokens": len(ids),
        "documents": len(documents),
        "bytes": len("".join(documents).encode("utf-8", "surrogatepass")),
        "words": len(text.split()),
        "end_marks": text.count(END),
    }


def _tokenised_rows(rows, options, num_workers):
    """Return `tokenised` of each row, in order."""
    if isinstance(rows, list):
        return (tokenised(row["text"], **options) for row in rows)

    # A pool of processes ends them by SIGTERM, and waits for them. Since run_with_flags, Python
    # handles SIGTERM, and a process that has just begun may lose a signal that Python handles. Then
    # the pool would wait forever. No process loses SIGKILL.
    from multiprocess.process import BaseProcess  # of `datasets`

    BaseProcess.terminate = BaseProcess.kill
    return rows.map(
        tokenised,
        input_columns="text",
        remove_columns="text",
        fn_kwargs=options,
        num_proc=max(0, num_workers) or cores(),
        writer_batch_size=100,  # documents that each process has in memory
    )


def write(folder: str, tok: Tokenizer, rows: dict[str, Iterable[dict]], source: dict) -> dict:
    """Write <split>.bin and meta.json, each whole or not at all. Return the content of meta.json.

    rows: {split: what `tokenised` returns for each of its rows}.
    source: where the text is from, for meta.json. Raises UserError for a split without tokens.
    """
    os.makedirs(folder, exist_ok=True)
    files = {}
    for left in Path(folder).glob("*.unfinished"):  # yesterday, by a process that was killed
        if left.stat().st_mtime < time.time() - 86400:
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, suffix=".unfinished") as temporary:
        for split, rows_of_split in rows.items():
            path = Path(temporary, f"{split}.bin")
            counts = collections.Counter()
            with open(path, "wb") as f:
                for row in rows_of_split:
                    f.write(row.pop("ids"))
                    counts.update(row)
            if not counts["tokens"]:
                raise UserError(
                    f"{path.name} would be empty: there is too little text for this --val_share="
                )
            files[path.name] = {**counts, "sha256": dataset.sha256(path)}

        meta = {
            "tokenizer": tok.meta,
            "vocab_size": tok.n_vocab,
            "dtype": np.min_scalar_type(tok.n_vocab - 1).name,
            "source": source,
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
