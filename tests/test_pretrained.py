"""Our choices against the models of transformers that made them: small models with random weights, built from
their config classes; logits, losses, gradients and counts."""

import sys

import pytest
import torch
from torch.nn import functional as F

from model import GPT, GPTConfig
from training import pretrained
from training.estimate import num_params
from training.pretrained import FAMILIES, LLAMA_MODULES, Family, copy_from

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
V, T, C, H, G, D, HIDDEN, L = 65, 24, 32, 4, 2, 8, 44, 4
SIZES = {"block_size": T, "vocab_size": V, "n_layer": L, "n_head": H, "n_embd": C}


def gpt2(**kwargs: object):
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    c = {"vocab_size": V, "n_positions": T, "n_embd": C, "n_layer": L, "n_head": H}
    return transformers.GPT2Config(**c | off | kwargs)


def llama(cls=transformers.LlamaConfig, **kwargs: object):
    c = {"vocab_size": V, "hidden_size": C, "intermediate_size": HIDDEN, "num_hidden_layers": L, "head_dim": D}
    c |= {"num_attention_heads": H, "num_key_value_heads": G, "max_position_embeddings": T}
    c |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return cls(**c | kwargs)


def randomised(config) -> torch.nn.Module:
    """Their model, far from initialisation, so that every different choice changes the result."""
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for p in theirs.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return theirs


def assert_equal(ours: GPT, theirs: torch.nn.Module, family: Family, gradients: dict | None = None) -> None:
    """Logits to 1e-4, losses, cached logits, and the gradient of every parameter."""
    x = torch.randint(V, (2, T))
    logits, _ = ours(x, x)
    expected = theirs(x).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert expected.std() > 0.1
    F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    F.cross_entropy(expected[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    grads.setdefault("lm_head.weight", grads.get("transformer.wte.weight", grads.get("model.embed_tokens.weight")))
    grads |= (gradients or (lambda g: {}))(grads)
    width = ours.config.resolved().head_dim
    for name, p in ours.named_parameters():
        sources = pretrained.sources(name, family.modules)
        g = torch.cat([pretrained.converted(source, grads[source], width, family) for source in sources])
        torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-4 * g.abs().max().item(), msg=name)
    with torch.no_grad():
        cache = ours.eval().new_cache()
        pieces = [ours(part, part, cache=cache)[0] for part in x.split([5, 1, 1, 10, 7], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected.detach(), rtol=0, atol=1e-4)


# -----------------------------------------------------------------------------
# the families that can be loaded

BASE, LINEAR = {"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
SHORT = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
CASES = {
    "gpt2": gpt2,
    "gpt2, exact gelu, wider MLP, untied": lambda: gpt2(
        activation_function="gelu", n_inner=50, layer_norm_epsilon=1e-3, tie_word_embeddings=False
    ),
    "llama, tied, MQA, base": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1, rope_parameters=BASE),
    "llama, wide heads": lambda: llama(head_dim=12, rms_norm_eps=1e-3),
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "mistral": lambda: llama(transformers.MistralConfig, sliding_window=6),
    "mistral, all long": lambda: llama(transformers.MistralConfig, sliding_window=None),
    "qwen3": lambda: llama(transformers.Qwen3Config),
    "qwen3, short layers": lambda: llama(transformers.Qwen3Config, **SHORT),
}
cases = pytest.mark.parametrize("case", CASES)


@cases
def test_equals_theirs(tmp_path, case):
    torch.manual_seed(1)
    theirs = randomised(CASES[case]())
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(str(tmp_path))
    assert num_params(ours, non_embedding=False) == theirs.num_parameters()
    assert_equal(ours, theirs, FAMILIES[theirs.config.model_type])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: gpt2(activation_function="tanh"), "activation_function='tanh'"),
        (lambda: gpt2(scale_attn_by_inverse_layer_idx=True), "are not scaled by"),
        (lambda: llama(attention_bias=True), "it has no model.layers.0"),
        (lambda: llama(hidden_act="gelu"), "plain RoPE, not 'gelu'"),
        (lambda: llama(rope_parameters=LINEAR), "must have hidden_act='silu' and plain RoPE"),
        (lambda: llama(transformers.Gemma2Config, head_dim=D), "the family gemma2 is not one of gpt2, llama"),
    ],
)
def test_other_models_are_refused(tmp_path, config, says):
    transformers.AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with pytest.raises(ValueError) as error:
        GPT.from_pretrained(str(tmp_path))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_may_change_in_a_loaded_model(tmp_path):
    """Its attention, its spans, its context; a convolution begins as the identity."""
    randomised(gpt2()).save_pretrained(tmp_path)
    load = lambda **changes: GPT.from_pretrained(str(tmp_path), changes)  # noqa: E731
    x = torch.randint(V, (2, 2 * T))
    logits = load()(x[:, :T], x[:, :T])[0]
    assert torch.equal(load(conv=4)(x[:, :T], x[:, :T])[0], logits)
    same = load(conv=4, heads="SSSL", window=T, attention="softmax", short_attention="softmax")
    torch.testing.assert_close(same(x[:, :T], x[:, :T])[0], logits)
    linear = load(attention="beta_squared", decay="learned", conv=4, block_size=8)
    assert linear.config.block_size == 8 and linear.transformer.h[0].attn.decay.log_slopes.requires_grad
    with pytest.raises(ValueError, match="if positions are learned, above"):
        load(block_size=T + 1)
    for change in ({"qk_norm": "rmsnorm"}, {"n_hidden": 50}, {"n_head": 8}, {"bias": False}):
        with pytest.raises(ValueError, match="is fixed: .* weights were trained with it. You can change dropout"):
            load(**change)
    theirs = randomised(llama(transformers.MistralConfig, sliding_window=6))
    theirs.save_pretrained(tmp_path)
    long, wide = load(heads="L"), load(block_size=2 * T)
    assert long.config.resolved().window is None and wide.config.resolved().window == 5
    torch.testing.assert_close(wide(x, x)[0], theirs(x).logits, rtol=0, atol=1e-4)


