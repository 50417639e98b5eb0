"""Fine-tuning on prompts and answers: lab/hub/prepare_answers.py and finetune.py."""

import json
import os
import random

import pytest
import torch
from torch.nn import functional as F

from lab.hub.prepare_answers import Examples, encode, open_split, prepare, read_examples
from text import dataset, tokenizers
from training import checkpoint

ROWS = [("ab", "cd"), ("a", "d"), ("abcdab", " cda"), ("b", " d")]


@pytest.fixture
def tasks(tmp_path):
    """tasks(tokenizer, rows) -> the folder of a prepared data set of these examples."""

    def tasks(tok: tokenizers.Tokenizer, rows: list = ROWS) -> str:
        jsonl(tmp_path / "source", rows)
        prepare(str(tmp_path / "prepared"), str(tmp_path / "source"), tok)
        return str(tmp_path / "prepared")

    return tasks


def jsonl(folder, rows: list) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "answer": answer, "choices": []}) for prompt, answer in rows]
    for split in ("train", "val"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def test_only_answers_are_targets(tasks):
    """By hand: y is the next token where that belongs to the answer (or is the end of it), else -1."""
    tok = tokenizers.CharTokenizer("abcd ", eot=True)
    x, y = next(Examples(tasks(tokenizers.CharTokenizer("abcd ")), "val", 32).eval_batches(1, 1))
    assert x[0, :3].tolist() == [0, 1, 2] and y[0].tolist() == [-1, 2, 3, *[-1] * 6]  # without a boundary it just ends
    data = open_split(tasks(tok), "val", 32)
    assert isinstance(data, Examples) and data.block_size == 10  # abcdab cda and its end are 11 tokens
    x, y = data.eval_batches(1, 4).__next__()
    for row, (prompt, answer) in enumerate(ROWS):
        text = [*tok.encode(prompt + answer), tok.eot]
        n = len(text) - 1
        assert x[row, :n].tolist() == text[:-1]
        before = len(prompt) - 1
        assert y[row].tolist() == [-1] * before + text[before + 1 :] + [-1] * (10 - n)


def test_a_long_prompt_loses_its_beginning_and_a_long_answer_is_refused(tasks):
    folder = tasks(tokenizers.CharTokenizer("abcd ", eot=True))
    x, y = Examples(folder, "val", 6)._windows([2])  # of abcdab cda$: the last 7 tokens
    assert x[0].tolist() == [0, 1, 4, 2, 3, 0][:6] and y[0].tolist() == [-1, 4, 2, 3, 0, 5]
    x, y = Examples(folder, "val", 5)._windows([2])  # just the answer is left, after one token of the prompt
    assert y[0].tolist() == [4, 2, 3, 0, 5]
    with pytest.raises(ValueError, match="an answer of val has 5 tokens, more than block_size=4"):
        Examples(folder, "val", 4)


def test_a_token_across_the_boundary_is_the_answers(bpe):
    bpe(b" P", b" Pa", b"ba", pattern=r" ?\S+|\s+")
    tok = tokenizers.GPT2Tokenizer()
    for prompt, answer, first in (("is ", "Pan", " Pa"), ("a b", "an", "ba"), ("is", " Pa", " Pa")):
        ids, n = encode(tok, prompt, answer)
        assert tok.decode(ids[n : n + 1]) == first
        assert tok.decode(ids[:n]) + tok.decode(ids[n:-1]) == prompt + answer and ids[-1] == tok.eot


def test_blank_lines_and_a_byte_order_mark_are_no_examples(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"prompt": "a", "answer": "b"}\r\n\r\n{"prompt": "c", "answer": "d"}\n\n'.encode())
    assert list(read_examples(str(path))) == [("a", "b"), ("c", "d")]


def test_batches_are_drawn_as_those_of_running_text(tasks):
    data = Examples(tasks(tokenizers.CharTokenizer("abcd "), ROWS * 5), "train", 32)
    whole = data.batch(3, 8, seed=1)
    assert whole[0].equal(data.batch(3, 8, seed=1)[0]) and not whole[0].equal(data.batch(4, 8, seed=1)[0])
    parts = [data.batch(3, 8, seed=1, rank=r, world=2) for r in (0, 1)]
    assert torch.stack([p[1] for p in parts], 1).flatten(0, 1).equal(whole[1])
    batches = [list(data.eval_batches(3, 3, rank=r, world=2)) for r in (0, 1)]
    assert len(batches[0]) == len(batches[1]) and sum(len(x) for own in batches for x, _ in own) == 9


@pytest.fixture
def trained(train, tmp_path) -> str:
    code, _, err = train("--attention=laser")
    assert code == 0, err
    return str(tmp_path / "out")


def test_fine_tuning(run, trained, tmp_path, monkeypatch):
    """The loss is the mean over the answers' tokens; it falls; the run can be resumed."""
    monkeypatch.setattr(dataset, "Tokens", dataset.Tokens)  # finetune.py changes it, for its own process
    rng = random.Random(0)
    words = {"lord": "citizens,", "Rome!": "speaks:", "noble": "of"}
    jsonl(tmp_path / "pairs", [(f"the {word}", f" {words[word]}") for word in rng.choices(list(words), k=40)])
    to, tuned = str(tmp_path / "task"), tmp_path / "tuned"
    flags = [f"--source={tmp_path / 'pairs'}", f"--init_from={trained}", f"--out_dir={to}"]
    code, out, err = run("lab/hub/prepare_answers.py", *flags)
    assert code == 0 and "train.bin: 40 examples, " in out, err
    flags = ["--warmup_iters=2", "--learning_rate=1e-2", "--eval_iters=2", "--batch_size=8", "--sample_tokens=0"]
    flags += [f"--dataset={to}", f"--out_dir={tuned}", "--max_iters=60", "--lr_decay_iters=60", "--eval_interval=20"]
    code, out, err = run("lab/hub/finetune.py", "lab/hub/finetune_task.py", f"--init_from={trained}", *flags)
    assert code == 0 and "all of its weights carry over" in out and "other tokens" not in out, err
    vals = [row["val_loss"] for row in map(json.loads, open(tuned / "log.jsonl")) if "val_loss" in row]
    assert vals[-1] < 0.3 * vals[0]

    model = checkpoint.model_of(checkpoint.load(os.path.join(trained, "best.pt"))).eval()
    losses = []
    for x, y in Examples(to, "val", 32).eval_batches(2, 8):
        logits = model(x, x)[0]
        losses.append(F.cross_entropy(logits[y >= 0], y[y >= 0], reduction="none"))
    assert vals[0] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)

    code, out, err = run("lab/hub/finetune.py", "--init_from=resume", *flags, "--max_iters=65")
    assert code == 0 and "going on from" in out, err


