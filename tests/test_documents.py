"""Documents in one window that do not see each other; the largest attention score."""

from functools import partial

import pytest
import torch
from harness import (
    done,
    legal,
    log_of,
    pairwise,
    parametrize,
    refusal,
    refused,
    same,
    state_of,
    weights_of,
    write,
)
from torch.testing import assert_close

from attention import fast
from attention.cache import groups_of
from attention.probe import largest_logits
from model import ATTENTION, GPT, GPTConfig
from positions import POSITION
from text import prepare, tokenizers
from text.dataset import Tokens, positions
from training import checkpoint

T, V = 48, 20
HEADS = [
    {},
    {"heads": "SL", "window": 5},
    {"heads": "SSLL", "window": 5, "differential": True},
    {"n_kv_head": 2, "conv": 4},
]
# (row, start, end) of the documents of a batch of four rows, of which two are alike
DOCUMENTS = [
    (0, 0, 10),
    (0, 10, 40),
    (0, 40, 48),
    (1, 0, 48),
    (2, 0, 1),
    (2, 1, 33),
    (2, 33, 48),
    (3, 0, 48),
]


def config(core: str, position: str, **choices: object) -> GPTConfig:
    sizes = {"block_size": T, "vocab_size": V, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPTConfig(attention=core, position=position, **sizes, **choices)


def fits(core: str, position: str, *others: object) -> bool:
    return legal(config, core, position)


def places() -> torch.Tensor:
    """Each token's position in its document, (B, T)."""
    pos = torch.empty(4, T, dtype=torch.long)
    for row, start, end in DOCUMENTS:
        pos[row, start:end] = torch.arange(end - start)
    return pos


@parametrize("core, position, heads", pairwise(ATTENTION, POSITION, HEADS, legal=fits))
def test_packed_documents_are_each_alone(core, position, heads):
    """Logits, and every gradient."""
    gpt = GPT(config(core, position, **heads)).double()
    idx, targets = torch.randint(V, (2, 4, T))
    logits, loss = gpt(idx, targets, pos=places())
    packed = torch.autograd.grad(loss, gpt.parameters())
    total = 0.0
    for row, start, end in DOCUMENTS:
        alone, loss = gpt(idx[[row], start:end], targets[[row], start:end])
        # RoPE's table is in float32.
        assert_close(logits[row, start:end], alone[0], rtol=1e-6, atol=1e-6)
        total = total + loss * (end - start) / idx.numel()
    apart = torch.autograd.grad(total, gpt.parameters())
    assert_close(packed, apart, rtol=1e-5, atol=1e-7)
    whole = gpt(idx, targets)[0]
    assert (whole - logits)[0, 20:].abs().max() > 1e-6  # without pos documents see each other


def test_a_cache_holds_one_document():
    gpt = GPT(config("softmax", "learned"))
    idx = torch.zeros(1, 3, dtype=torch.long)
    with refusal("a cache holds one document"):
        gpt(idx, cache=gpt.new_cache(), pos=idx)


def test_a_document_begins_with_the_boundary_before_it():
    x = torch.tensor([[5, 9, 1, 2, 9, 9, 3], [9, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 9]])
    assert positions(x, 9).tolist() == [
        [0, 0, 1, 2, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 0],
    ]


# -----------------------------------------------------------------------------
# --pack=document


@pytest.fixture
def docs(tmp_path, text):
    """The flag of a data set of many short documents."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(0, len(text), 20):
        (texts / f"{i:05d}.txt").write_text(text[i : i + 20])
    prepare.run(str(tmp_path / "docs"), str(texts), "bytes", num_workers=1)
    return f"--dataset={tmp_path / 'docs'}"


def validation_loss(state: dict, docs: str, packed: bool) -> float:
    """Over all tokens of the validation split, four windows of 32 tokens at a time."""
    gpt = checkpoint.model_of(state).eval()
    tokens = Tokens(docs.removeprefix("--dataset="), "val", 32)
    total = 0.0
    for x, y in tokens.strided(16, 4):
        pos = positions(x, 255) if packed else None
        total += gpt(x, y, pos=pos)[1].item() * (y >= 0).sum().item()
    return total / (len(tokens) - 1)


def test_training_with_packed_documents(train, run, tmp_path, docs):
    """A packed run differs from others, is evaluated as packed, and resumes bit for bit."""
    models = []
    for pack in ("none", "document"):
        packed = pack == "document"
        done(train(docs, f"--pack={pack}"), "attention in 8 long heads")
        models.append(state_of(tmp_path))
        loss = validation_loss(models[-1], docs, packed)
        out_dir = f"--out_dir={tmp_path / 'out'}"
        result = run("eval.py", out_dir, "--which=latest", "--device=cpu")
        done(result, f"{loss:.4f}", "windows of 32 tokens, 16 apart")
    none, document = (state["model"] for state in models)
    assert not same(none, document)

    train(docs, "--pack=document --max_iters=4")
    train(docs, "--init_from=resume")
    assert same(weights_of(tmp_path), document)

    result = train(docs, "--init_from=resume --pack=none --max_iters=12")
    anew = "the best validation loss starts anew"  # losses do not compare
    done(result, "pack was document, now none", anew)


def test_packing_needs_documents(train, tmp_path, text):
    """A tokenizer may have a token for the end of a document that never occurs."""
    tok = tokenizers.CharTokenizer("".join(sorted(set(text))), eot=True)
    write(tmp_path / "one", tok, {"train": text, "val": text}, {})
    for flag in ("", f"--dataset={tmp_path / 'one'}"):
        says = "has no boundaries between documents (data/text/prepare"
        refused(train("--pack=document", flag), says)


# -----------------------------------------------------------------------------
# --log_logits


@parametrize(
    "core, position, heads, packed",
    pairwise(ATTENTION, POSITION, HEADS, [False, True], legal=fits),
)
def test_the_largest_score_of_each_layer(core, position, heads, packed, monkeypatch):
    """The largest entry of the full matrix of scores, also if computed a few queries at a time."""
    gpt = GPT(config(core, position, **heads)).eval()
    idx = torch.randint(V, (4, T))
    pos = places() if packed else None
    largest = [0.0, 0.0]

    def spied(layer, form, q, k, v, **settings):
        s = q @ k.mT / 8**0.5  # a head is 8 wide
        s = s + settings.get("bias", 0.0)
        place = torch.arange(s.shape[-1])
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance <= settings.get("window", T))
        largest[layer] = max(largest[layer], s[..., seen].abs().max().item())
        return form(q, k, v, **settings)

    for layer, block in enumerate(gpt.transformer.h):
        for group in block.attn.groups:
            group.form = partial(spied, layer, group.form)
    forms = [group.form for group in groups_of(gpt)]
    gpt(idx, pos=pos)
    expected = pytest.approx(largest, rel=1e-5)
    assert min(largest) > 0
    assert largest_logits(gpt, idx, pos) == expected
    monkeypatch.setattr(fast, "AT_ONCE", 1000)
    assert largest_logits(gpt, idx, pos) == expected
    assert [group.form for group in groups_of(gpt)] == forms


def test_logits_in_the_log(train, tmp_path):
    """They change no loss, with dropout."""
    losses = []
    for flag in ("--no-log_logits", "--log_logits"):
        out = done(train(flag, "--log_interval=2 --max_iters=4 --dropout=0.2"))
        rows = [row for row in log_of(tmp_path) if "loss" in row]
        losses.append([row["loss"] for row in rows])
    logits = [row["max_logit"] for row in rows]
    assert [len(layers) for layers in logits] == [2, 2]
    assert f"largest logit {max(logits[0]):.2f}" in out
    assert losses[0] == losses[1]