def test_what_cannot_be_loaded(tmp_path, monkeypatch):
    def refused(name: str, says: str, kind: type = ValueError) -> None:
        with pytest.raises(kind, match=says):
            GPT.from_pretrained(name)

    refused("gtp2", "not one of gpt2, gpt2-medium")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("no-such/model-at-all", "cannot load no-such/model-at-all")
    refused(str(tmp_path), "cannot load")  # an empty folder
    theirs, weights = randomised(llama()), tmp_path / "model.safetensors"
    for lost in ("lm_head.weight", "model.layers.1.mlp.down_proj.weight"):  # which transformers would make up
        theirs.save_pretrained(tmp_path)
        state = safetensors.load_file(weights)
        del state[lost]
        safetensors.save_file(state, weights, metadata={"format": "pt"})
        refused(str(tmp_path), f"its file has no {lost}")
    weights.write_bytes(weights.read_bytes()[:5000])
    refused(str(tmp_path), "cannot load")
    weights.unlink()
    refused(str(tmp_path), "cannot load")
    ours = GPT(GPTConfig(**SIZES))
    with pytest.raises(ValueError, match="its extra is no weight of our model"):
        copy_from(ours, randomised(gpt2()).state_dict() | {"extra": torch.zeros(1)}, FAMILIES["gpt2"])
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("gpt2", "pip install transformers")


# -----------------------------------------------------------------------------
# families that other choices come from: copied by hand, for these tests alone


def held_against(theirs, ours: dict, family: Family, state: dict | None = None, gradients: dict | None = None) -> None:
    """Our model of these fields, with their weights (or with state), equals theirs."""
    model = GPT(GPTConfig(**SIZES | ours))
    copy_from(model, state or theirs.state_dict(), family)
    assert_equal(model, theirs, family, gradients)


@pytest.mark.parametrize("cap", [None, 50.0])
def test_equals_gemma_2(cap):
    """Sandwich norms, soft-capped logits and (large) scores, GeGLU, short and long layers, a head dim of its own."""
    c = llama(transformers.Gemma2Config, head_dim=12, query_pre_attn_scalar=1, sliding_window=6,
              final_logit_softcapping=5.0, attn_logit_softcapping=cap, tie_word_embeddings=False)  # fmt: skip
    theirs = randomised(c)
    for layer in theirs.model.layers:
        layer.self_attn.q_proj.weight.data *= 8 if cap else 1
    modules = LLAMA_MODULES | {
        "transformer.h.*.ln_1_after": ["model.layers.*.post_attention_layernorm"],
        "transformer.h.*.ln_2": ["model.layers.*.pre_feedforward_layernorm"],
        "transformer.h.*.ln_2_after": ["model.layers.*.post_feedforward_layernorm"],
    }
    ours = {"n_kv_head": G, "head_dim": 12, "n_hidden": HIDDEN, "position": "rope", "norm": "rmsnorm",
            "norm_eps": c.rms_norm_eps, "where": "sandwich", "mlp": "geglu", "bias": False, "heads": "S/L", "window": 5,
            "logit_softcap": 5.0, "tied": False, "temperature": 12**-0.5,
            "attention": "softcap" if cap else "softmax"}  # fmt: skip
    state = {k: 1 + p if "norm" in k else p for k, p in theirs.state_dict().items()}  # theirs are 1 + weight
    table = "model.embed_tokens.weight"  # theirs scales the embedding
    state[table] = state[table] * C**0.5
    family = Family(None, modules, halves=True)
    held_against(theirs, ours, family, state, lambda g: {table: g[table] / C**0.5})


def test_equals_command_a():
    """Cohere 2: parallel blocks, S/S/S/L whose long layers have no position, a LayerNorm without bias, GQA."""
    c = llama(transformers.Cohere2Config, sliding_window=6, logit_scale=1.0, use_cache=False)
    assert c.layer_types == [*["sliding_attention"] * 3, "full_attention"]
    theirs = randomised(c)
    theirs.config.use_cache = False
    ours = {"n_kv_head": G, "n_hidden": HIDDEN, "position": "rope", "block": "parallel", "mlp": "swiglu",
            "bias": False, "heads": "S/S/S/L", "window": 5, "nope_long": True}  # fmt: skip
    held_against(theirs, ours, Family(None, LLAMA_MODULES))  # its RoPE pairs as ours does
