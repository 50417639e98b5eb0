"""text/prepare.py: every source gives the same tokens, in any number of processes and after any error."""

import csv
import hashlib
import json
import os
import random
import shutil

import numpy as np
import pytest
from harness import ROOT

from text import dataset, prepare, tokenizers
from text.dataset import Tokens
from text.tokenizers import END

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

SCRIPT = "data/text/prepare.py"


def sentences(n: int, seed: int) -> str:
    """Text with runs of spaces, empty lines, long lines, letters of other alphabets and no end of line at its end."""
    rng = random.Random(seed)
    words = ["the", "whale", "sea", "Überall", "καὶ", "don't", "1851", "ship's", "—", "naïve", "漢字", "x" * 40, "..."]
    ends = [" ", " ", " ", " ", "  ", "\n", "\n\n", "\n  ", "\t", ", ", "\u00a0", " \n"]
    return "".join(rng.choice(words) + rng.choice(ends) for _ in range(n))


TEXTS = [sentences(n, n) for n in (3000, 7, 900, 5000, 1, 40, 2000, 1200, 11, 600, 4000, 30)]


def write_files(folder: object, texts: list[str]) -> str:
    os.makedirs(folder)
    for i, text in enumerate(texts):
        with open(os.path.join(folder, f"{i:02d}.txt"), "w", encoding="utf-8") as f:
            f.write(text)
    return str(folder)


def write_parquet(path: object, texts: list) -> str:
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), str(path), row_group_size=2)
    return str(path)


def write_lines(path: object, texts: list[str], column: str = "text") -> str:
    with open(path, "w") as f:
        f.writelines(json.dumps({column: text}) + "\n" for text in texts)
    return str(path)


