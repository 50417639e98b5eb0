"""Any text to token ids on disk, for data/*/prepare.py. Read run first; the rest stands in the order of its calls.

Hugging Face's `datasets` reads the documents and turns them into ids, in several processes. It keeps the text and the
ids as Arrow files in its cache, ~/.cache/huggingface (HF_HOME moves it), so the disk must hold the text once and the
ids twice. After a kill, the same command begins again with what is cached. Later the cache can be deleted.
"""

import contextlib
import glob
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from errors import UserError, optional, refuse
from text import dataset, tokenizers
from text.tokenizers import Tokenizer

PIECE = 2**14  # characters that are tokenised together, roughly
SAMPLE = 2 * 10**7  # characters that SentencePiece is trained on
PER_DOCUMENT = 10**5  # of them, from one document; of fewer than 200 documents, an equal share of each
CODE = dataset.sha256(__file__) + dataset.sha256(tokenizers.__file__)  # an edit of the code voids what is cached
SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}  # to ours
KINDS = {".parquet": "parquet", ".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv"}  # by `datasets`
# the last line of Project Gutenberg's header, in the first million characters, and the first line of its licence
GUTENBERG_START = re.compile(r"(?im)^\*\*\* ?START OF TH(E|IS) PROJECT GUTENBERG EBOOK[^*]*\*\*\*[^\n]*\n+")
GUTENBERG_END = re.compile(r"(?im)^(\*\*\* ?END OF TH(E|IS) PROJECT GUTENBERG EBOOK|End of (the )?Project Gutenberg)")


def run(
    out_dir: str, source: str, tokenizer: str, *, column: str = "text", val_share: float = 0.1,
    gutenberg: bool = False, vocab_size: int = 8000, num_workers: int | None = None,
) -> None:  # fmt: skip
    """Writes the tokens of a source into out_dir and prints a report, unless out_dir has them already.

    source: a text file (one document); a .parquet, .jsonl or .csv file (each row is one); a folder of such files;
    owner/name or owner/name:config on the Hugging Face hub. column: the rows' column of text. tokenizer: a kind of
    TOKENIZER (char and sentencepiece are made of this text), or a prepared data set that has one. val_share: of the
    documents for val, if the source has no val split. gutenberg: leave out Project Gutenberg's licences. num_workers:
    processes, which do not change the tokens; None: one per core. Raises UserError, and OSError for a full disk.
    """
    refuse([(num_workers is not None and num_workers < 1, f"num_workers={num_workers} must be at least 1")])
    meta = _wanted(tokenizer, vocab_size)
    version, read = _opened(source, column)
    digest = hashlib.sha256(json.dumps([version, meta, val_share, gutenberg, CODE]).encode()).hexdigest()
    with contextlib.suppress(UserError, OSError):  # nothing is prepared, or it is damaged
        done = dataset.read_meta(out_dir)
        if done.get("id") == digest and all(dataset.Tokens(out_dir, name[:-4], 0) for name in done["files"]):
            return print(f"{out_dir} is already prepared and intact: nothing to do")
    splits = read()
    refuse([("train" not in splits, f"{source} has no train split, but {', '.join(splits)}")])
    several = sum(map(len, splits.values())) > 1
    sampled = SAMPLE // max(1, min(len(splits["train"]), SAMPLE // PER_DOCUMENT))
    splits = splits if "val" in splits else _with_val(splits, val_share, gutenberg)
    tok = _new_tokenizer(meta, splits, sampled, gutenberg, several)
    if several and tok.eot is None:
        print("this tokenizer has no token for the end of a document: nothing will separate the documents")
    how = {"tok": tok, "end": several and tok.eot is not None, "gutenberg": gutenberg, "code": CODE}
    made = {split: _tokenised_rows(rows, split, how, num_workers) for split, rows in splits.items()}
    documents = ((split, document) for split, rows in made.items() for document in rows)
    report(write(out_dir, tok, documents, {"from": source, "tokenizer": tokenizer}, id=digest))


