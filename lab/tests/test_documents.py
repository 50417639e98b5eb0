"""Documents in one window that do not see each other: alone, and in a run that packs them."""

import sys

import pytest
import torch
from harness import (
    done,
    legal,
    pairwise,
    parametrize,
    refused,
    same,
    state_of,
    weights_of,
    write,
)
from reference import SIZES
from torch.testing import assert_close

from attention.cache import Context
from lab.ideas.documents import Documents, positions_in_documents
from model import ATTENTION, GPT, GPTConfig
from parts import POSITION
from text import prepare, tokenizers
from text.dataset import Tokens
from training import checkpoint

T, V = 48, 65
HEADS = [
    {},
    {"heads": "SL", "window": 5},
    {"heads": "SLLL", "window": 5, "n_kv_head": 2, "conv": 4},
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
    choices |= {"attention": core, "position": position, "block_size": T}
    return GPTConfig(**SIZES | choices)


def fits(core: str, position: str, *others: object) -> bool:
    return legal(lambda: GPT(config(core, position)))


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
    logits, loss = gpt.predict(gpt.hidden(idx, Documents(places())), targets)
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
    assert (whole - logits)[0, 20:].abs().max() > 1e-6  # without Documents they see each other


def test_a_document_begins_with_the_boundary_before_it():
    x = torch.tensor([[5, 9, 1, 2, 9, 9, 3], [9, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 9]])
    assert positions_in_documents(x, 9).tolist() == [
        [0, 0, 1, 2, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 0],
    ]


# -----------------------------------------------------------------------------
# --import=lab.ideas.packed

PACKED = "--import=lab.ideas.packed"


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """What the import changes is as before after each test."""
    monkeypatch.setattr(GPT, "forward", GPT.forward)
    monkeypatch.setattr(Tokens, "__init__", Tokens.__init__)
    sys.modules.pop("lab.ideas.packed", None)


@pytest.fixture
def docs(tmp_path, text):
    """The folder of a data set of many short documents."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(0, len(text), 20):
        (texts / f"{i:05d}.txt").write_text(text[i : i + 20])
    prepare.run(str(tmp_path / "docs"), str(texts), "bytes", num_workers=1)
    return str(tmp_path / "docs")


def validation_loss(state: dict, docs: str, packed: bool) -> float:
    """Over all tokens of the validation split, four windows of 32 tokens at a time."""
    gpt = checkpoint.model_of(state).eval()
    tokens = Tokens(docs, "val", 32)
    total = 0.0
    for x, y in tokens.strided(16, 4):
        context = Documents(positions_in_documents(x, 255)) if packed else Context()
        total += gpt.predict(gpt.hidden(x, context), y)[1].item() * (y >= 0).sum().item()
    return total / (len(tokens) - 1)


def test_training_with_packed_documents(train, run, tmp_path, docs):
    """A packed run differs from others, is evaluated as packed, and resumes bit for bit."""
    dataset = f"--dataset={docs}"
    models = []
    for flags in ([], [PACKED]):
        done(train(dataset, *flags), "attention in 8 long heads")
        models.append(state_of(tmp_path))
        loss = validation_loss(models[-1], docs, bool(flags))
        out_dir = f"--out_dir={tmp_path / 'out'}"
        result = run("eval.py", out_dir, "--which=latest", "--device=cpu", *flags)
        done(result, f"{loss:.4f}", "windows of 32 tokens, 16 apart")
    none, packed = (state["model"] for state in models)
    assert not same(none, packed)

    train(dataset, PACKED, "--max_iters=4")
    train(dataset, PACKED, "--init_from=resume --max_iters=10")
    assert same(weights_of(tmp_path), packed)


def test_packing_needs_documents(train, tmp_path, text):
    """A tokenizer may have a token for the end of a document that never occurs."""
    tok = tokenizers.CharTokenizer("".join(sorted(set(text))), eot=True)
    write(tmp_path / "one", tok, {"train": text, "val": text}, {})
    for flag in ("", f"--dataset={tmp_path / 'one'}"):
        refused(train(PACKED, flag), "has no boundaries between documents (data/text/prepare")
