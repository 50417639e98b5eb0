"""text/dataset.py: what a batch is, and the messages for damaged files."""

import hashlib
import itertools
import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from harness import GPT2_FILES, ROOT, write

from text import dataset, tokenizers
from text.dataset import Tokens
from text.tokenizers import CharTokenizer


@pytest.fixture
def broken(data, tmp_path):
    """A copy of the data set, to be damaged."""
    return shutil.copytree(data, tmp_path / "broken")


def test_batch_is_a_function_of_seed_and_step(data):
    tokens = Tokens(data, "train", 16)
    x, y = tokens.batch(3, 8, seed=1)
    assert x.shape == y.shape == (8, 16) and x.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])
    torch.rand(5), np.random.rand(5)
    tokens.batch(4, 8, seed=1)
    assert torch.equal(x, Tokens(data, "train", 16).batch(3, 8, seed=1)[0])
    assert not torch.equal(x, tokens.batch(4, 8, seed=1)[0])
    assert not torch.equal(x, tokens.batch(3, 8, seed=2)[0])


def test_batches_of_different_steps_and_seeds_differ(data):
    """No step repeats another one, and no seed repeats the steps of another seed."""
    tokens = Tokens(data, "train", 16)
    drawn = {(seed, step): tokens.batch(step, 8, seed=seed)[0] for seed in range(4) for step in range(8)}
    for (one, x), (other, z) in itertools.combinations(drawn.items(), 2):
        assert not torch.equal(x, z), f"(seed, step) = {one} and {other} have the same batch"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_one_global_batch(data, world):
    tokens = Tokens(data, "train", 16)
    whole = tokens.batch(5, 8, seed=1)
    parts = [tokens.batch(5, 8, seed=1, rank=r, world=world) for r in range(world)]
    for i in (0, 1):
        assert torch.equal(torch.stack([p[i] for p in parts], 1).flatten(0, 1), whole[i])


def test_windows_reach_both_ends(data):
    n = len(Tokens(data, "val", 8))
    tokens = Tokens(data, "val", n - 2)
    starts = {tokens.batch(step, 4)[0][i, 0].item() for step in range(20) for i in range(4)}
    ends = {tokens.batch(step, 4)[1][i, -1].item() for step in range(20) for i in range(4)}
    assert starts == set(tokens.ids[:2].tolist()) and ends == set(tokens.ids[-2:].tolist())
    assert torch.equal(Tokens(data, "val", n - 1).batch(0, 1)[1][0], torch.from_numpy(tokens.ids[1:].astype(np.int64)))


def test_eval_windows_are_fixed_and_do_not_overlap(data):
    tokens = Tokens(data, "val", 16)
    a = [x for x, _ in tokens.eval_batches(3, 4)]
    b = [x for x, _ in tokens.eval_batches(3, 4)]
    assert [len(x) for x in a] == [4, 4, 4] and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert torch.equal(a[0][0], torch.from_numpy(tokens.ids[:16].astype(np.int64)))
    everything = [x for x, _ in tokens.eval_batches(10**6, 4)]
    assert sum(map(len, everything)) == (len(tokens) - 1) // 16
    ranks = [torch.cat([x for x, _ in tokens.eval_batches(3, 4, rank=r, world=2)]) for r in (0, 1)]
    assert torch.equal(torch.stack(ranks, 1).flatten(0, 1), torch.cat(a))


@pytest.mark.parametrize(("n_vocab", "dtype"), [(2, "uint8"), (256, "uint8"), (257, "uint16"), (65537, "uint32")])
def test_the_smallest_dtype_that_fits(tmp_path, n_vocab, dtype):
    tok = CharTokenizer("".join(map(chr, range(0xE000, 0xE000 + n_vocab))))
    texts = {"train": (tok.vocab[0] + tok.vocab[-1]) * 9, "val": tok.vocab[:2]}
    meta = write(tmp_path, tok, texts, {})
    assert meta["dtype"] == dtype
    assert Tokens(str(tmp_path), "train", 4).ids.max() == n_vocab - 1  # 65536 does not wrap to 0
    assert tokenizers.tokenizer(dataset.read_meta(str(tmp_path))["tokenizer"]).decode([n_vocab - 1]) == tok.vocab[-1]


