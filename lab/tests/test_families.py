"""lab/hub/families.py, and choices of GPT, against models of transformers with random weights."""

import sys

import pytest
import torch
from harness import assert_equal, done, parametrize, refusal
from test_pretrained import (
    SIZES,
    C,
    H,
    L,
    T,
    V,
    assert_loaded_equal,
    assert_refused,
    assert_same_model,
    shaken,
)

from lab.hub import families
from model import GPT, GPTConfig
from training import pretrained
from training.pretrained import FAMILIES, load

pytest.importorskip("transformers")
from transformers import Gemma2Config, LlamaConfig, MistralConfig, Qwen3Config

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
    return family(**THEIR_SIZES | choices)


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
SHORT = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}


@parametrize(
    "family, choices",
    [
        (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 500.0}}),
        (LlamaConfig, {"head_dim": 12, "rms_norm_eps": 1e-3, "num_key_value_heads": 1}),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (MistralConfig, {"sliding_window": 6}),
        (Qwen3Config, SHORT),
    ],
    ids=str,
)
def test_equals_theirs(tmp_path, family, choices):
    assert_loaded_equal(tmp_path, config_of(family, **choices))


@parametrize(
    "family, choices, says",
    [
        (LlamaConfig, {"attention_bias": True}, "biases only in attention or only in the MLP"),
        (LlamaConfig, LINEAR, "must have hidden_act='silu' and plain RoPE"),
        (Gemma2Config, {}, "the family gemma2 is not one of gpt2, llama, mistral, qwen3 "),
    ],
)
def test_other_models_are_refused(tmp_path, family, choices, says):
    assert_refused(tmp_path, config_of(family, **choices), says)


def test_a_layer_of_unknown_type_is_refused():
    config = config_of(Qwen3Config)
    config.layer_types[1] = "chunked_attention"
    with refusal("a layer of unknown type: chunked_attention"):
        families.llama_fields(config)


def test_a_weight_without_a_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.delitem(families.BLOCK, "mlp.c_proj")
    shaken(config_of(LlamaConfig)).save_pretrained(tmp_path)
    with refusal(r"do not fit the model: .*transformer.h.0.mlp.c_proj"):
        load(str(tmp_path), {})


def test_other_spans_and_a_longer_context(tmp_path):
    theirs = shaken(config_of(MistralConfig, sliding_window=6))
    theirs.save_pretrained(tmp_path)
    assert load(str(tmp_path), {"heads": "L"}).config.resolved().window is None
    wide = load(str(tmp_path), {"block_size": 2 * T})
    x = torch.randint(V, (2, 2 * T))
    assert_equal(wide(x, x)[0], theirs(x).logits, 1e-4)


def test_the_import_adds_the_families(train, tmp_path, monkeypatch):
    """A run begins with a Llama's weights if --import= names the file, and not without it."""
    monkeypatch.setattr(pretrained, "FAMILIES", {"gpt2": FAMILIES["gpt2"]})
    monkeypatch.delitem(sys.modules, "lab.hub.families")
    shaken(config_of(LlamaConfig, num_hidden_layers=2)).save_pretrained(tmp_path / "llama")
    llama = f"--init_from={tmp_path / 'llama'}"
    assert "the family llama is not one of gpt2 (--import= adds" in train(llama)[2]
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
    pretrained.copy_weights(ours, weights(state, C**0.5), "Gemma 2")
    assert_same_model(ours, theirs, weights)
