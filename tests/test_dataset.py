"""text/dataset.py: what a batch is, and the messages for damaged files."""

import itertools
import shutil

import numpy as np
import pytest
import torch
from harness import parametrize, refusal, write

from text import dataset, tokenizers
from text.dataset import Tokens
from text.tokenizers import CharTokenizer


@pytest.fixture
def broken(data, tmp_path):
    """A copy of the data set, to be damaged."""
    return shutil.copytree(data, tmp_path / "broken")


def test_batch_is_a_function_of_seed_and_step(data):
    """And of nothing else. No step repeats another one, and no seed the steps of another seed."""
    tokens = Tokens(data, "train", 16)
    drawn = {}
    for seed, step in itertools.product(range(4), range(8)):
        x, y = tokens.batch(step, 8, seed=seed)
        assert x.shape == y.shape == (8, 16)
        assert torch.equal(x[:, 1:], y[:, :-1])
        drawn[seed, step] = x.numpy().tobytes()
    assert len({*drawn.values()}) == len(drawn)
    torch.rand(5)
    np.random.rand(5)
    again = Tokens(data, "train", 16)
    for (seed, step), x in drawn.items():
        assert again.batch(step, 8, seed=seed)[0].numpy().tobytes() == x


def test_ranks_share_one_global_batch(data):
    tokens = Tokens(data, "train", 16)
    whole = torch.stack(tokens.batch(5, 8, seed=1))
    for world in (2, 4):
        for rank in range(world):
            part = tokens.batch(5, 8, seed=1, rank=rank, world=world)
            assert torch.equal(torch.stack(part), whole[:, rank::world])


def test_windows_reach_both_ends(data):
    ids = Tokens(data, "val", 8).ids.tolist()
    x, y = Tokens(data, "val", len(ids) - 2).batch(0, 40)
    windows = torch.cat((x, y[:, -1:]), 1).tolist()
    assert {*map(tuple, windows)} == {tuple(ids[:-1]), tuple(ids[1:])}


def test_eval_windows_are_fixed_and_do_not_overlap(data):
    tokens = Tokens(data, "val", 16)
    whole = windows(tokens, 3)
    assert [len(x) for x, _ in tokens.eval_batches(3, 4)] == [4, 4, 4]
    assert torch.equal(whole, windows(tokens, 3))
    assert whole[0].tolist() == tokens.ids[:16].tolist()
    assert len(windows(tokens, 10**6)) == (len(tokens) - 1) // 16
    for rank in (0, 1):
        assert torch.equal(windows(tokens, 3, rank=rank, world=2), whole[rank::2])


def windows(tokens, n, **share):
    return torch.cat([x for x, _ in tokens.eval_batches(n, 4, **share)])


def test_a_rank_without_rows_has_nothing_to_predict(data):
    """5 windows in batches of 1 for 2 ranks: the last batch of rank 1 is empty."""
    batches = list(Tokens(data, "val", 16).eval_batches(5, 1, rank=1, world=2))
    assert [(y >= 0).all().item() for _, y in batches] == [True, True, False]
    _, y = batches[-1]
    assert y.tolist() == [[-1] * 16]


def test_the_smallest_dtype_that_fits(tmp_path):
    for n_vocab, dtype in ((256, "uint8"), (257, "uint16"), (65537, "uint32")):
        tok = CharTokenizer("".join(map(chr, range(0xE000, 0xE000 + n_vocab))))
        texts = {"train": tok.vocab[-9:], "val": tok.vocab[:2]}
        assert write(tmp_path, tok, texts, {})["dtype"] == dtype
        ids = Tokens(tmp_path, "train", 4).ids
        assert ids.max() == n_vocab - 1  # 65536 does not wrap to 0
        assert tok.decode(ids) == tok.vocab[-9:]


def test_gpt2_tokenizer(monkeypatch):
    """GPT-2's own ids, and the sentence without a network."""
    tiktoken = pytest.importorskip("tiktoken")
    tok = tokenizers.tokenizer({"kind": "gpt2"})
    assert tok.encode("Hello world<|endoftext|>") == [15496, 995, 50256]
    assert tok.n_vocab == tokenizers.GPT2_VOCAB_SIZE
    assert tok.decode([tok.encode("漢")[0]]) == "\ufffd"

    def offline(*_):
        raise ConnectionError("no route")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(OSError, match="no route.*docs/data.md"):
        tokenizers.tokenizer({"kind": "gpt2"})


def test_a_large_files_checksum_is_not_compared(broken, monkeypatch):
    monkeypatch.setattr(dataset, "VERIFY_BYTES", 1000)
    with open(broken / "train.bin", "r+b") as f:
        f.write(b"\xff")
    Tokens(broken, "train", 16)


@parametrize(
    "name, damage, says",
    [
        ("meta.json", lambda content: content[:50], "/.* is not prepared: .* Run: python /"),
        ("train.bin", lambda content: 2 * content, "/train.bin is not the file of "),
        ("train.bin", lambda content: content[::-1], "/train.bin is not the file of "),
    ],
)
def test_damaged_data_is_explained(broken, name, damage, says, monkeypatch):
    """The checksum of what is twice as long is not compared."""
    path = broken / name
    content = path.read_bytes()
    monkeypatch.setattr(dataset, "VERIFY_BYTES", len(content))
    path.write_bytes(damage(content))
    with refusal(says):
        Tokens(broken, "train", 16)


def test_a_split_shorter_than_a_block_names_the_lengths(data):
    n = len(Tokens(data, "val", 16))
    with refusal(f"{n:,} tokens, but block_size {n} needs at least {n + 1}.*={n - 1}"):
        Tokens(data, "val", n)


def test_a_prepared_folder_comes_before_one_that_is_not(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dataset, "DATA", tmp_path / "data")
    for folder in (tmp_path / "text", tmp_path / "data" / "text"):  # the last one is data/text
        folder.mkdir(parents=True)
        (folder / "meta.json").touch()
        assert dataset.folder_of("text") == str(folder)