def test_gpt2_tokenizer(monkeypatch, bpe):
    """GPT-2's own ids, and those of a vocabulary of bytes; without a network a sentence says where its files go."""
    tiktoken = pytest.importorskip("tiktoken")
    tok = tokenizers.tokenizer({"kind": "gpt2"})
    assert tok.encode("Hello world<|endoftext|>") == [15496, 995, 50256] and tok.n_vocab == tokenizers.GPT2_VOCAB_SIZE
    bpe()
    tok = tokenizers.tokenizer({"kind": "gpt2"})
    ids = tok.encode("aé<|endoftext|>")
    assert ids == [97, 0xC3, 0xA9, 256] and tok.decode(ids) == "aé<|endoftext|>" and tok.n_vocab == 257
    assert tok.decode(ids[:2]) == "a\ufffd"

    def offline(*_: str) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(OSError, match="no route.*docs/data.md"):
        tokenizers.tokenizer({"kind": "gpt2"})
    with open(os.path.join(ROOT, "docs", "data.md"), encoding="utf-8") as f:
        text = f.read()
    for url in GPT2_FILES:
        assert f"| {url} | `{hashlib.sha1(url.encode()).hexdigest()}` |" in text
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match="pip install tiktoken"):
        tokenizers.tokenizer({"kind": "gpt2"})


def test_large_files_are_checked_batch_by_batch(broken, monkeypatch):
    monkeypatch.setattr(dataset, "VERIFY_BYTES", 1000)
    flip(broken)
    Tokens(str(broken), "train", 16)  # not read whole
    with open(broken / "train.bin", "r+b") as f:
        f.write(b"\xff")
    with pytest.raises(ValueError, match="id 255, but the vocabulary ends at"):
        next(Tokens(str(broken), "train", 16).eval_batches(1, 1))


def damage_meta(folder: str, **change: object) -> None:
    path = os.path.join(folder, "meta.json")
    with open(path) as f:
        meta = json.load(f)
    with open(path, "w") as f:
        json.dump(meta | change, f)


def flip(folder: str) -> None:
    with open(os.path.join(folder, "train.bin"), "r+b") as f:
        first = f.read(1)[0]
        f.seek(0)
        f.write(bytes([(first + 1) % 5]))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: os.remove(d / "meta.json"), "Run: python"),
        (lambda d: (d / "meta.json").write_text("{"), "meta.json is missing or damaged. Run: python"),
        (lambda d: damage_meta(d, vocab_size=3), "the vocabulary ends at 2"),
    ],
)
def test_damaged_data_is_explained(broken, damage, says):
    damage(broken)
    with pytest.raises(ValueError) as error:
        Tokens(str(broken), "train", 16).batch(0, 1)
    assert says in str(error.value) and str(broken) in str(error.value)


def test_a_split_shorter_than_a_block_names_the_lengths(data):
    n = len(Tokens(data, "val", 16))
    with pytest.raises(ValueError, match=f"{n:,} tokens, but block_size {n} needs at least {n + 1}.*={n - 1}"):
        Tokens(data, "val", n)


def test_an_unknown_data_set_names_the_known(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # data sets are found from any working directory
    assert os.path.isdir(dataset.folder_of("shakespeare_char"))
    with pytest.raises(ValueError, match="there are: .*shakespeare_char"):
        dataset.folder_of("shakespear")
    for name in ("mine", "text"):  # a path, where data/ has none of the name that is prepared
        os.makedirs(tmp_path / name)
        (tmp_path / name / "meta.json").write_text("{}")
        monkeypatch.setattr(dataset, "ROOT", str(tmp_path / "root"))
        os.makedirs(tmp_path / "root" / "data" / "text", exist_ok=True)
        assert dataset.folder_of(name) == str(tmp_path / name)
    (tmp_path / "root" / "data" / "text" / "meta.json").write_text("{}")
    assert dataset.folder_of("text") == str(tmp_path / "root" / "data" / "text")