def _wanted(tokenizer: str, vocab_size: int) -> dict:
    """The meta of a tokenizer; of one that is made of the text it lacks the vocabulary."""
    if tokenizer in tokenizers.TOKENIZER:
        return {"kind": tokenizer} | ({"vocab_size": vocab_size} if tokenizer == "sentencepiece" else {})
    try:
        return dataset.read_meta(dataset.folder_of(tokenizer))["tokenizer"]
    except UserError as error:
        known = f"tokenizer={tokenizer} is not one of {', '.join(tokenizers.TOKENIZER)}"
        raise UserError(f"{known}, and no prepared data set: {error}") from None


def _opened(source: str, column: str) -> tuple[list, Callable[[], dict]]:
    """(what names this version of the source, a function that reads its splits)."""
    if os.path.isfile(source) and (source.endswith(".txt") or _kind(source) is None):
        text = read_text(source)
        return [hashlib.sha256(text.encode()).hexdigest()], lambda: {"train": [{"text": text}]}
    if os.path.exists(source):
        name, files = _local(os.path.abspath(source))
        what = {"data_files": {split: list(map(glob.escape, paths)) for split, paths in files.items()}}
        what |= {"sample_by": "document", "encoding": "utf-8-sig"} if name == "text" else {}
    else:
        is_name = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", source) and not source.endswith((*KINDS, ".gz"))
        refuse([(not is_name, f"--source={source} is no file, no folder, and no owner/name of the Hugging Face hub")])
        name, what, files = source.partition(":")[0], {"name": source.partition(":")[2] or None}, {}
    datasets = optional("datasets", f"reading {source}")
    with _reading(source, files):
        builder = datasets.load_dataset_builder(name, **what)

    def read() -> dict:
        with _reading(source, files):
            builder.download_and_prepare()
            found = builder.as_dataset()
        return {SPLITS.get(str(split), str(split)): _text_of(rows, source, column) for split, rows in found.items()}

    return [builder.config_id, builder.hash, column], read


def _kind(path: str) -> str | None:
    """The builder of `datasets` that reads a file, which may be compressed; None for unknown endings."""
    return KINDS.get(os.path.splitext(re.sub(r"\.(gz|zst|xz|bz2)$", "", path))[1])


def _local(source: str) -> tuple[str, dict[str, list[str]]]:
    """(kind, {split: paths}) of a file, or of a folder's files of one kind. A folder's or file's name is its split."""
    folder = [os.path.join(root, name) for root, _, names in os.walk(source) for name in names]
    paths = [source] if os.path.isfile(source) else sorted(folder)
    kinds = {path: _kind(path) for path in paths if os.sep + "." not in path.removeprefix(source)}
    kind = next((kind for kind in KINDS.values() if kind in kinds.values()), None)
    refuse([(kind is None, f"{source} holds no files of these kinds: {', '.join(KINDS)}")])
    files, read = {}, [path for path in kinds if kinds[path] == kind]
    for path in read:
        refuse([(not os.path.getsize(path), f"{path} is empty")])
        words = (re.match(r"[a-z]*", part.lower())[0] for part in path.removeprefix(source).split(os.sep))
        files.setdefault(next((SPLITS[word] for word in words if word in SPLITS), "train"), []).append(path)
    if others := len(kinds) - len(read):
        print(f"{source}: {len(read)} {kind} files are read, {others} others are not")
    return kind, files


def read_text(path: str) -> str:
    """The text of a file, without a BOM and with \\n as its line ends. Raises UserError if it is not UTF-8."""
    try:
        with open(path, encoding="utf-8-sig") as f:
            return f.read()
    except UnicodeDecodeError as error:
        hint = f"if it is latin-1: iconv -f LATIN1 -t UTF-8 {path} converts it"
        raise UserError(f"{path} is not UTF-8 text ({error.reason}); {hint}") from None


