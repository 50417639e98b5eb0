"""text/prepare.py: each source gives the same tokens, in all numbers of processes, after errors."""

import gzip
import inspect
import itertools
import json
import os
import random
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT, done, parametrize, refusal, refused, slow

from text import dataset, prepare, tokenizers
from text.dataset import Tokens
from text.tokenizers import END

datasets = pytest.importorskip("datasets")
multiprocess = pytest.importorskip("multiprocess")

SCRIPT = "data/text/prepare.py"


def sentences(n, seed):
    """Text with runs of spaces, empty and long lines, other alphabets, no last line end."""
    rng = random.Random(seed)
    words = "the whale sea Überall καὶ don't 1851 ship's — naïve 漢字 ... ".split() + ["x" * 40]
    ends = [" ", " ", " ", " ", "  ", "\n", "\n\n", "\n  ", "\t", ", ", "\u00a0", " \n"]
    return "".join(rng.choice(words) + rng.choice(ends) for _ in range(n))


TEXTS = [sentences(n, n) for n in (3000, 7, 900, 5000, 1, 40, 2000, 1200, 11, 600, 4000, 30)]


def write_files(folder, texts):
    """Write each text as a file of a folder; return the folder's path."""
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / f"{i:02d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def write_rows(path, texts, **columns):
    """Write each text as a row of a .parquet, .json (of lines) or .csv file; return its path."""
    rows = datasets.Dataset.from_dict({"id": [*range(len(texts))], "text": texts} | columns)
    getattr(rows, f"to_{path.suffix[1:]}")(path, batch_size=2)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the texts as users have them, some with \\r\\n and some with a BOM."""
    folder = tmp_path_factory.mktemp("books")
    for i, text in enumerate(TEXTS):
        line_end = "\r\n" if i % 2 else "\n"
        encoding = "utf-8" if i % 3 else "utf-8-sig"
        (folder / f"{i:02d}.txt").write_text(text, encoding=encoding, newline=line_end)
    return str(folder)


def prepared(out, source, kind="bytes", **settings):
    """The sha256 of each .bin file that a call of prepare.run writes; meta.json has them too."""
    settings = {"val_share": 0.25, "num_workers": 1, "vocab_size": 300} | settings
    prepare.run(str(out), source, kind, **settings)
    made = {path.name: dataset.sha256(path) for path in out.glob("*.bin")}
    files = dataset.read_meta(out)["files"]
    assert sorted(os.listdir(out)) == ["meta.json", *sorted(made)]
    assert made == {name: files[name]["sha256"] for name in files}
    return made


def written(out, source, **settings):
    """The prepared text in bytes, with 255 at the end of each document: (train, val)."""
    prepared(out, source, **settings)
    return tuple(bytes(Tokens(out, split, 0).ids) for split in ("train", "val"))


def tokenizer_of(out):
    return tokenizers.tokenizer(dataset.read_meta(out)["tokenizer"])


# -----------------------------------------------------------------------------
# the same tokens


@parametrize("kind", tokenizers.TOKENIZER)
def test_every_kind_of_file_and_number_of_processes(kind, folder, tmp_path, monkeypatch):
    """They give the tokens of the whole texts; small pieces stand for those of 2^14 characters."""
    monkeypatch.setattr(prepare.pieces, "__defaults__", (64,))
    raw = [path.read_bytes().decode() for path in sorted(Path(folder).iterdir())]
    (tmp_path / "rows").mkdir()
    for i in range(3):
        write_rows(tmp_path / "rows" / f"train-{i}.parquet", raw[4 * i : 4 * i + 4])
    sources = [(folder, 3), (str(tmp_path / "rows"), 2)]
    if kind == "bytes":
        sources.append((write_rows(tmp_path / "a.csv", TEXTS), -1))
    out = tmp_path / "0"
    first = prepared(out, folder, kind)
    assert set(first) == {"train.bin", "val.bin"}
    for source, n in sources:
        assert prepared(tmp_path / "other", source, kind, num_workers=n) == first

    tok = tokenizer_of(out)
    val = TEXTS[3::4]
    train = [text for text in TEXTS if text not in val]
    for split, expected in (("val", val), ("train", train)):
        tokens = Tokens(out, split, 8)
        assert tokens.ids.tolist() == [i for text in expected for i in [*tok.ids(text), tok.eot]]
        entry = tokens.meta["files"][f"{split}.bin"]
        del entry["sha256"]
        assert entry == {
            "documents": len(expected),
            "tokens": len(tokens),
            "bytes": sum(len(text.encode()) for text in expected),
            "words": sum(len(text.split()) for text in expected),
            "end_marks": 0,
        }


def test_one_document_is_cut_as_in_nanogpt(tmp_path):
    text = TEXTS[0]
    half = len(text) // 2
    folder = write_files(tmp_path / "txt", [text])
    for source in (folder, f"{folder}/00.txt", write_rows(tmp_path / "a.parquet", [text])):
        train, val = written(tmp_path / "out", source, val_share=0.5)
        assert [train.decode(), val.decode()] == [text[:half], text[half:]]


def test_shakespeare_is_nanogpts(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # its import takes seconds
    text = Path(ROOT, "data", "shakespeare_char", "input.txt").read_text(encoding="utf-8")
    n = int(len(text) * 0.9)
    lengths_of = {"shakespeare_char": (1003854, 111540), "shakespeare": (301966, 36059)}
    for name, lengths in lengths_of.items():
        result = run(f"data/{name}/prepare.py", f"--out_dir={tmp_path / name}")
        done(result, f"train has {lengths[0]:,} tokens")
        train, val = (Tokens(tmp_path / name, split, 8).ids for split in ("train", "val"))
        assert (len(train), len(val)) == lengths
        tok = tokenizer_of(tmp_path / name)
        assert [tok.decode(train), tok.decode(val)] == [text[:n], text[n:]]
    assert tokenizer_of(tmp_path / "shakespeare_char").vocab == "".join(sorted(set(text)))


@slow
def test_the_source_of_pythons_library(run, tmp_path):
    done(run("data/python/prepare.py", f"--out_dir={tmp_path}"), "val has 800,", "vocab size: 256")
    source = dataset.read_meta(tmp_path)["source"]["from"]
    assert f"/python-{sys.version.split()[0]}.txt" in source
    first = Path(sysconfig.get_path("stdlib"), "__future__.py").read_bytes()
    assert Tokens(tmp_path, "train", 8).ids[: len(first)].tobytes() == first


def test_the_first_use_prepares_shakespeare(tmp_path, monkeypatch, capfd):
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    code = "import pathlib\npathlib.Path(__file__).with_name('meta.json').touch()"
    (folder / "prepare.py").write_text(code)
    monkeypatch.setattr(dataset, "DATA", tmp_path)
    for printed in (True, False):
        dataset.prepare_small("shakespeare")
        assert ("is not prepared yet: running" in capfd.readouterr().out) == printed


@parametrize(
    "name, default",  # nanoGPT's, the paper's and ours
    [
        ("openwebtext", ("val_share", 0.0005)),
        ("pg19", ("vocab_size", 10000)),
        ("text", ("column", "text")),
    ],
)
def test_the_scripts_flags_and_defaults(name, default, run, monkeypatch):
    seen = {}
    parameters = inspect.signature(prepare.run).parameters
    monkeypatch.setattr(prepare, "run", seen.update)
    run(f"data/{name}/prepare.py", "--source=x", "--num_workers=3")
    assert {default, ("source", "x"), ("num_workers", 3)} <= seen.items()
    assert seen.keys() <= parameters.keys()


@parametrize(
    "name, rows, expected",
    [
        ("a.JSONLINES", '{"text": "a"}\n{"text": "b"}\n', b"a\xff"),
        ("a.TSV.gz", "id\ttext\n1\ta, b\n2\tc\n", b"a, b\xff"),
        ("a.TXT", "a\tb\t", b"a\t"),
    ],
)
def test_endings_in_any_case_and_their_other_names(name, rows, expected, tmp_path):
    content = rows.encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if ".gz" in name else content)
    assert written(tmp_path / "out", str(tmp_path / name), val_share=0.5)[0] == expected


def test_a_folder_of_files_of_many_kinds(tmp_path, capsys):
    """The kind with the most bytes is read, in linked folders too; the rest is counted.

    Files about the data are no data, and the folder may be the one that is written to.
    """
    folder = tmp_path / "source"
    write_files(tmp_path / "elsewhere", ["linked"])
    (folder / "old").mkdir(parents=True)
    for name in ("b.TXT", "old/a.txt", "notes.pdf", ".hidden.txt"):
        (folder / name).write_text("text " * 3)
    (folder / "few.csv").write_text("text")
    (folder / "dataset-metadata.json").write_text('{"text": "' + "x" * 100 + '"}')
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    for others in (3, 6):
        prepare.run(str(folder), str(folder), "bytes", val_share=0.4, num_workers=1)
        printed = capsys.readouterr().out
        assert ".txt files: 3 for train" in printed
        assert f"files not read: {others}" in printed


def test_a_data_set_saved_by_datasets(tmp_path):
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict(train=rows.select([1]), validation=rows).save_to_disk(tmp_path / "a")
    assert written(tmp_path / "out", str(tmp_path / "a")) == (b"b\xff", b"a\xffb\xff")


# -----------------------------------------------------------------------------
# splits, licences, vocabularies


@parametrize(
    "name, split",
    [
        ("a-train.000.jsonl", "train"),  # C4's names
        ("TinyStories-valid.txt", "val"),
        ("wiki.DEV.txt", "val"),
        ("train/part-test.txt", "test"),  # a file's own name comes first
        ("latest/Trainer.txt", "train"),  # no words for a split
    ],
)
def test_a_files_split_is_a_word_in_its_name(name, split, tmp_path, capsys):
    path = tmp_path / "test" / name  # the source's own name does not count
    path.parent.mkdir(parents=True)
    path.touch()
    assert prepare._files_in(str(tmp_path / "test")) == (path.suffix, {split: [str(path)]})
    assert f"files: 1 for {split}\n" in capsys.readouterr().out


@parametrize("kind", ["bytes", "char", "sentencepiece"])
def test_marks_between_documents(kind, tmp_path, capsys):
    """<|endoftext|> in a text is plain text, which a line says, or with a flag ends a document."""
    stories = ["once upon a time", "the end of it", "a whale"] * 10
    path = tmp_path / "stories.txt"
    path.write_text(f"\n{END}\n".join(stories) + f"\n{END}\n")
    settings = {"kind": kind, "val_share": 0.5, "vocab_size": 278}
    prepared(tmp_path / "plain", str(path), **settings)
    assert f"\n{END} stands 15 times in this text, as plain text: with" in capsys.readouterr().out
    prepared(tmp_path / "out", str(path), split_documents=True, **settings)
    assert "plain text" not in capsys.readouterr().out
    files = dataset.read_meta(tmp_path / "out")["files"].values()
    assert {file["documents"] for file in files} == {15}
    ids = Tokens(tmp_path / "out", "train", 0).ids
    text = "".join(story + END for story in stories[:15])
    assert tokenizer_of(tmp_path / "out").decode(ids) == text


def test_the_sources_own_splits(tmp_path):
    for name, n in (("train", 4), ("Validation", 1), ("dev", 2), ("test", 5)):
        write_files(tmp_path / "books" / name, TEXTS[:n])
    prepared(tmp_path / "out", f"{tmp_path / 'books'}/")
    files = dataset.read_meta(tmp_path / "out")["files"].values()
    assert [file["documents"] for file in files] == [1 + 2, 5, 4]


def test_what_is_without_text_is_an_empty_document(tmp_path):
    rows = write_rows(tmp_path / "a.parquet", ["a", None, "", "\ufeffa\rb\r\nc"])
    files = write_files(tmp_path / "files", ["a", "b", "", "d"])
    for source, val in ((rows, b"\xffa\nb\nc\xff"), (files, b"b\xffd\xff")):
        assert written(tmp_path / "out", source, val_share=0.5) == (b"a\xff\xff", val)


@parametrize("name, sep", [("a.csv", ","), ("a.tsv", "\t")])
def test_a_text_is_a_text(name, sep, tmp_path):
    """Also one that looks like a number, or like none; also where rows end in a separator.

    Other columns do not matter: this one has numbers first, then words.
    """
    texts = "00001 1.50 null NA None nan True word".split() * 1300
    rows = "".join(f"{text}{sep}{i if i < 10_200 else text}{sep}\n" for i, text in enumerate(texts))
    (tmp_path / name).write_text(f"text{sep}id\n{rows}")
    train, val = written(tmp_path / "out", str(tmp_path / name), val_share=0.5)
    assert train == b"".join(text.encode() + b"\xff" for text in texts[::2])
    assert val == b"".join(text.encode() + b"\xff" for text in texts[1::2])
    (tmp_path / name).write_text(f"text\nHello{sep} world\n")  # not quoted
    with refusal("Length of header"):
        written(tmp_path / "out", str(tmp_path / name))


def test_gutenberg(tmp_path):
    """Licences are cut, also out of a single document before its last tenth becomes val."""
    mark = "*** {} OF THIS PROJECT GUTENBERG EBOOK EMMA ***\n"
    story = "She was clever.\n" * 2000
    header = "The Project Gutenberg EBook of Emma\n\n" + mark.format("START") + "\n\n"
    licence = "End of the Project Gutenberg EBook of Emma\n\n" + mark.format("END") + "law " * 9999
    far = "x" * 2**20 + "\n" + header + "\n"  # a header is at the beginning of a book
    books = [header + story + licence, far]
    folder = write_files(tmp_path / "books", books)
    train, val = written(tmp_path / "out", folder, gutenberg=True, val_share=0.5)
    assert [train, val] == [text.encode() + b"\xff" for text in (story, far)]
    single = write_rows(tmp_path / "a.json", books[:1])
    train, val = written(tmp_path / "out", single, gutenberg=True, val_share=0.5)
    assert (train + val).decode() == story


def test_a_vocabulary_is_made_of_the_train_split_alone(folder, tmp_path, monkeypatch):
    """A changed val split leaves it as it was; each of few documents gives an equal share."""
    monkeypatch.setattr(prepare, "SAMPLE", 40000)
    monkeypatch.setattr(prepare, "PER_DOCUMENT", 100)
    texts = [TEXTS[0] + " zebra" * 999, *TEXTS[1:3], "quite another text. " * 500, *TEXTS[4:]]
    other = write_files(tmp_path / "books", texts)
    prepared(tmp_path / "first", folder, "sentencepiece")
    prepared(tmp_path / "second", other, "sentencepiece")
    assert tokenizer_of(tmp_path / "first").meta == tokenizer_of(tmp_path / "second").meta


@parametrize("kind", tokenizers.TOKENIZER)
def test_the_tokenizers(kind):
    """encode and decode are inverse. END is the end of a document in a prompt, not in a corpus."""
    meta = {"kind": kind}
    if kind == "char":
        meta |= {"vocab": "abc éñ\n", "eot": True}
    elif kind == "sentencepiece":
        lines = [sentences(20, i) for i in range(200)] + ["a b c é ñ"] * 20
        meta = tokenizers.train_sentencepiece(lines, 300).meta
    tok = tokenizers.tokenizer(json.loads(json.dumps(meta)))
    text = f"a b{END}c é{END}"
    ids = tok.encode(text)
    assert ids.count(tok.eot) == 2
    assert ids[-1] == tok.eot
    assert max(ids) < tok.n_vocab
    assert tok.decode(ids) == text
    assert tok.start("") == []
    assert tok.start("\n") == ([tok.eot] if kind == "sentencepiece" else tok.encode("\n"))
    if kind != "char":
        assert tok.encode("a\udcff") == tok.encode("a?")  # half a character
        assert tok.eot not in tok.ids(END)
        assert tok.decode(tok.encode("漢 \u0416")) == "漢 \u0416"


def test_the_tokens_of_another_data_set(run, folder, tmp_path, monkeypatch):
    """A text in the tokens of another data set, one document or many."""
    monkeypatch.chdir(tmp_path)
    for kind in ("sentencepiece", "char"):
        prepared(Path(kind), folder, kind)
    Path("other.txt").write_text(TEXTS[0])
    result = run(SCRIPT, "--source=other.txt", "--out_dir=b", "--tokenizer=sentencepiece/")
    done(result, "take it as --dataset=b\n")
    assert tokenizer_of("b").meta == tokenizer_of("sentencepiece").meta
    write_files(Path("zebras"), ["Zebra" * 10] * 4)
    flags = "--source=zebras --out_dir=c --tokenizer=char/ --val_share=0.5".split()
    refused(run(SCRIPT, *flags, "--num_workers=2"), "the text holds 'Z', which the")
    assert [*tmp_path.glob("c/*")] == []
    assert multiprocess.Process.terminate == multiprocess.Process.kill  # a new one loses SIGTERM


# -----------------------------------------------------------------------------
# again, and after errors


@parametrize("where, name, n", [(tokenizers.ByteTokenizer, "ids", 8), (Path, "replace", 2)])
def test_what_breaks_off_is_no_data_set(where, name, n, tmp_path, monkeypatch):
    """After an error in the middle, as on a full disk, the same command gives the same."""
    whole = prepared(tmp_path / "whole", write_files(tmp_path / "books", TEXTS))
    source = write_files(tmp_path / "again", TEXTS)  # nothing of it is in the cache
    f = getattr(where, name)
    calls = itertools.count(1)

    def failing(*args):
        if next(calls) == n:
            raise OSError("No space left on device")
        return f(*args)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
        patch.setattr(where, name, failing)
        prepared(tmp_path / "out", source)
    assert not [*tmp_path.glob("out/meta.json"), *tmp_path.glob("out/*.unfinished")]
    if where is Path:  # all tokens are in the cache
        monkeypatch.setattr(tokenizers.ByteTokenizer, "ids", None)
    assert prepared(tmp_path / "out", source) == whole


def test_what_a_killed_process_has_left_is_removed(tmp_path):
    left = tmp_path / "out" / "tmpabc.unfinished"
    left.mkdir(parents=True)
    (left / "train.bin").write_bytes(b"half")
    os.utime(left, (1, 1))  # long ago: it may be of a process that still runs
    prepared(tmp_path / "out", write_files(tmp_path / "books", TEXTS))
    assert not left.exists()


def test_another_column_file_and_code(tmp_path, monkeypatch):
    """They are read, not what is in the cache."""
    rows = write_rows(tmp_path / "a.parquet", TEXTS, title=TEXTS[::-1])
    for column, texts in (("text", TEXTS), ("title", TEXTS[::-1])):
        val = written(tmp_path / "out", rows, column=column)[1]
        assert val == b"".join(text.encode() + b"\xff" for text in texts[3::4])
    books = write_files(tmp_path / "books", TEXTS[:4])
    prepared(tmp_path / "out", books)
    Path(books, "03.txt").write_text("elahw")
    assert written(tmp_path / "out", books)[1] == b"elahw\xff"
    monkeypatch.setattr(tokenizers.ByteTokenizer, "ids", lambda self, text: np.zeros(2, np.uint8))
    monkeypatch.setattr(prepare, "CODE", "other")
    assert written(tmp_path / "out", books)[1] == b"\0\0\xff"


# -----------------------------------------------------------------------------
# mistakes and bugs


LATIN = "Où est-il ? été".encode("latin-1")
NO_TEXT = {
    "latin.txt": LATIN,
    "broken.parquet": b"PAR1 and no more",
    "notes.pdf": b"%PDF-1.5\n%\xe2\xe3",
    "no.txt": b"",
    "latin.jsonl": b'{"text": "%s"}' % LATIN,
}
MISTAKES = [
    ("", "--source= is no file, no folder, and no owner/name"),
    ("--source=nowhere", "no file, no folder, and no owner/name"),
    ("--source=a.parquet --column=words", "no column 'words', but id, text: give one"),
    (
        "--source=a.parquet --column=id",
        "a.parquet has no texts in 'id', but int64",
    ),
    ("--source=in/no.txt/no.txt", "train.bin would be empty: there is too little text"),
    ("--source=in/latin.txt", "in/latin.txt/latin.txt is not UTF-8 text. If"),
    ("--source=in/broken.parquet", "cannot read"),
    ("--source=in/notes.pdf", "holds no files of these kinds: .parquet, .txt, .jsonl"),
    ("--source=in/latin.jsonl --tokenizer=bytes", "'utf-8' codec can't decode byte"),
    ("--source=a.parquet --tokenizer=bytes --val_share=0.01", "val.bin would be empty: there is"),
    ("--source=a.parquet --tokenizer=sentencepiece --vocab_size=100000", "vocabulary of 100,000"),
    ("--source=a.parquet --tokenizer=words", "'words'; known are char, bytes, gpt2, sentencepiece"),
]


@parametrize("flags, says", MISTAKES)
def test_mistakes(flags, says, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.parquet", TEXTS)
    for name, content in NO_TEXT.items():
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / name).write_bytes(content)
    refused(run(SCRIPT, "--out_dir=out", *flags.split()), says)
    assert [*tmp_path.glob("out/*")] == []
