"""sample.py: its text, its mistakes, and how it streams."""

import os
import runpy
import sys

import pytest
import torch
from harness import ROOT


@pytest.fixture
def trained(train, tmp_path):
    train("--max_iters=20", "--attention=laser", "--heads=SSSL", "--window=4")
    return f"--out_dir={tmp_path / 'out'}", "--device=cpu"


def test_sample(run, trained, tmp_path):
    code, out, _ = run("sample.py", *trained, "--start=the lord", "--num_samples=3", "--max_new_tokens=40")
    samples = out.split("\n---------------\n")[:-1]
    assert code == 0 and len(samples) == 3 and len(set(samples)) == 3
    assert all(len(s.split("\n", 1)[-1] if i == 0 else s) == 48 for i, s in enumerate(samples))
    assert out == run("sample.py", *trained, "--start=the lord", "--num_samples=3", "--max_new_tokens=40")[1]
    likeliest = ("sample.py", *trained, "--start=t", "--temperature=0", "--num_samples=1")
    assert run(*likeliest, "--seed=1")[1] == run(*likeliest, "--seed=2")[1]
    (tmp_path / "prompt.txt").write_text("noble and citizens, of all the lord speaks: " * 3)
    code, out, _ = run("sample.py", *trained, f"--start=FILE:{tmp_path / 'prompt.txt'}", "--num_samples=1")
    assert code == 0 and "the model sees the last 32" in out
    code, out, _ = run("sample.py", *trained, "--start=the", "--stop= ", "--num_samples=1", "--max_new_tokens=200")
    assert code == 0 and " " not in out.splitlines()[1]


def test_sample_mistakes(run, trained):
    for flag, says in (
        ("--start=été", "'é'"),
        ("--start=", "prompt is empty"),
        ("--start=FILE:/nowhere.txt", "No such file"),
        (f"--start=FILE:{sys.executable}", "codec can't decode"),
        ("--start==1+1=", "'+', '1', '='"),  # unknown to this vocabulary, but it arrives whole
        ("--temperature=-1", "temperature >= 0"),
        ("--top_k=0", "top_k >= 1"),
        ("--out_dir=/nowhere", "no checkpoint /nowhere/ckpt.pt"),
        ("--init_from=resum", "'resum' is not one of gpt2"),
        ("--max_new_tokens=-1", "at least 1"),
    ):
        code, _, err = run("sample.py", *trained, flag)
        assert code == 2 and says in err and "Traceback" not in err, err


def test_streamed_text_holds_back_halves():
    """Half a UTF-8 character and half a stop text are not shown; the pieces add up to the text."""
    text_of = runpy.run_path(os.path.join(ROOT, "sample.py"))["text_of"]

    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    def pieces(text: str, stop: str | None = None) -> list[str]:
        return list(text_of(map(torch.tensor, text.encode()), Bytes(), stop, [*b"the prompt END"]))

    assert "".join(pieces("aé€😀b")) == "aé€😀b" and "\ufffd" not in "".join(pieces("aé€😀b"))
    assert "".join(pieces("one END two", "END")) == "one "
    assert "".join(pieces("one EN two", "END")) == "one EN two"
    assert all("E" not in piece for piece in pieces("one END two", "END"))
    long = "aé€😀b c" * 40  # of a long text only the last tokens are decoded again, for each token
    for n in range(len(long) - 8, len(long)):
        assert "".join(pieces(long[:n])) == long[:n]
    for n in range(100, 160):
        assert "".join(pieces("é" + n * "x" + "END more", "END")) == "é" + n * "x"
        assert "".join(pieces("é" + n * "x" + "EN" + n * "y", "END")) == "é" + n * "x" + "EN" + n * "y"


def test_streamed_text_of_a_tokenizer_that_drops_a_texts_first_space():
    """As SentencePiece does. A long text's last tokens lose no space where they are decoded apart from the others."""
    sample = runpy.run_path(os.path.join(ROOT, "sample.py"))
    words = [f" w{i}" for i in range(1000)]
    lengths = []

    class Words:
        def decode(self, ids: list[int]) -> str:
            lengths.append(len(ids))
            return "".join(words[i] for i in ids)[1:]

    ids = list(range(400))
    pieces = sample["text_of"](map(torch.tensor, ids), Words(), None, [500, 501])
    assert "".join(pieces) == "".join(words[:400])
    assert max(lengths) <= 2 * sample["TAIL"] + 1


def test_from_another_working_directory(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("train.py", "config/train_shakespeare_char_cpu.py", f"--dataset={data}", "--max_iters=2",
                         "--eval_iters=1", "--device=cpu", "--sample_tokens=20", "--out_dir=mine")  # fmt: skip
    assert code == 0 and "a sample" in out and sorted(os.listdir("mine")) == ["best.pt", "ckpt.pt", "log.jsonl"]
    assert run("sample.py", "--out_dir=mine", "--num_samples=1", "--max_new_tokens=5", "--start= ")[0] == 0
