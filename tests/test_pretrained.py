"""training/pretrained.py: GPT-2 against transformers' own; what can change in it; what is refused.

The models are small, with random weights. lab/tests/test_families.py has other families.
"""

import sys
from functools import partial

import pytest
import torch
from harness import assert_equal, parametrize, refusal
from reference import cached

from model import GPT, GPTConfig
from training import pretrained
from training.estimate import num_params
from training.pretrained import FAMILIES, copy_weights, load

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
V, T, C, H, L = 65, 24, 32, 4, 4
SIZES = {"block_size": T, "vocab_size": V, "n_layer": L, "n_head": H, "n_embd": C}


def gpt2(**choices):
    sizes = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": L, "n_head": H}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2Config(**sizes | no_dropout | choices)


def shaken(config):
    """transformers' model, far from its first values: every different choice changes the result."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
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


def assert_loaded_equal(folder, config):
    """A model of this config, saved by transformers and loaded as a GPT, equals transformers'."""
    torch.manual_seed(1)
    theirs = shaken(config)
    theirs.save_pretrained(folder)
    ours = GPT.from_pretrained(str(folder))
    assert num_params(ours, non_embedding=False) == theirs.num_parameters()
    assert_same_model(ours, theirs, partial(FAMILIES[config.model_type].weights, config=config))


def assert_refused(folder, config, says):
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert_error(folder, rf"\Acannot load {folder} through transformers: .*{says}.*\Z")


def assert_error(name, says):
    with refusal(says):
        GPT.from_pretrained(str(name))


OTHER = {
    "activation_function": "gelu",
    "n_inner": 50,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
}


@parametrize("choices", [{}, OTHER, {"activation_function": "relu"}], ids=str)
def test_equals_theirs(tmp_path, choices):
    assert_loaded_equal(tmp_path, gpt2(**choices))


@parametrize(
    "choices, says",
    [
        ({"activation_function": "tanh"}, "activation_function='tanh' is not one of gelu_new"),
        ({"scale_attn_by_inverse_layer_idx": True}, "are not scaled by"),
        ({"scale_attn_weights": False}, "are not scaled by"),
    ],
)
def test_other_choices_are_refused(tmp_path, choices, says):
    assert_refused(tmp_path, gpt2(**choices), says)


@pytest.fixture
def folder(tmp_path):
    """A small GPT-2 of transformers."""
    shaken(gpt2()).save_pretrained(tmp_path)
    return str(tmp_path)


def test_what_may_change_in_a_loaded_model(folder):
    """Its attention, its spans, its context. A convolution begins as the identity."""
    x = torch.randint(V, (2, T))
    expected = load(folder, {})(x, x)[0]
    assert torch.equal(load(folder, {"conv": 4})(x, x)[0], expected)
    short = load(folder, {"conv": 4, "heads": "SSSL", "window": T})
    torch.testing.assert_close(short(x, x)[0], expected)
    linear = load(folder, {"attention": "beta_squared", "decay": "learned", "block_size": 8})
    assert linear.config.block_size == len(linear.transformer.wpe.weight) == 8
    assert linear.transformer.h[0].attn.decay.log_slopes.requires_grad
    with refusal("if positions are learned, above"):
        load(folder, {"block_size": T + 1})


@parametrize("change", [{"qk_norm": "rmsnorm"}, {"n_head": 8}], ids=str)
def test_what_the_weights_fix(folder, change):
    with refusal("is fixed: .* weights were trained with it. You can change dropout"):
        load(folder, change)


@parametrize("name", ["gtp2", "a/b/c", "tests/harness.py", ""])
def test_what_is_no_name(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_error(name, f"'{name}' is not one of gpt2, gpt2-medium, .* no folder, and no owner/mod")


def test_what_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_error("no-such/model-at-all", "cannot load no-such/model-at-all")
    assert_error(tmp_path, "cannot load")  # an empty folder
    theirs = shaken(gpt2(tie_word_embeddings=False))
    weights = tmp_path / "model.safetensors"
    for lost in ("lm_head.weight", "transformer.h.1.mlp.c_fc.weight"):
        theirs.save_pretrained(tmp_path)
        state = safetensors.load_file(weights)
        del state[lost]
        safetensors.save_file(state, weights, metadata={"format": "pt"})
        assert_error(tmp_path, f"its file has no {lost}")
    weights.write_bytes(weights.read_bytes()[:5000])
    assert_error(tmp_path, "cannot load")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_error("gpt2", "pip install transformers")


def test_the_heads_of_gpt2s_names():
    heads = {"gpt2": 12, "gpt2-medium": 16, "gpt2-large": 20, "gpt2-xl": 25}
    for name, n_head in heads.items():
        assert pretrained.config_of(name, {})[1]["n_head"] == n_head


def test_weights_that_do_not_fit():
    model = GPT(GPTConfig(**SIZES))
    state = model.state_dict()
    state["extra"] = state.pop("transformer.ln_f.bias")
    says = "out's weights do not fit .*Missing .*transformer.ln_f.bias.*Unexpected .*extra.*"
    with refusal(rf"\A{says}\Z"):
        copy_weights(model, state, "out")
