"""sample.py: its text, its mistakes, and how it streams."""

import os
import runpy
import sys

import pytest
import torch
from harness import ROOT, done, refused

from text.tokenizers import ByteTokenizer
from training.pretrained import SOURCES


@pytest.fixture
def trained(train, tmp_path):
    train("--attention=laser --heads=SSSL --window=4")
    return f"--out_dir={tmp_path / 'out'}", "--device=cpu"


def test_sample(run, trained, tmp_path):
    def sample(*flags):
        return done(run("sample.py", *trained, *flags))

    three = ("--start=the lord", "--num_samples=3", "--max_new_tokens=40")
    out = sample(*three)
    samples = out.partition("\n")[2].split("\n---------------\n")[:-1]
    assert [len(text) for text in samples] == [48, 48, 48]
    assert len(set(samples)) == 3
    assert out == sample(*three)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("noble and citizens, of all the lord speaks: " * 3, "utf-8-sig")
    out = sample(f"--start=FILE:{prompt}", "--num_samples=1", "--stop= ")
    assert " " not in out.partition(prompt.read_text("utf-8-sig"))[2].splitlines()[0]


MISTAKES = {
    "--start=été": "'é'",
    "--start=": "prompt is empty",
    "--start=FILE:/nowhere.txt": "No such file",
    f"--start=FILE:{sys.executable}": "is not UTF-8 text",
    "--start==1+1=": "'+', '1', '='",  # unknown to this vocabulary, but it arrives whole
    "--temperature=-1": "temperature >= 0",
    "--init_from=resum": "'resum' is not one of gpt2",
}


def test_sample_mistakes(run, trained, monkeypatch):
    monkeypatch.delitem(SOURCES, "other", raising=False)  # that another test's import has added
    for flag, says in MISTAKES.items():
        refused(run("sample.py", *trained, flag), says)


SAMPLE = runpy.run_path(os.path.join(ROOT, "sample.py"))


def pieces(text, stop=None):
    """What sample.py shows of a text, piece by piece."""
    ids = map(torch.tensor, text.encode())
    return list(SAMPLE["_text_of"](ids, ByteTokenizer(), stop, [*b"the prompt END"]))


def test_streamed_text_holds_back_halves():
    """Half a UTF-8 character and half a stop text are not shown; the pieces add up to the text."""
    long = "aé€😀b c" * 40  # of a long text only the last tokens are decoded again, for each token
    for text in ("aé€😀b", *(long[:n] for n in range(len(long) - 8, len(long)))):
        assert "".join(pieces(text)) == text
        assert all("\ufffd" not in piece for piece in pieces(text))
    for n in (0, *range(100, 160)):
        text = "é" + n * "x"
        assert "".join(pieces(f"{text}END more", "END")) == text
        assert "".join(pieces(f"{text}EN{text}", "END")) == f"{text}EN{text}"


def test_streamed_text_of_a_tokenizer_that_drops_a_texts_first_space():
    """As SentencePiece does. The last tokens of a long text, decoded alone, lose no space."""

    class Words:
        def decode(self, ids):
            return "".join(f" w{i}" for i in ids)[1:]

    ids = torch.arange(400)
    text = "".join(SAMPLE["_text_of"](ids, Words(), None, [500, 501]))
    assert text == "".join(f" w{i}" for i in range(400))


def test_from_another_working_directory(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = (
        "config/train_shakespeare_char_cpu.py "
        f"--dataset={data} --max_iters=2 --eval_iters=1 --device=cpu --sample_tokens=20 "
        "--out_dir=mine"
    )
    done(run("train.py", *flags.split()), "a sample")
    assert sorted(os.listdir("mine")) == "best.pt ckpt.pt lock lock.txt log.jsonl".split()
