"""The four places where an idea enters: each file of docs/attention.md, run as it is printed."""

import sys

import pytest
import torch
from harness import parametrize
from reference import assert_one_model, shaken
from test_docs import PYTHON_BLOCK, read

from attention.scores import of_token
from model import ATTENTION, GPTConfig
from parts import POSITION, QKV

# a name of a printed file: the fields that choose it
FILES = {
    "forgetting": {"attention": "forgetting"},
    "latent": {"qkv": "latent"},
    "value_residual": {"qkv": "value_residual"},
    "gated": {"attention": "gated"},
    "gated_beta": {"attention": "gated_beta"},
    "gated_delta": {"attention": "gated_delta"},
    "half_rope": {"position": "half_rope"},
}
BESIDE = [
    {},
    {"heads": "SSSL", "window": 9},
    {"n_kv_head": 2, "heads": "SLSL", "window": 9},
    {"attention": "beta", "conv": 4},
]
SIZES = {"block_size": 280, "vocab_size": 23, "n_layer": 3, "n_head": 4, "n_embd": 32}


@pytest.fixture
def printed(tmp_path, monkeypatch):
    """printed(name): writes the file of docs/attention.md that adds this name; returns its module.

    After the test the name is in no table.
    """
    monkeypatch.syspath_prepend(tmp_path)
    for table in (ATTENTION, QKV, POSITION):
        for name in FILES:
            monkeypatch.setitem(table, name, None)
            monkeypatch.delitem(table, name)

    def printed(name):
        blocks = PYTHON_BLOCK.findall(read("docs/attention.md"))
        (block,) = [block for block in blocks if f'["{name}"]' in block]
        (tmp_path / f"my_{name}.py").write_text(block, encoding="utf-8")
        sys.modules.pop(f"my_{name}", None)
        return f"my_{name}"

    return printed


@parametrize("name", FILES)
@parametrize("beside", BESIDE, ids=str)
def test_a_printed_file_with_heads_caches_and_checkpointing(name, beside, printed):
    """Cached = uncached, causal, and the same gradients if activations are computed again."""
    if name == "gated_delta" and beside:
        pytest.skip("a layer of its own: it has no short heads, groups or convolution")
    __import__(printed(name))
    gpt = shaken(GPTConfig(**SIZES | beside | FILES[name]), dtype=torch.float64)
    x = torch.randint(23, (2, 280))
    assert_one_model(gpt, x, [7, 1, 1, 262, 1, 8], 150)


def test_a_token_may_have_a_vector(monkeypatch):
    """f=of_token(x, width=n): (B, H, T, n), which begins as x, and goes into the cache."""

    def attention(s, seen, v, drop, f=of_token(0.5, width=3)):
        assert f.shape[-1] == 3 and (f.shape[2] == 48 or trained or (f == 0.5).all())
        s = s + f.sin().sum(-1)[..., None, :]
        return drop(s.where(seen, -torch.inf).softmax(-1)) @ v

    trained = False
    monkeypatch.setitem(ATTENTION, "own", attention)
    c = GPTConfig(**SIZES, attention="own", heads="SSSL", window=9, n_kv_head=2)
    x = torch.randint(23, (2, 280))
    shaken(c, by=0.0)(x, x)
    trained = True
    assert_one_model(shaken(c, dtype=torch.float64), x, [7, 1, 1, 262, 1, 8], 150)