def write_csv(path: object, texts: list[str]) -> str:
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f).writerows([["id", "text"], *enumerate(texts)])
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder of the texts as users have them, some with \\r\\n and some with a BOM."""
    folder = tmp_path_factory.mktemp("books")
    for i, text in enumerate(TEXTS):
        start = b"\xef\xbb\xbf" if i % 3 == 0 else b""
        (folder / f"{i:02d}.txt").write_bytes(start + text.replace("\n", "\r\n" if i % 2 else "\n").encode())
    return str(folder)


def prepared(out: object, source: str, kind: str = "bytes", **kwargs: object) -> dict[str, str]:
    """The sha256 of each .bin file that a call of prepare.run writes; meta.json has them too."""
    prepare.run(str(out), source, kind, **{"val_share": 0.25, "num_workers": 1, "vocab_size": 300} | kwargs)
    names = [name for name in sorted(os.listdir(out)) if name.endswith(".bin")]
    made = {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}
    files = dataset.read_meta(str(out))["files"]
    assert sorted(os.listdir(out)) == ["meta.json", *names]
    assert made == {name: files[name]["sha256"] for name in names}
    return made


def written(out: object, split: str) -> bytes:
    """The text of a split in bytes, with 255 at the end of each document."""
    return bytes(Tokens(str(out), split, 0).ids)


# -----------------------------------------------------------------------------
# the same tokens


@pytest.mark.parametrize("kind", tokenizers.TOKENIZER)
def test_every_kind_of_file_and_number_of_processes(kind, folder, tmp_path, monkeypatch):
    """They give the tokens of the whole texts, for which small pieces stand here for those of 2^14 characters."""
    monkeypatch.setattr(prepare.pieces, "__defaults__", (64,))
    raw = [open(os.path.join(folder, name), encoding="utf-8", newline="").read() for name in sorted(os.listdir(folder))]
    (tmp_path / "rows").mkdir()
    for i in range(3):
        write_parquet(tmp_path / "rows" / f"train-{i}.parquet", raw[4 * i : 4 * i + 4])
    sources = [(folder, 1), (folder, 3), (str(tmp_path / "rows"), 2)]
    if kind == "bytes":
        sources += [(write_lines(tmp_path / "a.jsonl", raw), 1), (write_csv(tmp_path / "a.csv", TEXTS), 2)]
    made = [prepared(tmp_path / f"{i}", source, kind, num_workers=n) for i, (source, n) in enumerate(sources)]
    assert set(made[0]) == {"train.bin", "val.bin"} and made == [made[0]] * len(made)

    meta = dataset.read_meta(str(tmp_path / "0"))
    tok = tokenizers.tokenizer(meta["tokenizer"])
    for split, wanted in (("val", TEXTS[3::4]), ("train", [t for i, t in enumerate(TEXTS) if i % 4 != 3])):
        ids = Tokens(str(tmp_path / "0"), split, 8).ids
        assert ids.tolist() == [i for text in wanted for i in [*tok.ids(text), tok.eot]]
        entry = meta["files"][f"{split}.bin"]
        assert entry["documents"] == len(wanted) and entry["tokens"] == len(ids)
        assert entry["bytes"] == sum(len(text.encode()) for text in wanted)
        assert entry["words"] == sum(len(text.split()) for text in wanted)
        if kind != "sentencepiece":  # which normalises
            assert tok.decode(ids) == "".join(text + END for text in wanted)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_document_and_several_from_every_kind_of_source(n, tmp_path):
    """One document is cut as in nanoGPT; of several every 1/val_share-th is val, and a boundary follows each."""
    sources = [write_files(tmp_path / "txt", TEXTS[:n]), write_parquet(tmp_path / "a.parquet", TEXTS[:n])]
    sources += [write_lines(tmp_path / "a.jsonl", TEXTS[:n])]
    sources += [str(tmp_path / "txt" / "00.txt")] if n == 1 else []
    made = [prepared(tmp_path / f"out{i}", source, val_share=0.5) for i, source in enumerate(sources)]
    assert made == [made[0]] * len(made)
    halves = [TEXTS[0][: len(TEXTS[0]) // 2], TEXTS[0][len(TEXTS[0]) // 2 :]]
    ended = [text.encode() + b"\xff" for text in TEXTS[:n]]
    wanted = [text.encode() for text in halves] if n == 1 else [b"".join(ended[::2]), ended[1]]
    assert [written(tmp_path / "out0", split) for split in ("train", "val")] == wanted
    if n == 3:
        with pytest.raises(ValueError, match="no document for train or for val: the number of documents is 3"):
            prepared(tmp_path / "none", sources[0], val_share=0.1)


def test_shakespeare_is_nanogpts(run, tmp_path):
    text = open(os.path.join(ROOT, "data", "shakespeare_char", "input.txt"), encoding="utf-8").read()
    assert hashlib.sha256(text.encode()).hexdigest().startswith("86c4e6aa9db7c042")
    n = int(len(text) * 0.9)
    for script, kind, lengths in (
        ("shakespeare_char", "char", (1003854, 111540)),
        ("shakespeare", "gpt2", (301966, 36059)),
    ):
        code, out, err = run(f"data/{script}/prepare.py", f"--out_dir={tmp_path / kind}")
        assert code == 0 and f"train has {lengths[0]:,} tokens" in out, err
        splits = [Tokens(str(tmp_path / kind), split, 8) for split in ("train", "val")]
        tok = tokenizers.tokenizer(splits[0].meta["tokenizer"])
        assert tuple(map(len, splits)) == lengths and [tok.decode(s.ids) for s in splits] == [text[:n], text[n:]]
        assert "nothing to do" in run(f"data/{script}/prepare.py", f"--out_dir={tmp_path / kind}")[1]
    chars = "".join(sorted(set(text)))
    assert Tokens(str(tmp_path / "char"), "train", 8).ids[:1000].tolist() == [chars.index(c) for c in text[:1000]]


def test_the_first_use_prepares_shakespeare(tmp_path, monkeypatch, capfd):
    for name in ("text", "errors.py", "configurator.py"):
        os.symlink(os.path.join(ROOT, name), tmp_path / name)
    there = tmp_path / "data" / "shakespeare_char"
    os.makedirs(there)
    (tmp_path / "datasets.py").write_text("raise RuntimeError('its import takes seconds')")
    for name in ("prepare.py", "input.txt"):
        shutil.copy(os.path.join(ROOT, "data", "shakespeare_char", name), there)
    monkeypatch.setattr(dataset, "ROOT", str(tmp_path))
    dataset.prepare_shakespeare("shakespeare_char")
    assert "is not prepared yet: running" in capfd.readouterr().out
    assert len(Tokens(str(there), "train", 8)) == 1003854
    dataset.prepare_shakespeare("shakespeare_char")
    assert capfd.readouterr().out == ""


# -----------------------------------------------------------------------------
# splits, licences, vocabularies


def test_the_sources_own_splits(tmp_path):
    for name, part in (("train", TEXTS[:3]), ("validation", TEXTS[3:4]), ("test", TEXTS[4:])):
        write_files(tmp_path / "books" / name, part)
    assert set(prepared(tmp_path / "out", str(tmp_path / "books"))) == {"train.bin", "val.bin", "test.bin"}
    assert dataset.read_meta(str(tmp_path / "out"))["files"]["test.bin"]["documents"] == len(TEXTS) - 4
    assert written(tmp_path / "out", "val") == TEXTS[3].encode() + b"\xff"


def test_rows_without_text_are_empty_documents(tmp_path):
    source = write_parquet(tmp_path / "a.parquet", [TEXTS[0], None, "", "\ufeffa\rb\r\nc"])
    prepared(tmp_path / "out", source, val_share=0.5)
    assert written(tmp_path / "out", "train") == TEXTS[0].encode() + b"\xff\xff"
    assert written(tmp_path / "out", "val") == b"\xffa\nb\nc\xff"


def test_gutenberg(tmp_path):
    """Licences are cut, also out of a single document before the last tenth of it becomes val."""
    mark, story = "*** {} OF THIS PROJECT GUTENBERG EBOOK EMMA ***\n", "She was clever.\n" * 2000
    header = "The Project Gutenberg EBook of Emma\n\n" + mark.format("START") + "\n\n"
    licence = "End of the Project Gutenberg EBook of Emma\n\n" + mark.format("END") + "law " * 9999
    books = [header + story + licence, "*** START is no header\n" + story]
    prepared(tmp_path / "two", write_files(tmp_path / "books", books), gutenberg=True, val_share=0.5)
    assert written(tmp_path / "two", "train") == story.encode() + b"\xff"
    assert written(tmp_path / "two", "val") == books[1].encode() + b"\xff"
    for name in ("books/00.txt", "a.parquet"):
        write_parquet(tmp_path / "a.parquet", books[:1])
        prepared(tmp_path / "one", str(tmp_path / name), gutenberg=True, val_share=0.1)
        n = int(len(story) * 0.9)
        assert [written(tmp_path / "one", split).decode() for split in ("train", "val")] == [story[:n], story[n:]]


def test_a_vocabulary_is_made_of_the_train_split_alone(folder, tmp_path, monkeypatch):
    """A changed val split leaves it as it was; of few documents each gives an equal share, however it is stored."""
    monkeypatch.setattr(prepare, "SAMPLE", 40000)
    monkeypatch.setattr(prepare, "PER_DOCUMENT", 100)
    texts = TEXTS[:3] + ["quite another text. " * 500] + TEXTS[4:]
    sources = [folder, write_lines(tmp_path / "a.jsonl", TEXTS), write_files(tmp_path / "books", texts)]
    made = [prepared(tmp_path / f"{i}", source, "sentencepiece") for i, source in enumerate(sources)]
    assert made[0] == made[1] and made[0]["train.bin"] == made[2]["train.bin"] and made[0] != made[2]
    metas = [dataset.read_meta(str(tmp_path / f"{i}"))["tokenizer"] for i in range(3)]
    assert metas == [metas[0]] * 3
    (tmp_path / "a.txt").write_text(sentences(3000, 1) + " zyxwvut" * 500, encoding="utf-8")
    prepared(tmp_path / "half", str(tmp_path / "a.txt"), "sentencepiece", val_share=0.5)
    tok = tokenizers.tokenizer(dataset.read_meta(str(tmp_path / "half"))["tokenizer"])
    assert len(tok.encode("zyxwvut")) > 3  # no piece of its own: it is in val alone


def test_the_tokenizers():
    """encode and decode are inverse. In a prompt END is the boundary of documents; in a corpus it is text."""
    lines = [sentences(20, i) for i in range(200)] + ["a b c é ñ"] * 20
    made = {"char": {"vocab": "abc éñ\n", "eot": True}}
    made["sentencepiece"] = {"model": tokenizers.train_sentencepiece(iter(lines), 300).meta["model"]}
    for kind in tokenizers.TOKENIZER:
        tok = tokenizers.tokenizer({"kind": kind} | made.get(kind, {}))
        ids = tok.encode(f"a b{END}c é{END}")
        assert ids.count(tok.eot) == 2 and ids[-1] == tok.eot == max(ids) or kind == "sentencepiece"
        assert tok.decode(ids) == f"a b{END}c é{END}" and max(ids) < tok.n_vocab
        assert tokenizers.tokenizer(json.loads(json.dumps(tok.meta))).encode("c é") == tok.encode("c é")
        assert kind == "char" or tok.encode("a\udcff") == tok.encode("a?")  # half a character
        assert tok.eot not in (tok.ids(END).tolist() if kind != "char" else [])
        assert tok.start("") == [] and tok.start("\n") == ([tok.eot] if kind == "sentencepiece" else tok.encode("\n"))
    assert tok.decode(tok.encode("漢 \u0416")) == "漢 \u0416"  # bytes, where SentencePiece has no piece


def test_the_tokens_of_another_data_set(run, folder, tmp_path, monkeypatch):
    """A text in the tokens of another data set, one document or many; a missing character is named."""
    for kind in ("sentencepiece", "char"):
        prepared(tmp_path / kind, folder, kind)
    (tmp_path / "other.txt").write_text(TEXTS[0])
    monkeypatch.chdir(tmp_path)
    code, out, err = run(SCRIPT, "--source=other.txt", f"--out_dir={tmp_path / 'b'}", "--tokenizer=sentencepiece/")
    next_line = f"train.py config/train_shakespeare_char_cpu.py --dataset={tmp_path / 'b'} --out_dir=out-b\n"
    assert code == 0 and next_line in out, err
    a, b = (dataset.read_meta(str(tmp_path / name)) for name in ("sentencepiece", "b"))
    assert a["tokenizer"] == b["tokenizer"]
    ids = np.concatenate([Tokens(str(tmp_path / "b"), split, 8).ids for split in ("train", "val")])
    whole = tokenizers.tokenizer(a["tokenizer"]).ids(TEXTS[0]).tolist()
    assert len(ids) == pytest.approx(len(whole), abs=2) and ids[:100].tolist() == whole[:100]
    write_files("zebras", ["Zebra" * 10] * 4)
    flags = ("--source=zebras", f"--out_dir={tmp_path / 'c'}", "--tokenizer=char/", "--val_share=0.5")
    for workers in (1, 2):  # here and in other processes
        code, _, err = run(SCRIPT, *flags, f"--num_workers={workers}")
        assert code == 2 and "the text holds 'Z', which the" in err and "Traceback" not in err
    assert not os.path.exists(tmp_path / "c")


# -----------------------------------------------------------------------------
# again, and after errors


@pytest.mark.parametrize(("where", "name", "n"), [(tokenizers.ByteTokenizer, "ids", 8), (os, "replace", 2)])
def test_what_breaks_off_is_no_data_set(where, name, n, tmp_path, monkeypatch):
    """After an error in the middle, as on a full disk, the same command gives the same."""
    whole = prepared(tmp_path / "whole", write_files(tmp_path / "books", TEXTS))
    source, f, calls = write_files(tmp_path / "again", TEXTS), getattr(where, name), []  # nothing of it is in the cache

    def failing(*args: object) -> object:
        calls.append(args)
        if len(calls) == n:
            raise OSError("No space left on device")
        return f(*args)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
        patch.setattr(where, name, failing)
        prepared(tmp_path / "out", source)
    assert not [*tmp_path.glob("out/meta.json"), *tmp_path.glob("out/*.tmp")]
    if where is os:  # all tokens are in the cache
        monkeypatch.setattr(tokenizers.ByteTokenizer, "ids", None)
    assert prepared(tmp_path / "out", source) == whole


def test_again_there_is_nothing_to_do(tmp_path, capsys):
    """Another flag, a changed source and a damaged file make it anew."""
    parquet.write_table(pyarrow.table({"text": TEXTS, "title": TEXTS[::-1]}), str(tmp_path / "a.parquet"))
    source, out = str(tmp_path / "a.parquet"), tmp_path / "out"

    def again(source: str = source, **kwargs: object) -> bool:
        capsys.readouterr()
        prepared(out, source, **kwargs)
        return "nothing to do" in capsys.readouterr().out

    assert [again(column=column) for column in ("text", "text", "title")] == [False, True, False]
    assert [again(), again(), again(val_share=0.5), again(), again(kind="char")] == [False, True, False, False, False]
    again()
    os.truncate(out / "val.bin", 5)
    assert [again(), again()] == [False, True]
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    assert [again(lines), again(lines)] == [False, True]
    write_lines(lines, [text.replace("whale", "elahw") for text in TEXTS])
    assert not again(lines) and b"elahw" in written(out, "train")
    file = write_files(tmp_path / "books", TEXTS[:1]) + "/00.txt"
    assert [again(file), again(file)] == [False, True]


# -----------------------------------------------------------------------------
# mistakes and bugs


NO_TEXT = {
    "empty.txt": (b"", "empty.txt is empty"),
    "program.txt": (b"\x7fELF\xff\xfe\x80", "program.txt is not UTF-8 text"),
    "latin.txt": ("Où est-il ? été".encode("latin-1"), "iconv -f LATIN1 -t UTF-8"),
    "broken.parquet": (b"PAR1 and no more", "cannot read"),
    "notes.pdf": (b"%PDF-1.5", "holds no files of these kinds: .parquet, .txt, .jsonl"),
    "a.jsonl": (b'{"text": "a"}\n{"story": "b"}\n{', "cannot read"),
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_named(name, run, tmp_path):
    content, says = NO_TEXT[name]
    source = write_files(tmp_path / "in", TEXTS[:2] if name.endswith(".txt") else [])
    (tmp_path / "in" / name).write_bytes(content)
    code, _, err = run(SCRIPT, f"--source={source}", f"--out_dir={tmp_path / 'out'}", "--val_share=0.5")
    assert code == 2 and says in err and "Traceback" not in err, err
    assert not os.path.exists(tmp_path / "out") or os.listdir(tmp_path / "out") == []


def test_mistakes(run, tmp_path, folder):
    rows = write_parquet(tmp_path / "a.parquet", TEXTS)
    for name, content in (("blank.txt", " \n" * 100), ("no.txt", "")):
        (tmp_path / name).write_text(content)
    for flags, says in (
        ((), "--source= says which text"),
        (("--source=nowhere",), "no file, no folder, and no owner/name"),
        ((f"--source={rows}", "--column=story"), "no column 'story', but id, text: give one as --column="),
        ((f"--source={rows}", "--column=id"), "the column 'id' holds int64, not text"),
        ((f"--source={tmp_path / 'no.txt'}",), "too little text: train.bin would be empty"),
        ((f"--source={tmp_path / 'blank.txt'}", "--tokenizer=sentencepiece"), "it holds no words"),
        ((f"--source={folder}", "--val_share=0.01"), "no document for train or for val: the number of documents is 12"),
        ((f"--source={folder}", "--val_share=0"), "between 0 and 1"),
        ((f"--source={folder}", "--num_workers=0"), "must be at least 1"),
        ((f"--source={folder}", "--tokenizer=sentencepiece", "--vocab_size=100000"), "no vocabulary of 100,000"),
        ((f"--source={folder}", "--tokenizer=words"), "not one of char, bytes, gpt2, sentencepiece, and no prepared"),
    ):
        code, _, err = run(SCRIPT, f"--out_dir={tmp_path / 'out'}", *flags)
        assert code == 2 and says in err and "Traceback" not in err, (flags, err)
        assert not os.path.exists(tmp_path / "out") or os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("where", "name", "flags"),
    [
        (prepare, "_clean", ["--tokenizer=bytes", "--num_workers=1"]),
        (tokenizers.ByteTokenizer, "ids", ["--tokenizer=bytes", "--num_workers=2"]),  # in another process
        (prepare, "_sample", ["--tokenizer=sentencepiece"]),  # read by SentencePiece
        (prepare, "_text_of", ["--tokenizer=bytes"]),
    ],
)
def test_a_bug_keeps_its_traceback(run, monkeypatch, tmp_path, folder, where, name, flags):
    """A bug is no mistake of the user's: Python's own error comes out, also through `datasets`."""

    def bug(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(prepare, "CODE", name)  # what is cached is void
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(KeyError, match="a bug"):
        run(SCRIPT, f"--source={folder}", f"--out_dir={tmp_path / 'out'}", *flags)
