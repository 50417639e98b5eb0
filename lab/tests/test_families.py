"""lab/hub/families.py, and choices of GPT, against models of transformers with random weights."""

import sys
from functools import partial

import pytest
import torch
from harness import assert_equal, done, parametrize, refusal
from test_pretrained import SIZES, C, H, L, T, V, assert_same_model, shaken

from lab.hub import families
from lab.hub.families import FAMILIES
from model import GPT, GPTConfig
from training import pretrained
from training.estimate import num_params
from training.pretrained import load

pytest.importorskip("transformers")
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

safetensors = pytest.importorskip("safetensors.torch")
GPT2_SIZES = {
    "vocab_size": V,
    "n_positions": T,
    "n_embd": C,
    "n_layer": L,
    "n_head": H,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
THEIR_SIZES = {
    "vocab_size": V,
    "hidden_size": C,
    "intermediate_size": 44,
    "num_hidden_layers": L,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": T,
    "pad_token_id": None,
}


def config_of(family, **choices):
    sizes = GPT2_SIZES if family is GPT2Config else THEIR_SIZES
    return family(**sizes | choices)


OTHER_GPT2 = {
    "activation_function": "gelu",
    "n_inner": 50,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
}
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
SHORT = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}


@parametrize(
    "family, choices",
    [
        (GPT2Config, OTHER_GPT2),
        (GPT2Config, {"activation_function": "relu"}),
        (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 500.0}}),
        (LlamaConfig, {"head_dim": 12, "rms_norm_eps": 1e-3, "num_key_value_heads": 1}),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (MistralConfig, {"sliding_window": 6}),
        (Qwen3Config, SHORT),
    ],
    ids=str,
)
def test_equals_theirs(tmp_path, family, choices):
    """A model of this config, saved by transformers and loaded as a GPT, equals transformers'."""
    torch.manual_seed(1)
    config = config_of(family, **choices)
    theirs = shaken(config)
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(str(tmp_path))
    assert num_params(ours, non_embedding=False) == theirs.num_parameters()
    assert_same_model(ours, theirs, partial(FAMILIES[config.model_type].weights, config=config))


@parametrize(
    "family, choices, says",
    [
        (GPT2Config, {"activation_function": "tanh"}, "activation_function='tanh' is not one of "),
        (GPT2Config, {"scale_attn_by_inverse_layer_idx": True}, "are not scaled by"),
        (LlamaConfig, {"attention_bias": True}, "biases only in attention or only in the MLP"),
        (LlamaConfig, LINEAR, "must have hidden_act='silu' and plain RoPE"),
        (Gemma2Config, {}, "the family gemma2 is not one of gpt2, llama, mistral, qwen3"),
    ],
)
def test_other_models_are_refused(tmp_path, family, choices, says):
    AutoModelForCausalLM.from_config(config_of(family, **choices)).save_pretrained(tmp_path)
    assert_error(tmp_path, rf"\Acannot load {tmp_path} through transformers: .*{says}.*\Z")


def assert_error(name, says):
    with refusal(says):
        GPT.from_pretrained(str(name))


def test_what_cannot_be_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_error("no-such/model-at-all", "cannot load no-such/model-at-all")
    assert_error(tmp_path, "cannot load")  # an empty folder
    theirs = shaken(config_of(GPT2Config, tie_word_embeddings=False))
    weights = tmp_path / "model.safetensors"
    for lost in ("lm_head.weight", "transformer.h.1.mlp.c_fc.weight"):
        theirs.save_pretrained(tmp_path)
        state = safetensors.load_file(weights)
        del state[lost]
        safetensors.save_file(state, weights, metadata={"format": "pt"})
        assert_error(tmp_path, f"its file has no {lost}")
    weights.write_bytes(weights.read_bytes()[:5000])
    assert_error(tmp_path, "cannot load")


def test_other_spans_and_a_longer_context(tmp_path):
    theirs = shaken(config_of(MistralConfig, sliding_window=6))
    theirs.save_pretrained(tmp_path)
    assert load(str(tmp_path), {"heads": "L", "window": None}).config.heads == "L"
    wide = load(str(tmp_path), {"block_size": 2 * T})
    x = torch.randint(V, (2, 2 * T))
    assert_equal(wide(x, x)[0], theirs(x).logits, 1e-4)


def test_the_import_adds_the_families(train, tmp_path, monkeypatch):
    """A run begins with a Llama's weights if --import= names the file, and not without it."""
    monkeypatch.delitem(pretrained.SOURCES, "other")
    monkeypatch.delitem(sys.modules, "lab.hub.families")
    shaken(config_of(LlamaConfig, num_hidden_layers=2)).save_pretrained(tmp_path / "llama")
    llama = f"--init_from={tmp_path / 'llama'}"
    assert "and no folder of a run (--import= adds" in train(llama)[2]
    result = train(llama, "--import=lab.hub.families --max_iters=1")
    done(result, "all of its weights carry over")


def test_equals_gemma_2(monkeypatch):
    """Choices that no loaded family has; the weights are copied for this test alone.

    Sandwich norms, soft-capped logits and large scores, GeGLU, short and long layers.
    """
    monkeypatch.setitem(families.BLOCK, "ln_1_after", ["post_attention_layernorm"])
    monkeypatch.setitem(families.BLOCK, "ln_2", ["pre_feedforward_layernorm"])
    monkeypatch.setitem(families.BLOCK, "ln_2_after", ["post_feedforward_layernorm"])
    config = config_of(
        Gemma2Config,
        query_pre_attn_scalar=1,
        sliding_window=6,
        final_logit_softcapping=5.0,
        attn_logit_softcapping=50.0,
        tie_word_embeddings=False,
    )
    theirs = shaken(config)
    for layer in theirs.model.layers:
        layer.self_attn.q_proj.weight.data *= 8  # scores that the cap changes
    table = "model.embed_tokens.weight"

    def weights(state, scale=C**-0.5):
        state[table] = state[table] * scale
        return families.llama_weights(state, config)

    # Gemma's norms multiply by 1 + weight, and its embedding is scaled by sqrt(C)
    state = {name: 1 + p if "norm" in name else p for name, p in theirs.state_dict().items()}
    config_of_ours = GPTConfig(
        **SIZES,
        n_kv_head=2,
        n_hidden=44,
        position="rope",
        norm="rmsnorm",
        norm_eps=config.rms_norm_eps,
        where="sandwich",
        mlp="geglu",
        bias=False,
        heads="S/L",
        window=5,
        logit_softcap=5.0,
        tied=False,
        temperature=8**-0.5,
        attention="softcap",
    )
    ours = GPT(config_of_ours)
    ours.load_state_dict(weights(state, C**0.5))
    assert_same_model(ours, theirs, weights)
