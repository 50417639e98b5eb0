"""The model around the attentions: heads, refused configurations, counts, the cache, sampling."""

import contextlib
import copy
import math
import re
from dataclasses import replace

import torch
from harness import assert_equal, pairwise, parametrize, refusal
from reference import FUNCTIONS, OF_QKV, SIZES, naive_attention, shaken
from torch.nn import functional as F

from model import ATTENTION, GPT, GPTConfig
from parts import QK_NORM, TABLES
from training import estimate

V = 65
T = 24
C = 32
D = 8
cores = parametrize("core", FUNCTIONS)


def config(**fields) -> GPTConfig:
    return GPTConfig(**SIZES | fields)


def gpt_of(**fields) -> GPT:
    return GPT(config(**fields))


def tokens(B=2, n=T) -> torch.Tensor:
    return torch.randint(V, (B, n))


@contextlib.contextmanager
def saved_bytes():
    """A context that gives {memory: its bytes} of what a forward pass keeps for its backward."""
    kept = {}

    def keep(t):
        storage = t.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        yield kept


@cores
@parametrize("position", ["learned", "alibi"])
def test_activation_checkpointing_changes_memory_alone(core, position):
    """The same loss and gradients, bit for bit, with dropout; less is kept."""
    heads = {"heads": "SL", "window": 4}
    c = config(attention=core, position=position, dropout=0.2, n_layer=4, conv=3, **heads)
    plain = GPT(c)
    recomputing = GPT(replace(c, activation_checkpointing=True))
    recomputing.load_state_dict(plain.state_dict())
    x = tokens()
    results = []
    kept = []
    for gpt in (plain, recomputing):
        torch.manual_seed(3)
        with saved_bytes() as sizes:
            loss = gpt(x, x)[1]
        kept.append(sum(sizes.values()))
        grads = torch.autograd.grad(loss, gpt.parameters())
        results.append([loss, *grads, gpt.eval()(x)[0]])
    assert all(map(torch.equal, *results))
    assert kept[1] < kept[0] / 3


@cores
def test_a_deep_copy_is_a_model_of_its_own(core):
    """As for a mean of weights over the steps."""
    gpt = gpt_of(attention=core, position="rope", heads="SSSL", window=4, n_kv_head=2).eval()
    x = tokens()
    y = gpt(x, x)[0]
    other = copy.deepcopy(gpt)
    for p in gpt.parameters():
        p.data.zero_()
    assert torch.equal(other(x, x)[0], y)
    assert not torch.equal(gpt(x, x)[0], y)


# -----------------------------------------------------------------------------
# configurations


def test_layer_heads_are_tiled():
    assert config(heads="SSL", window=1).layer_heads(0) == "SSLS"
    c = config(heads="S/SL", window=1, n_layer=3)
    assert [c.layer_heads(i) for i in range(3)] == ["SSSS", "SLSL", "SSSS"]


DEFAULTS = [  # fields; another field, and what it then is
    ({}, "window", None),
    ({"heads": "S"}, "window", 50),  # the LS paper's spans, up to 2048 tokens and above
    ({"heads": "S", "block_size": 8192}, "window", 100),
    ({"heads": "S", "window": 0}, "window", 0),
    ({"n_head": 2}, "n_kv_head", 2),
    ({"dropout": 0.2}, "attn_dropout", 0.2),
    ({"dropout": 0.2, "attn_dropout": 0.0}, "attn_dropout", 0.0),
    ({"dropout": 0.2, "attention": "beta"}, "attn_dropout", 0.2),
    ({"dropout": 0.2, "attention": "laser"}, "attn_dropout", 0.0),
]


@parametrize("fields, name, value", DEFAULTS)
def test_what_none_stands_for(fields, name, value):
    assert getattr(config(**fields).resolved(), name) == value


COUNTS = "block_size vocab_size n_layer n_head n_embd n_kv_head head_dim n_hidden".split()
REFUSED = {  # part of the message: fields
    "set n_head to a divisor of it, or set head_dim": {"n_head": 5},
    "set n_kv_head to a divisor of it": {"n_kv_head": 3},
    # numbers
    "temperature=0.0 must be a positive number": {"temperature": 0.0},
    "dropout=1.0 must be in [0, 1)": {"dropout": 1.0},
    "conv=-1 must be 0 or more": {"conv": -1},
    # heads
    "heads='SXL' must be made of S (short) and L (long)": {"heads": "SXL"},
    "heads in a layer: 6): the model has n_layer=2 and n_head=4": {"heads": "SSSSSL"},
    "(layers: 3, heads in a layer: 1)": {"heads": "S/S/L"},
    "window=5 needs a short head": {"window": 5},
    "0 (a token sees itself alone) or more": {"heads": "SL", "window": -1},
    "short and long heads, but heads='L' has one kind": {"short_attention": "beta"},
    # dropout, blocks
    "attention='laser' allows no dropout": {"attention": "laser", "attn_dropout": 0.1},
    "(its function takes no `drop`": {
        "attn_dropout": 0.1,
        "short_attention": "laser",
        "heads": "SL",
    },
    "a head's width must be even": {"position": "rope", "head_dim": 5},
    "a parallel block has one sum": {"where": "post", "block": "parallel"},
    # positions
    "position='alibi' is a decay itself": {"position": "alibi", "decay": "alibi"},
    "rope_base=100.0 is not used by position='learned', only by rope": {"rope_base": 100.0},
    "and a position inside attention: heads='SL'": {"nope_long": True, "heads": "SL"},
    "nope_long needs both": {"nope_long": True, "position": "rope"},
}
for field in ("attention", "short_attention", *TABLES):
    REFUSED[f"{field}='no' is not one of "] = {field: "no"}