@contextlib.contextmanager
def _reading(source: str, files: dict[str, list[str]]) -> Iterator[None]:
    """Turns the errors of `datasets` into sentences. No code of ours runs inside, whose errors would be bugs."""
    try:
        yield
    except Exception as error:  # the classes of several libraries
        cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        for path in sum(files.values(), []) if isinstance(cause, UnicodeDecodeError) else []:
            read_text(path)  # which names the file
        why = f"{type(cause).__name__}: {' '.join(str(cause).split())[:500]}"
        other = "" if files else ". --source= takes local files as well"
        raise UserError(f"cannot read {source} ({why}){other}") from None


def _text_of(rows: object, source: str, column: str) -> object:
    """The rows of a Dataset with this column alone, as "text"."""
    names = rows.column_names
    refuse([(column not in names, f"{source} has no column {column!r}, but {', '.join(names)}: give one as --column=")])
    kind = getattr(rows.features[column], "dtype", "more than one thing")
    refuse([("string" not in kind, f"{source}: the column {column!r} holds {kind}, not text: give another --column=")])
    return rows.select_columns([column]).rename_columns({column: "text"})


def _clean(text: str | None, gutenberg: bool) -> str:
    """A document's text with \\n as its line ends and, with gutenberg, without that project's header and licence."""
    text = (text or "").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if gutenberg:
        text = text[start.end() :] if (start := GUTENBERG_START.search(text, 0, 2**20)) else text
        text = text[: end.start()] if (end := GUTENBERG_END.search(text)) else text
    return text


def _with_val(splits: dict, share: float, gutenberg: bool) -> dict:
    """The splits with val: every 1/share-th document of train; of a single one its last characters, as in nanoGPT."""
    rows, n = splits["train"], len(splits["train"])
    no = f"val_share={share} must be between 0 and 1: the source has no validation split"
    none = f"val_share={share} leaves no document for train or for val: the number of documents is {n}"
    refuse([(not 0 < share < 1, no), (n != 1 and int(n * share) == 0, none)])
    if n == 1:
        text = _clean(rows[0]["text"], gutenberg)
        cut = int(len(text) * (1 - share))
        return splits | {"train": [{"text": text[:cut]}], "val": [{"text": text[cut:]}]}
    is_val = np.diff(np.floor(np.arange(n + 1) * share)) > 0
    return splits | {"train": rows.select(np.flatnonzero(~is_val)), "val": rows.select(np.flatnonzero(is_val))}


def _new_tokenizer(meta: dict, splits: dict, sampled: int, gutenberg: bool, several: bool) -> Tokenizer:
    """The tokenizer of a meta. A vocabulary of characters is made of all splits, one of SentencePiece of train."""
    if "vocab_size" in meta:
        return tokenizers.train_sentencepiece(_sample(splits["train"], sampled, gutenberg), meta["vocab_size"])
    if meta == {"kind": "char"}:
        vocab = set().union(*(_clean(row["text"], gutenberg) for rows in splits.values() for row in rows))
        return tokenizers.CharTokenizer("".join(sorted(vocab)), several)
    return tokenizers.tokenizer(meta)


def _sample(rows: Iterable[dict], most: int, gutenberg: bool) -> Iterator[str]:
    """The lines that SentencePiece is trained on, SAMPLE characters: of each document its first `most`, roughly."""
    total = 0  # characters so far
    for row in rows:
        of_this = 0
        for piece in pieces(_clean(row["text"], gutenberg)):
            if of_this < most:
                yield from (line for line in piece.split("\n") if line.strip())
                of_this += len(piece)
        total += of_this
        if total >= SAMPLE:
            return


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """Cuts a text after `size` characters or more, up to a space or \\n.

    A piece ends where a space follows a visible character, or after 8 size characters. Every tokenizer begins a token
    at such a space: no pattern of GPT-2's matches across it, and SentencePiece's tokens begin with it. So the pieces
    have the tokens of the whole text, but for SentencePiece's rounding (one in 40,000 in 250,000 characters).
    """
    cut = re.compile(rf".{{{size},{8 * size}}}?(?<!\s)(?=[ \n])|.{{1,{8 * size}}}", re.S)
    return (match[0] for match in cut.finditer(text))


