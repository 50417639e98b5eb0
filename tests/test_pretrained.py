"""training/pretrained.py: GPT-2 against transformers' own; what can change in it; what is refused.

The model is small, with random weights. lab/tests/test_gpt2.py has other models.
"""

import sys

import pytest
import torch
from harness import assert_equal, done, parametrize, refusal, refused, write
from reference import cached

from model import GPT
from text import tokenizers
from training import pretrained
from training.pretrained import load

transformers = pytest.importorskip("transformers")
V, T, C, H, L = 65, 24, 32, 4, 4
SIZES = {"block_size": T, "vocab_size": V, "n_layer": L, "n_head": H, "n_embd": C}


def shaken(config, **choices):
    """transformers' model, far from its first values: every different choice changes the result."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, **choices
    ).eval()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return model


def assert_same_model(ours, theirs, weights):
    """The same logits, also with a cache, and the same gradient of every parameter.

    weights: turns gradients by transformers' names into gradients by ours.
    """
    ours.double()  # float32 rounds differently on each kind of CPU
    theirs.double()
    x = torch.randint(V, (2, T))
    logits, _ = ours(x, x)
    expected = theirs(x).logits
    assert expected.std() > 0.1
    assert_equal(logits, expected, 1e-4)

    direction = torch.randn_like(logits)
    (logits * direction).mean().backward()
    (expected * direction).mean().backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    gradients["lm_head.weight"] = theirs.lm_head.weight.grad  # named_parameters skips a tied one
    gradients = weights(gradients)
    for name, p in ours.named_parameters():
        g = gradients[name]
        torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-4 * g.abs().max().item(), msg=name)

    with torch.no_grad():
        assert_equal(cached(ours.eval(), x, [5, 1, 1, 10, 7]), expected, 1e-4)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The name of a small GPT-2, with 2 layers of one head, and transformers' model."""
    name = str(tmp_path / "small")
    monkeypatch.setitem(pretrained.GPT2, name, (2, 64))
    monkeypatch.setitem(pretrained.SOURCES, name, pretrained.gpt2)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    theirs = shaken(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=1, **no_dropout))
    theirs.save_pretrained(name)
    return name, theirs


def test_equals_theirs(small):
    name, theirs = small
    assert_same_model(GPT.from_pretrained(name), theirs, pretrained.gpt2_weights)


def test_what_may_change_in_a_loaded_model(small):
    """Its attention, its spans, its context. A convolution begins as the identity."""
    name, _ = small
    x = torch.randint(V, (2, T))
    expected = load(name, {})(x, x)[0]
    assert torch.equal(load(name, {"conv": 4})(x, x)[0], expected)
    short = load(name, {"conv": 4, "heads": "S", "window": T})
    torch.testing.assert_close(short(x, x)[0], expected)
    linear = load(name, {"attention": "beta_squared", "block_size": 8})
    assert linear.config.block_size == len(linear.transformer.wpe.weight) == 8
    with refusal("(?s)small's weights do not fit the model: .*transformer.wpe.weight"):
        load(name, {"block_size": 1025})


@parametrize("change", [{"qk_norm": "rmsnorm"}, {"n_head": 8}], ids=str)
def test_what_the_weights_fix(change):
    with refusal("is fixed: .* weights were trained with it. You can change dropout"):
        load("gpt2", change)


@parametrize("name", ["gtp2", "a/b", "tests/harness.py", ""])
def test_what_is_no_name(name, monkeypatch):
    monkeypatch.delitem(pretrained.SOURCES, "other", raising=False)  # a test of the lab's adds it
    with refusal(f"'{name}' is not one of gpt2, gpt2-medium, .* and no folder of a run"):
        load(name, {})


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with refusal("--init_from=gpt2 needs transformers: pip install transformers"):
        load("gpt2", {})


def test_the_heads_of_gpt2s_names():
    heads = {"gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25}
    for name, n_head in heads.items():
        assert pretrained.config_of(name, {})[0].n_head == n_head


def test_a_training_from_gpt2(train, small, tmp_path, text, bpe):
    """It is cropped. What a file sets gives way, what a user types does not."""
    bpe()
    write(tmp_path / "tokens", tokenizers.GPT2Tokenizer(), {"train": text, "val": text}, {})
    config = tmp_path / "config.py"
    config.write_text("mlp = 'relu'\n")
    flags = f"--init_from={small[0]} --attention=laser --dropout=0.1 --max_iters=1"
    flags += " --n_head=1 --n_embd=64"  # those of the weights
    done(
        train(config, flags, f"--dataset={tmp_path / 'tokens'}"),
        "block_size=32",
        "laser attention",
        "keeping mlp=gelu, not the relu of",
    )
    refused(train(flags), "has another vocabulary than the data of")