for field in COUNTS:
    REFUSED[f"{field}=0 must be at least 1"] = {field: 0}


@parametrize("says, fields", REFUSED.items())
def test_a_bad_config_says_what_is_legal(says, fields):
    with refusal(re.escape(says)):
        config(**fields)


def test_numbers_of_parameters():
    norms = 4 * C
    attention = 4 * C * C + 4 * C
    mlp = 8 * C * C + 5 * C
    n = V * C + 2 * (norms + attention + mlp) + 2 * C
    gpt = gpt_of()
    assert estimate.num_params(gpt) == n
    assert estimate.num_params(gpt, non_embedding=False) == n + T * C
    without_bias = V * C + 2 * (2 * C + 12 * C * C) + C
    assert estimate.num_params(gpt_of(bias=False)) == without_bias


LINEAR = {"attention": "beta", "block_size": 300}
SHORT = {"heads": "SL", "window": 3}
SQUARED = LINEAR | SHORT | {"attention": "beta_squared", "short_attention": "softmax"}
FLOPS = [  # fields; the mean width of keys and values times keys, summed over a layer's heads
    ({}, C * T),
    (SHORT, 16 * (T + 4)),
    ({"heads": "S", "window": 9 * T}, C * T),
    ({"n_head": 3, "head_dim": 10, "n_kv_head": 1}, 30 * T),
    (LINEAR, C * (32 + 16)),
    (LINEAR | {"dropout": 0.1}, C * 300),  # running sums cannot drop weights
    (SQUARED, 16 * (32 + 36 * 9 / 8) + 16 * 4),  # a key of 8 has 36 features
]


@parametrize("fields, per_layer", FLOPS)
def test_flops(fields, per_layer):
    gpt = gpt_of(**fields)
    assert estimate.flops(gpt) == 6 * estimate.num_params(gpt) + 12 * 2 * per_layer


# -----------------------------------------------------------------------------
# what happens to queries and keys


def normalised(x, module, norm, eps=1e-5):
    """x with its norm, by hand."""
    if norm == "none":
        return x
    if norm == "layernorm":
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, eps)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * module.weight


@parametrize("core", OF_QKV)
@parametrize("qk_norm", QK_NORM)
def test_norms_and_the_temperature_of_queries_and_keys(core, qk_norm):
    """LASER, section 4: Q K^T / (tau sqrt(d)) and LayerNorm(Q) LayerNorm(K)^T."""
    c = config(attention=core, qk_norm=qk_norm, temperature=0.6)
    attn = shaken(c, by=0.3, dtype=torch.float64).transformer.h[1].attn
    x = torch.randn(2, T, C, dtype=torch.float64)
    q, k, v = attn.c_attn(x).unflatten(-1, (3, 4, D)).permute(2, 0, 3, 1, 4)
    q = normalised(q, attn.q_norm, qk_norm)
    k = normalised(k, attn.k_norm, qk_norm)
    y = naive_attention(core, q, k, v, scale=D**-0.5 / 0.6)
    assert_equal(attn(x), attn.c_proj(y.transpose(1, 2).flatten(2)), 1e-11)


# -----------------------------------------------------------------------------
# decoding with a cache


@parametrize("core, span, length", pairwise(ATTENTION, [("L", None), ("SLSL", 5)], (1, T, T + 5)))
def test_generated_text_is_the_same_with_and_without_a_cache(core, span, length):
    """Prompts within block_size and past it, where the window slides."""
    gpt = shaken(config(attention=core, heads=span[0], window=span[1]), by=0.03)
    x = tokens(3, length)
    a = gpt.generate(x, T + 8, temperature=0.8, seed=5, use_cache=True)
    b = gpt.generate(x, T + 8, temperature=0.8, seed=5, use_cache=False)
    assert torch.equal(a, b)
    assert a.shape == (3, length + T + 8)


KEPT = [  # tokens of a prompt, fields, and how many keys and as many values a layer keeps
    (10, {}, 4 * 400),
    (300, {"heads": "SSSL"}, 3 * 20 + 400),
    (10, {"attention": "beta"}, 4 * 8),  # two 8 x 8 states
    (300, {"attention": "beta", "heads": "SSSL"}, 3 * 20 + 8),
    (10, {"attention": "beta", "n_kv_head": 1, "block_size": 20}, 20),  # smaller than 4 states
    (300, {"n_kv_head": 2}, 2 * 400),
    (300, {"n_kv_head": 2, "heads": "SSLL"}, 20 + 400),
    (300, {"n_kv_head": 1, "heads": "SSSL"}, 20 + 400),  # short and long heads need the one
    (300, {"n_kv_head": 2, "heads": "SLLL"}, 20 + 2 * 400),
]