def tokenised(text: str | None, tok: Tokenizer, end: bool = False, gutenberg: bool = False, code: str = "") -> dict:
    """A document's ids as bytes, with eot after them if `end`; its numbers of bytes in UTF-8 and of words.

    `datasets` calls it in its processes, and knows what it has cached by this function's name and its arguments.
    """
    text, dtype = _clean(text, gutenberg), np.min_scalar_type(tok.n_vocab - 1)
    ids = b"".join(tok.ids(piece).astype(dtype).tobytes() for piece in pieces(text))
    ids += np.array([tok.eot], dtype).tobytes() if end else b""
    return {"ids": ids, "bytes": len(text.encode("utf-8", "surrogatepass")), "words": len(text.split())}


def _tokenised_rows(rows: Iterable[dict], split: str, how: dict, num_workers: int | None) -> Iterable[dict]:
    """`tokenised` of each row, in order."""
    if isinstance(rows, list):
        return (tokenised(row["text"], **how) for row in rows)
    from datasets import Features, Value

    n = min(num_workers or os.cpu_count() or 1, len(rows))
    return rows.map(
        tokenised, input_columns=["text"], remove_columns=["text"], fn_kwargs=how, num_proc=n if n > 1 else None,
        features=Features(ids=Value("large_binary"), bytes=Value("int64"), words=Value("int64")),
        writer_batch_size=100, desc=f"tokens of {split}",  # each process has 100 documents in memory
    )  # fmt: skip


def write(folder: str, tok: Tokenizer, documents: Iterable[tuple[str, dict]], source: dict, **more: object) -> dict:
    """Writes <split>.bin and meta.json, each whole or not at all. Returns the content of meta.json.

    documents: (split, what `tokenised` returns) of each. source, more: fields of meta.json. UserError for no tokens.
    """
    os.makedirs(folder, exist_ok=True)
    files, opened, dtype = {}, {}, np.min_scalar_type(tok.n_vocab - 1)
    with tempfile.TemporaryDirectory(dir=folder, suffix=".tmp") as aside, contextlib.ExitStack() as stack:
        for split, document in documents:
            name = f"{split}.bin"
            if name not in files:
                opened[name] = stack.enter_context(open(os.path.join(aside, name), "wb"))
                files[name] = dict.fromkeys(("tokens", "documents", "bytes", "words"), 0)
            opened[name].write(document["ids"])
            counts = {"tokens": len(document["ids"]) // dtype.itemsize, "documents": 1, **document, "ids": 0}
            files[name] = {key: n + counts[key] for key, n in files[name].items()}
        for name, entry in files.items():
            opened[name].close()
            refuse([(not entry["tokens"], f"there is too little text: {name} would be empty")])
            entry["sha256"] = dataset.sha256(opened[name].name)
        meta = {"tokenizer": tok.meta, "vocab_size": tok.n_vocab, "dtype": dtype.name, "source": source}
        meta |= more | {"files": files}
        with open(os.path.join(aside, "meta.json"), "w", encoding="utf-8") as f:
            json.dump(meta, f, indent=1, ensure_ascii=False)
        for name in (*files, "meta.json"):
            os.replace(os.path.join(aside, name), os.path.join(folder, name))
    return meta


def report(meta: dict) -> None:
    """Prints what was prepared, in a few lines."""
    print(f"source: {meta['source'].get('from')}\nvocab size: {meta['vocab_size']:,}")
    for name, entry in meta["files"].items():
        counts = f"{entry['documents']:,} documents, {entry['words']:,} words, {entry['bytes']:,} bytes"
        print(f"{name.removesuffix('.bin')} has {entry['tokens']:,} tokens ({counts})")
