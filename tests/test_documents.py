"""Documents in one window that do not see each other, and the largest attention score."""

import json
import os

import pytest
import torch
from harness import legal, pairwise, state_of

from attention import fast as forms
from attention.probe import largest_logits
from attention.scores import scores, visible
from model import ATTENTION, GPT, GPTConfig
from positions import POSITION
from text import prepare
from text.dataset import Tokens, positions
from training import checkpoint

T, V = 48, 20
KINDS = ({}, {"heads": "SL", "window": 5}, {"heads": "SSLL", "window": 5, "differential": True}, {"n_kv_head": 2})
CUTS = ([0, 10, 40], [0], [0, 1, 33, 47], [0])  # where documents begin


def config(core: str, position: str, **kwargs: object) -> GPTConfig:
    sizes = {"block_size": T, "vocab_size": V, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPTConfig(attention=core, position=position, **sizes, **kwargs)


def fits(core: str, position: str, *others: object) -> bool:
    return legal(config, core, position)


def spans() -> list[tuple]:
    return [(row, a, b) for row, at in enumerate(CUTS) for a, b in zip(at, [*at[1:], T], strict=True)]


def places() -> torch.Tensor:
    pos = torch.empty(len(CUTS), T, dtype=torch.long)
    for row, a, b in spans():
        pos[row, a:b] = torch.arange(b - a)
    return pos


@pytest.mark.parametrize(("core", "position", "kind"), pairwise(ATTENTION, POSITION, KINDS, legal=fits))
def test_packed_documents_are_each_alone(core, position, kind):
    """Logits, and every gradient."""
    gpt = GPT(config(core, position, **kind)).double()
    idx, pos = torch.randint(V, (len(CUTS), T)), places()
    targets = torch.randint(V, idx.shape)
    logits, loss = gpt(idx, targets, pos=pos)
    loss.backward()
    packed = [p.grad for p in gpt.parameters()]
    gpt.zero_grad()
    for row, a, b in spans():
        alone, loss = gpt(idx[[row], a:b], targets[[row], a:b])
        torch.testing.assert_close(logits[row, a:b], alone[0], rtol=1e-6, atol=1e-6)  # RoPE's table is in float32
        (loss * (b - a) / idx.numel()).backward()
    for p, grad in zip(gpt.parameters(), packed, strict=True):
        torch.testing.assert_close(grad, p.grad, rtol=1e-5, atol=1e-7)
    whole = gpt(idx, targets)[0]
    assert (whole - logits)[0, 20:].abs().max() > 1e-6  # otherwise they do see each other


def test_a_cache_holds_one_document():
    gpt = GPT(config("softmax", "learned"))
    with pytest.raises(ValueError, match="a cache holds one document"):
        gpt(torch.zeros(1, 3, dtype=torch.long), cache=gpt.new_cache(), pos=torch.zeros(1, 3, dtype=torch.long))


def test_a_document_begins_with_the_boundary_before_it():
    x = torch.tensor([[5, 9, 1, 2, 9, 9, 3], [9, 1, 1, 1, 1, 1, 1], [1, 2, 3, 4, 5, 6, 9]])
    assert positions(x, 9).tolist() == [[0, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 0]]


def test_training_with_packed_documents(train, run, tmp_path, text):
    """A packed run differs from an unpacked one, is evaluated as packed, resumes bit for bit, and needs documents."""
    os.makedirs(tmp_path / "texts")
    for i in range(0, len(text), 20):
        (tmp_path / "texts" / f"{i:05d}.txt").write_text(text[i : i + 20])
    prepare.run(str(tmp_path / "docs"), str(tmp_path / "texts"), "bytes", num_workers=1)
    flags, got = f"--dataset={tmp_path / 'docs'}", {}

    def head() -> torch.Tensor:
        return state_of(tmp_path)["model"]["lm_head.weight"].clone()

    for pack in ("document", "none"):
        code, out, _ = train(flags, f"--pack={pack}")
        assert code == 0 and ("long heads, within documents\n" in out) == (pack == "document")
        got[pack] = head()
        total, gpt = 0.0, checkpoint.model_of(state_of(tmp_path)).eval()
        for x, y in (tokens := Tokens(str(tmp_path / "docs"), "val", 32)).strided(16, 4):
            total += gpt(x, y, pos=positions(x, 255) if pack == "document" else None)[1].item() * (y >= 0).sum().item()
        _, out, err = run("eval.py", f"--out_dir={tmp_path / 'out'}", "--which=latest", "--device=cpu")
        assert f"{total / (len(tokens) - 1):.4f}" in out, err
    assert not torch.equal(got["document"], got["none"])
    assert train(flags, "--pack=document", "--max_iters=4")[0] == 0
    assert train(flags, "--init_from=resume")[0] == 0 and torch.equal(head(), got["document"])
    _, out, err = train(flags, "--init_from=resume", "--pack=none", "--max_iters=12")  # losses that do not compare
    assert "pack was document, now none" in out and "the best validation loss starts anew" in out, out + err
    code, _, err = train("--pack=document")
    assert code == 2 and "has no boundaries between documents" in err


# -----------------------------------------------------------------------------
# --log_logits


@pytest.mark.parametrize(
    ("core", "position", "kind", "packed"), pairwise(ATTENTION, POSITION, KINDS, [False, True], legal=fits)
)
def test_the_largest_score_of_each_layer(core, position, kind, packed, monkeypatch):
    """It equals the largest entry of the full matrix of scores; computed a few queries at a time it is the same."""
    gpt = GPT(config(core, position, **kind)).eval()
    idx, pos = torch.randint(V, (len(CUTS), T)), places() if packed else None
    seen = []

    def spy(layer, original):
        def core(q, k, v, *, window=None, scale=None, bias=None, **kwargs):
            s = scores(q, k, scale, bias).abs()
            largest = s[..., visible(q, k, window)].max().item()
            seen[layer] = max(seen[layer], largest)
            return original(q, k, v, window=window, scale=scale, bias=bias, **kwargs)

        return core

    for layer, block in enumerate(gpt.transformer.h):
        seen.append(0.0)
        for group in block.attn.groups:
            group.core = spy(layer, group.core)
    cores = [group.core for block in gpt.transformer.h for group in block.attn.groups]
    gpt(idx, pos=pos)
    got = largest_logits(gpt, idx, pos)
    assert got == pytest.approx(seen, rel=1e-5) and min(got) > 0
    monkeypatch.setattr(forms, "NUMBERS", 1000)
    assert largest_logits(gpt, idx, pos) == pytest.approx(seen, rel=1e-5)
    assert [group.core for block in gpt.transformer.h for group in block.attn.groups] == cores


def test_logits_in_the_log(train, tmp_path):
    code, out, _ = train("--log_logits", "--log_interval=2", "--max_iters=4")
    rows = [json.loads(line) for line in open(tmp_path / "out" / "log.jsonl")]
    logged = [row["max_logit"] for row in rows if "loss" in row]
    assert code == 0 and len(logged) == 2 and all(len(layers) == 2 and min(layers) > 0 for layers in logged)
    assert f"largest logit {max(logged[0]):.2f}" in out
    plain = [row["loss"] for row in rows if "loss" in row]
    train("--log_interval=2", "--max_iters=4")
    rows = [json.loads(line) for line in open(tmp_path / "out" / "log.jsonl")]
    assert [row["loss"] for row in rows if "loss" in row] == plain  # to look changes nothing