@parametrize("prompt, fields, kept", KEPT)
def test_bytes_of_a_cache(prompt, fields, kept):
    window = 20 if "heads" in fields else None
    gpt = gpt_of(**{"block_size": 400, "window": window} | fields)
    cache = gpt.new_cache()
    assert cache.nbytes == 0
    vector = D * 4  # bytes, in float32
    for n in (prompt, 1):
        gpt(tokens(3, n), cache=cache)
        assert cache.nbytes == 2 * 3 * 2 * kept * vector  # layers, rows, keys and values


def test_a_cache_past_its_end_and_other_misuse():
    gpt = gpt_of().eval()
    x = tokens()

    def check_refused(x, says, cache=None):
        with refusal(re.escape(says)):
            gpt(x, cache=cache)

    cache = gpt.new_cache(10)
    gpt(x[:, :9], cache=cache)
    check_refused(x[:, 9:11], "9 + 2 tokens do not fit into a cache of 10", cache)
    check_refused(x[:1, 9:10], "1 rows into one of 2", cache)
    gpt(x[:, 9:10], cache=cache)  # neither broke it
    check_refused(tokens(n=T + 1), f"block_size={T}")
    with refusal(f"block_size={T}"):
        gpt.new_cache(T + 1)


def test_a_cache_drops_no_weight_of_running_sums():
    """In training mode too."""
    gpt = gpt_of(attention="beta", attn_dropout=0.5)
    x = tokens()
    logits = gpt(x, cache=gpt.new_cache())[0]
    assert torch.equal(logits, gpt.eval()(x, cache=gpt.new_cache())[0])


@cores
def test_a_cache_keeps_no_graph_and_takes_another_precision(core):
    gpt = gpt_of(attention=core, heads="SSSL", window=3).eval()
    x = tokens()
    cache = gpt.new_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gpt(x[:, :9], cache=cache)
    logits, _ = gpt(x[:, 9:12], cache=cache)
    assert not logits.requires_grad
    assert logits.dtype == torch.float32
    assert (logits - gpt(x[:, :12])[0]).abs().max() < 0.05


# -----------------------------------------------------------------------------
# sampling


def biased(logits: list[float]) -> GPT:
    """A model that always gives these logits."""
    gpt = gpt_of(vocab_size=len(logits))
    gpt.forward = lambda idx, cache=None: (torch.tensor(logits).expand(len(idx), 1, -1), None)
    return gpt.eval()


def test_logits_that_are_not_finite_are_no_text():
    with refusal("logits are not finite"):
        biased([0.0, math.nan]).generate(tokens().clamp(max=1), 1)


def test_greedy_and_seeds():
    gpt = shaken(config())
    x = tokens(n=4)
    greedy = gpt.generate(x, 40, temperature=0)
    for t in range(4, 44):  # past the context the window slides
        assert torch.equal(greedy[:, t], gpt(greedy[:, max(0, t - T) : t])[0][:, -1].argmax(-1))
    assert torch.equal(gpt.generate(x, 10, top_k=1), greedy[:, :14])
    state = torch.get_rng_state()
    a = gpt.generate(x, 10, seed=7)
    assert torch.equal(a, gpt.generate(x, 10, seed=7))
    assert not torch.equal(a, gpt.generate(x, 10, seed=8))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(a[:, :4], x)


PROBABILITIES = [0.5, 0.3, 0.15, 0.05]
TWO = [0.625, 0.375, 0.0, 0.0]
ONE = [1.0, 0.0, 0.0, 0.0]
DRAWN = [  # settings; the share of each token of these probabilities
    ({}, PROBABILITIES),
    ({"top_k": 2}, TWO),
    ({"top_k": 99}, PROBABILITIES),
    ({"top_p": 0.7}, TWO),
    ({"top_p": 0.1}, ONE),
    ({"temperature": 0.5}, [0.685, 0.247, 0.062, 0.007]),  # their squares
]


@parametrize("settings, shares", DRAWN)
def test_top_k_top_p_and_temperature(settings, shares):
    gpt = biased([math.log(p) for p in PROBABILITIES])
    x = torch.zeros(2000, 1, dtype=torch.long)
    y = gpt.generate(x, 1, seed=3, **settings)[:, 1]
    drawn = y.bincount(minlength=4) / 2000
    shares = torch.tensor(shares)
    assert_equal(drawn, shares, 0.04)
    assert not drawn[shares == 0].any()


def test_tokens_past_the_vocabulary_are_padding():
    x = torch.zeros(2000, 1, dtype=torch.long)
    for temperature in (0, 1):
        y = biased([0.0, 0.0, 9.0]).generate(x, 1, temperature=temperature, vocab_size=2)
        assert y.max() < 2


@parametrize("settings", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_sampling_is_refused(settings):
    with refusal("sampling needs"):
        gpt_of().generate(tokens(), 1, **settings)
