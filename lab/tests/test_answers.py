"""Fine-tuning on prompts and answers: lab/hub/prepare_answers.py and finetune.py."""

import json

import pytest
import torch
from harness import done, log_of, parametrize, refusal, refused
from torch.nn import functional as F

from lab.hub.prepare_answers import Examples, encode, open_split, prepare, read_examples
from text import dataset, tokenizers
from training import checkpoint

ROWS = [("ab", "cd"), ("a", "d"), ("abcdab", " cda"), ("b", " d")]


@pytest.fixture
def tasks(tmp_path):
    """tasks(tokenizer, rows) -> the folder of a prepared data set of these examples."""

    def tasks(tok, rows=ROWS):
        jsonl(tmp_path / "source", rows)
        prepare(str(tmp_path / "prepared"), str(tmp_path / "source"), tok)
        return str(tmp_path / "prepared")

    return tasks


def jsonl(folder, rows):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows]
    for split in ("train", "val"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines))


def test_only_answers_are_targets(tasks):
    """By hand: y is the next token if it belongs to the answer or is the end of it, else -1."""
    folder = tasks(tokenizers.CharTokenizer("abcd "))  # without a boundary an answer just ends
    x, y = next(Examples(folder, "val", 32).eval_batches(1, 1))
    assert x[0, :3].tolist() == [0, 1, 2]
    assert y[0].tolist() == [-1, 2, 3, *[-1] * 6]

    tok = tokenizers.CharTokenizer("abcd ", eot=True)
    data = open_split(tasks(tok), "val", 32)
    assert data.block_size == 10  # abcdab cda and its end are 11 tokens
    x, y = next(data.eval_batches(1, 4))
    for row, (prompt, answer) in enumerate(ROWS):
        ids = [*tok.encode(prompt + answer), tok.eot]
        n = len(ids) - 1
        before = len(prompt) - 1
        assert x[row, :n].tolist() == ids[:-1]
        assert y[row].tolist() == [-1] * before + ids[before + 1 :] + [-1] * (10 - n)


def test_a_long_prompt_loses_its_beginning_and_a_long_answer_is_refused(tasks):
    folder = tasks(tokenizers.CharTokenizer("abcd ", eot=True))
    x, y = Examples(folder, "val", 6)._windows([2])  # of abcdab cda$: the last 7 tokens
    assert x[0].tolist() == [0, 1, 4, 2, 3, 0]
    assert y[0].tolist() == [-1, 4, 2, 3, 0, 5]
    _, y = Examples(folder, "val", 5)._windows([2])  # the answer, after one token of the prompt
    assert y[0].tolist() == [4, 2, 3, 0, 5]
    with refusal("an answer of val has 5 tokens, more than block_size=4"):
        Examples(folder, "val", 4)


@parametrize(
    "prompt, answer, first",
    [("is ", "Pan", " Pa"), ("a b", "an", "ba"), ("is", " Pa", " Pa")],
)
def test_a_token_across_the_boundary_is_the_answers(bpe, prompt, answer, first):
    bpe(b" P", b" Pa", b"ba", pattern=r" ?\S+|\s+")
    tok = tokenizers.GPT2Tokenizer()
    ids, n = encode(tok, prompt, answer)
    assert tok.decode(ids[n : n + 1]) == first
    assert tok.decode(ids[:-1]) == prompt + answer
    assert ids[-1] == tok.eot


def test_blank_lines_and_a_byte_order_mark_are_no_examples(tmp_path):
    path = tmp_path / "a.jsonl"
    row = '{"prompt": "a", "answer": "b", "choices": []}'
    path.write_bytes(f"\ufeff{row}\r\n\r\n{row}\n\n".encode())
    assert list(read_examples(str(path))) == [("a", "b"), ("a", "b")]


def test_every_example_is_evaluated_and_each_step_draws_others(tasks):
    data = Examples(tasks(tokenizers.CharTokenizer("abcd "), ROWS * 5), "train", 32)
    assert sum(len(x) for x, _ in data.eval_batches(9, 3)) == 20
    assert not data.batch(3, 8, seed=1)[0].equal(data.batch(4, 8, seed=1)[0])


@pytest.fixture
def trained(train, tmp_path):
    done(train("--attention=laser"))
    return str(tmp_path / "out")


def test_fine_tuning(run, trained, tmp_path, monkeypatch):
    """The loss is the mean over the answers' tokens. It falls. The run can be resumed."""
    monkeypatch.setattr(dataset, "Tokens", dataset.Tokens)  # finetune.py changes it
    pairs = [("the lord", " citizens,"), ("the Rome!", " speaks:"), ("the noble", " of")]
    jsonl(tmp_path / "pairs", pairs * 13)
    folder = str(tmp_path / "task")
    init_from = f"--init_from={trained}"
    flags = [f"--source={tmp_path / 'pairs'}", init_from, f"--out_dir={folder}"]
    done(run("lab/hub/prepare_answers.py", *flags), "train.bin: 39 examples, ")

    flags = (
        "--warmup_iters=2 --learning_rate=1e-2 --eval_iters=2 --batch_size=8 --sample_tokens=0 "
        "--max_iters=60 --lr_decay_iters=60 --eval_interval=20 "
        f"--dataset={folder} --out_dir={tmp_path / 'tuned'}"
    ).split()
    result = run("lab/hub/finetune.py", "lab/hub/finetune_task.py", init_from, *flags)
    assert "other tokens" not in done(result, "all of its weights carry over")
    rows = log_of(tmp_path, "tuned")
    val_losses = [row["val_loss"] for row in rows if "val_loss" in row]
    assert val_losses[-1] < 0.3 * val_losses[0]

    model = checkpoint.model_of(checkpoint.load(f"{trained}/best.pt")).eval()
    losses = []
    for x, y in Examples(folder, "val", 32).eval_batches(2, 8):
        logits = model(x, x)[0]
        losses.append(F.cross_entropy(logits[y >= 0], y[y >= 0], reduction="none"))
    assert val_losses[0] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-4)

    flags += ["--init_from=resume", "--max_iters=65"]
    done(run("lab/hub/finetune.py", *flags), "going on from")


MISTAKES = {
    b"": "holds no examples",
    b'{"prompt": "the", "answer": " lord"}\nnonsense\n': "train.jsonl, line 2: a line must be",
    b'{"prompt": "the"}\n': "(KeyError: 'answer')",
    b'{"prompt": "the", "answer": 3}\n': "must be text",
    b'{"prompt": "the", "answer": "\\ud800"}\n': "surrogates not allowed",
    b'{"prompt": "the", "answer": "\xe4"}\n': "is not UTF-8 text",
    b'{"prompt": "the", "answer": " \xe2\x82\xac"}\n': "'€', which the",
}


def test_a_users_mistakes_are_sentences(run, trained, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    task = tmp_path / "task"

    def mistake(says, *flags):
        refused(run("lab/hub/prepare_answers.py", *flags), says)
        assert not task.exists()

    flags = [f"--source={source}", f"--init_from={trained}", f"--out_dir={task}"]
    mistake("must be a folder with train.jsonl and val.jsonl", *flags)
    mistake("--source= says which", *flags[1:])
    mistake("is no folder of a run", "--source=x", "--init_from=owner/name")
    for lines, says in MISTAKES.items():
        for split in ("train", "val"):
            (source / f"{split}.jsonl").write_bytes(lines)
        mistake(says, *flags)