MISTAKES = {
    "": "holds no examples",
    '{"prompt": "the", "answer": " lord"}\nnonsense\n': "train.jsonl, line 2: a line must be",
    '{"prompt": "the"}\n': "(KeyError: 'answer')",
    '{"prompt": "the", "answer": 3}\n': "must be text",
    '{"prompt": "the", "answer": ""}\n': "not empty",
    "[1]\n": "line 1",
    '{"prompt": "the", "answer": "\\ud800"}\n': "surrogates not allowed",
    b'{"prompt": "the", "answer": "\xe4"}\n': "is not UTF-8 text",
    '{"prompt": "the", "answer": " €"}\n': "'€', which the",
}


def test_a_users_mistakes_are_sentences(run, trained, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    flags = [f"--source={source}", f"--init_from={trained}", f"--out_dir={tmp_path / 'task'}"]
    for few, says in (
        (flags, "must be a folder with train.jsonl and val.jsonl"),
        (flags[1:], "--source= says which"),
        (["--source=x", "--init_from=owner/name"], "is no folder of a run"),
    ):
        code, _, err = run("lab/hub/prepare_answers.py", *few)
        assert code == 2 and says in err
    for lines, says in MISTAKES.items():
        for split in ("train", "val"):
            (source / f"{split}.jsonl").write_bytes(lines if isinstance(lines, bytes) else lines.encode())
        code, _, err = run("lab/hub/prepare_answers.py", *flags)
        assert code == 2 and says in err and not os.path.exists(tmp_path / "task" / "meta.json")
