"""sample.py: its text, its mistakes, and how it streams."""

import os
import runpy
import sys

import pytest
import torch
from harness import ROOT, done, refused

from model import GPT
from text import sampling
from text.tokenizers import ByteTokenizer


@pytest.fixture
def trained(train, tmp_path):
    train("--attention=laser --heads=SSSL --window=4")
    return f"--out_dir={tmp_path / 'out'}", "--device=cpu"


def test_sample(run, trained, tmp_path):
    def sample(*flags):
        out = done(run("sample.py", *trained, *flags))
        return out

    three = ("--start=the lord", "--num_samples=3", "--max_new_tokens=40")
    out = sample(*three)
    samples = out.partition("\n")[2].split("\n---------------\n")[:-1]
    assert [len(text) for text in samples] == [48, 48, 48]
    assert len(set(samples)) == 3
    assert out == sample(*three)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("noble and citizens, of all the lord speaks: " * 3)
    out = sample(f"--start=FILE:{prompt}", "--num_samples=1", "--stop= ")
    assert "the model sees the last 32" in out
    assert " " not in out.partition(prompt.read_text())[2].splitlines()[0]


def test_what_each_flag_decides(run, trained, monkeypatch):
    """What text.sampling.stream is called with, under which autocast."""
    calls = []

    def stream(model, ids, n, **settings):
        calls.append((n, settings, torch.get_autocast_dtype("cpu")))
        return []

    monkeypatch.setattr(sampling, "stream", stream)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(GPT, "compile", lambda self: calls.append("compiled"))
    flags = (
        "--num_samples=2 --max_new_tokens=7 --temperature=0.5 --top_k=3 --top_p=0.9 --seed=5 "
        "--no-use_cache --compile --dtype=float16"
    )
    run("sample.py", *trained, *flags.split())
    settings = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "vocab_size": 24}
    settings |= {"use_cache": False, "endless": False}
    expected = [(7, settings | {"seed": seed}, torch.float16) for seed in (5, 6)]
    assert calls == ["compiled", *expected]


MISTAKES = {
    "--start=été": "'é'",
    "--start=": "prompt is empty",
    "--start=FILE:/nowhere.txt": "No such file",
    f"--start=FILE:{sys.executable}": "is no UTF-8 text",
    "--start==1+1=": "'+', '1', '='",  # unknown to this vocabulary, but it arrives whole
    "--temperature=-1": "temperature >= 0",
    "--init_from=resum": "'resum' is not one of gpt2",
    "--max_new_tokens=-1": "at least 1",
}


def test_sample_mistakes(run, trained):
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
    assert all("E" not in piece for piece in pieces("one END two", "END"))
    for n in (0, *range(100, 160)):
        text = "é" + n * "x"
        assert "".join(pieces(f"{text}END more", "END")) == text
        assert "".join(pieces(f"{text}EN{text}", "END")) == f"{text}EN{text}"


def test_streamed_text_of_a_tokenizer_that_drops_a_texts_first_space():
    """As SentencePiece does. The last tokens of a long text, decoded alone, lose no space."""
    lengths = []

    class Words:
        def decode(self, ids):
            lengths.append(len(ids))
            return "".join(f" w{i}" for i in ids)[1:]

    ids = torch.arange(400)
    text = "".join(SAMPLE["_text_of"](ids, Words(), None, [500, 501]))
    assert text == "".join(f" w{i}" for i in range(400))
    assert max(lengths) <= 2 * SAMPLE["TAIL"] + 1


def test_from_another_working_directory(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--max_iters=2 --eval_iters=1 --device=cpu --sample_tokens=20 --out_dir=mine".split()
    config = "config/train_shakespeare_char_cpu.py"
    result = run("train.py", config, f"--dataset={data}", *flags)
    done(result, "a sample")
    assert sorted(os.listdir("mine")) == ["best.pt", "ckpt.pt", "log.jsonl"]
