"""lab/hub/gpt2.py, and choices of GPT, against models of transformers with random weights."""

import re
import sys

import pytest
import torch
from harness import assert_equal, done, parametrize, refusal
from reference import SIZES as OURS
from reference import shaken as shaken_gpt
from test_pretrained import SIZES, C, H, L, T, V, assert_same_model, shaken

from lab.hub.gpt2 import exported
from model import ATTENTION, GPT, GPTConfig
from training import pretrained
from training.estimate import num_params
from training.pretrained import gpt2_weights

pytest.importorskip("transformers")
import transformers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
)

from lab.hub import attentions

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


# -----------------------------------------------------------------------------
# a GPT-2 of the hub

OTHER_GPT2 = {
    "activation_function": "gelu",
    "n_inner": 50,
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
}


@parametrize("choices", [OTHER_GPT2, {"activation_function": "relu"}], ids=str)
def test_equals_theirs(tmp_path, choices):
    """A model of this config, saved by transformers and loaded as a GPT, equals transformers'."""
    torch.manual_seed(1)
    theirs = shaken(config_of(GPT2Config, **choices))
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(str(tmp_path))
    assert num_params(ours, non_embedding=False) == theirs.num_parameters()
    assert_same_model(ours, theirs, gpt2_weights)


@parametrize(
    "family, choices, says",
    [
        (GPT2Config, {"activation_function": "tanh"}, "activation_function='tanh' is not one of "),
        (GPT2Config, {"scale_attn_by_inverse_layer_idx": True}, "are not scaled by"),
        (Gemma2Config, {}, "it is a gemma2, and no gpt2"),
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


def test_the_import_adds_other_names(train, tmp_path, monkeypatch):
    """A run begins with these weights if --import= names the file, and not without it."""
    monkeypatch.delitem(pretrained.SOURCES, "other")
    monkeypatch.delitem(sys.modules, "lab.hub.gpt2")
    shaken(config_of(GPT2Config, n_layer=2)).save_pretrained(tmp_path / "small")
    small = f"--init_from={tmp_path / 'small'}"
    assert "and no folder of a run (--import= adds" in train(small)[2]
    result = train(small, "--import=lab.hub.gpt2 --block_size=24 --max_iters=1")
    done(result, "all of its weights carry over")


# -----------------------------------------------------------------------------
# a GPT as a GPT-2

UNUSUAL = {"mlp": "gelu_exact", "n_hidden": 50, "norm_eps": 1e-3, "tied": False, "bias": False}


@parametrize("fields", [{}, {"n_kv_head": 4, "head_dim": 8, "heads": "LL"}, UNUSUAL], ids=str)
def test_exported_and_loaded_again(tmp_path, fields):
    ours = shaken_gpt(GPTConfig(**OURS | fields))
    theirs = exported(ours)
    assert theirs.generation_config.eos_token_id is None
    x = torch.randint(V, (2, T))
    logits = ours(x, x)[0]
    assert_equal(theirs(x).logits, logits, 1e-5)
    theirs.save_pretrained(tmp_path)
    loaded = GPT.from_pretrained(str(tmp_path))
    assert_equal(loaded(x, x)[0], logits, 1e-5)
    for name, p in ours.named_parameters():
        assert p.equal(loaded.get_parameter(name)), name


@parametrize(
    "fields, says",
    [
        (
            {"short_attention": "beta", "heads": "SSSL", "window": 3},
            "has no heads='SSSL', short_attention='beta', window=3",
        ),
        ({"where": "sandwich", "logit_softcap": 3.0}, "no where='sandwich', logit_softcap=3.0"),
        ({"n_head": 2, "head_dim": 8}, "GPT-2 has no head_dim=8"),
        ({"n_head": 3, "head_dim": 8}, "n_embd=32 is not a multiple of n_head=3"),
    ],
)
def test_what_gpt2_lacks_is_not_exported(fields, says):
    with refusal(re.escape(says)):
        exported(GPT(GPTConfig(**OURS | fields)))


# -----------------------------------------------------------------------------
# choices of GPT against other models, whose weights are copied for this alone

# module of GPT: modules of transformers, whose weights lie in it one after another
TOP = {
    "transformer.wte": ["model.embed_tokens"],
    "transformer.ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
}
BLOCK = {
    "ln_1": ["input_layernorm"],
    "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.c_proj": ["self_attn.o_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj": ["mlp.down_proj"],
}
SANDWICH = {
    "ln_1_after": ["post_attention_layernorm"],
    "ln_2": ["pre_feedforward_layernorm"],
    "ln_2_after": ["post_feedforward_layernorm"],
}
LLAMA = {"n_kv_head": 2, "n_hidden": 44, "position": "rope", "norm": "rmsnorm", "bias": False}


def weights_of(state, block=BLOCK):
    """A state dict of GPT with transformers' weights."""
    modules = dict(TOP)
    for layer in range(L):
        for ours, theirs in block.items():
            names = [f"model.layers.{layer}.{name}" for name in theirs]
            modules[f"transformer.h.{layer}.{ours}"] = names
    weights = {}
    for ours, theirs in modules.items():
        parts = [paired(f"{x}.weight", state) for x in theirs if f"{x}.weight" in state]
        if parts:
            weights[f"{ours}.weight"] = torch.cat(parts)
    return weights


def paired(name, state):
    """RoPE pairs dimensions d and d + D/2 in transformers, 2d and 2d + 1 here, D = 8."""
    if any(module in name for module in ("q_proj", "k_proj", "q_norm", "k_norm")):
        return state[name].unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
    return state[name]


def test_equals_qwen_3():
    """As Llama, with normalised queries and keys; two long layers, then two short ones."""
    config = config_of(
        Qwen3Config,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-3,
    )
    theirs = shaken(config)
    choices = {"qk_norm": "rmsnorm", "mlp": "swiglu", "heads": "L/L/S/S", "window": 5}
    choices |= {"rope_base": 500.0, "norm_eps": 1e-3, "tied": False}
    ours = GPT(GPTConfig(**SIZES | LLAMA | choices))
    ours.load_state_dict(weights_of(theirs.state_dict()))
    assert_same_model(ours, theirs, weights_of)


def test_equals_gemma_2():
    """Sandwich norms, soft-capped logits and large scores, GeGLU, short and long layers."""
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
        return weights_of(state | {table: state[table] * scale}, BLOCK | SANDWICH)

    # Gemma's norms multiply by 1 + weight, and its embedding is scaled by sqrt(C)
    state = {name: 1 + p if "norm" in name else p for name, p in theirs.state_dict().items()}
    choices = {"where": "sandwich", "mlp": "geglu", "heads": "S/L", "window": 5, "tied": False}
    choices |= {"logit_softcap": 5.0, "temperature": 8**-0.5, "attention": "softcap"}
    ours = GPT(GPTConfig(**SIZES | LLAMA | choices, norm_eps=config.rms_norm_eps))
    ours.load_state_dict(weights(state, C**0.5))
    assert_same_model(ours, theirs, weights)


# -----------------------------------------------------------------------------
# an attention of ours in models of transformers


@parametrize("family", [LlamaConfig, GPT2Config])
@parametrize("name", ["laser", "beta", "mine"])
def test_an_attention_in_their_model(family, name, monkeypatch):
    """It equals a GPT with this attention; with grouped keys, a cache, and padding on the left."""
    monkeypatch.setitem(ATTENTION, "mine", lambda s, seen, v: s.sigmoid().where(seen, 0.0) @ v)
    attentions.register()
    theirs = shaken(config_of(family), attn_implementation=f"nanoattn:{name}")
    if family is GPT2Config:
        choices, weights = {}, gpt2_weights
    else:
        choices, weights = LLAMA | {"mlp": "swiglu", "norm_eps": 1e-6, "tied": False}, weights_of
    ours = GPT(GPTConfig(**SIZES | choices | {"attention": name}))
    ours.load_state_dict(weights(theirs.state_dict()))
    assert_same_model(ours, theirs, weights)

    x = torch.randint(V, (2, T - 5))
    logits = theirs(x).logits
    first = theirs(x[:, :9], use_cache=True)
    assert_equal(
        theirs(x[:, 9:], past_key_values=first.past_key_values).logits, logits[:, 9:], 1e-5
    )
    padded = torch.cat((x[:, :5], x), dim=1)
    is_text = torch.arange(T).expand(2, -1) >= 5
    positions = (torch.arange(T) - 5).clamp(min=0).expand(2, -1)
    again = theirs(padded, attention_mask=is_text.long(), position_ids=positions).logits
    assert_equal(again[:, 5:], logits, 1e-5)


@parametrize("family", ["bert", "vit"])
def test_an_attention_in_their_encoder(family):
    """All tokens see each other, but for padding."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(family, **sizes, intermediate_size=44, image_size=32)
    given = {"pixel_values": torch.randn(2, 3, 32, 32)}
    if family == "bert":
        is_text = torch.arange(9) < torch.tensor([[9], [6]])
        given = {"input_ids": torch.randint(99, (2, 9)), "attention_mask": is_text.long()}
    outputs = []
    for name in ("sdpa", "nanoattn:softmax"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
        outputs.append(model(**given).last_hidden_state[:, :6])
    assert_equal(*outputs, 1e-5)
