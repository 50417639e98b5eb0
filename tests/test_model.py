"""The model around the cores: heads, GPT-2's weights, sampling, and every refused configuration."""

import math
from dataclasses import replace

import pytest
import torch
from harness import pairwise
from reference import fast, naive_attention, shaken
from torch.nn import functional as F

from choices import QK_NORM
from model import ATTENTION, GPT, GPTConfig
from training import estimate

V, T = 65, 24
HEADS = [("L", None), ("S", 3), ("SSSL", 3), ("SLSL", 5), ("S/L", 0), ("LS/SSSL", 4)]
cores = pytest.mark.parametrize("core", ATTENTION)
heads = pytest.mark.parametrize(("heads", "window"), HEADS)


def config(**kwargs: object) -> GPTConfig:
    sizes = {"block_size": T, "vocab_size": V, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPTConfig(**sizes | kwargs)


def tokens(B: int = 2) -> torch.Tensor:
    return torch.randint(V, (B, T))


@cores
@heads
def test_shapes_and_loss_at_initialisation(core, heads, window):
    gpt, x = GPT(config(attention=core, heads=heads, window=window)), tokens()
    logits, loss = gpt(x, x.roll(-1, 1))
    assert logits.shape == (2, T, V)
    assert abs(loss.item() - math.log(V)) < 0.3
    last, none = gpt(x)
    assert none is None
    torch.testing.assert_close(last, logits[:, [-1]])
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())
    assert (gpt(x, torch.full_like(x, -1))[1]).isnan()  # every target ignored


@cores
@heads
@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_the_last_token_changes_no_earlier_logit(core, heads, window, size):
    """With values so large that LASER's lie within its range, at its edge, and far beyond."""
    gpt, x = GPT(config(attention=core, heads=heads, window=window)), tokens()
    with torch.no_grad():
        for block in gpt.transformer.h:
            block.attn.c_attn.weight[-32:] *= 10 * size  # the rows that make v
            block.attn.c_proj.weight /= size
        a = gpt(x, x)[0]
        for token in range(0, V, 16):
            changed = x.clone()
            changed[:, -1] = token
            b = gpt(changed, x)[0]
            assert b.isfinite().all()
            assert (a - b)[:, :-1].abs().max() < 1e-5
    assert (a - b)[:, -1].abs().max() > 1e-3


@cores
@pytest.mark.parametrize("position", ["learned", "t5"])
def test_activation_checkpointing_changes_memory_alone(core, position):
    """The same loss and gradients, bit for bit, dropout included; less is kept for the backward pass."""
    try:
        c = config(attention=core, heads="SL", window=4, position=position, dropout=0.2, n_layer=4)
    except ValueError:
        pytest.skip("refused")
    plain, again = GPT(c), GPT(replace(c, activation_checkpointing=True))
    again.load_state_dict(plain.state_dict())
    x, found = tokens(), []
    for gpt in (plain, again):
        kept = []

        def keep(t: torch.Tensor, kept: list = kept) -> torch.Tensor:
            kept.append(t.numel())
            return t

        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = gpt(x, x)[1]
        forward = sum(kept)
        loss.backward()
        found.append((loss, forward, [p.grad for p in gpt.parameters()]))
    assert torch.equal(found[0][0], found[1][0]) and found[1][1] < found[0][1] / 3
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))
    assert torch.equal(plain.eval()(x)[0], again.eval()(x)[0])


def test_layer_heads_are_tiled():
    assert config(heads="SSL", window=1).layer_heads(0) == "SSLS"
    c = config(heads="S/SL", window=1, n_layer=3)
    assert [c.layer_heads(i) for i in range(3)] == ["SSSS", "SLSL", "SSSS"]
    assert config(heads="S").resolved().window == 50  # the LS paper's span up to 2048
    assert config(heads="S", block_size=8192).resolved().window == 100
    assert config(heads="S", window=0).resolved().window == 0 and config().resolved().window is None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"attention": "sofmax"}, "softmax, laser, beta"),
        ({"qk_norm": "batchnorm"}, "none, layernorm, rmsnorm, l2"),
        ({"temperature": 0.0}, "must be a positive number"),
        ({"temperature": math.inf}, "must be a positive number"),
        ({"differential": True, "n_head": 1}, "n_head=1 is odd"),
        ({"differential": True, "heads": "SSSL"}, "write each letter twice"),
        ({"differential": True, "heads": "SSLL/SL"}, "the letters of a layer are SLSL"),
        ({"mlp": "relu7"}, "gelu, gelu_exact, relu"),
        ({"n_head": 5}, "set n_head to a divisor of it"),
        ({"n_layer": 0}, "at least 1"),
        ({"dropout": 1.0}, "in [0, 1)"),
        ({"attn_dropout": -0.1}, "in [0, 1)"),
        ({"attention": "laser", "attn_dropout": 0.1}, "no dropout on attention weights"),
        ({"heads": "SXL"}, "made of S (short) and L (long)"),
        ({"heads": ""}, "made of S (short) and L (long)"),
        ({"heads": "S//L"}, "made of S (short) and L (long)"),
        ({"heads": "SSSSSL"}, "n_head=4"),
        ({"heads": "S/S/L"}, "n_layer=2"),
        ({"window": 5}, "needs a short head"),
        ({"heads": "SL", "window": -1}, "0 (a token sees itself alone) or more"),
        ({"position": "rotary"}, "learned, sinusoidal, rope, alibi, relative, t5, none"),
        ({"norm": "batchnorm"}, "layernorm, rmsnorm"),
        ({"where": "middle"}, "pre, post, sandwich, olmo2"),
        ({"block": "both"}, "serial, parallel"),
        ({"position": "rope", "n_embd": 36}, "a head has 9"),
        ({"position": "sinusoidal", "n_embd": 33, "head_dim": 8}, "n_embd=33"),
        ({"n_kv_head": 3}, "set n_kv_head to a divisor of it"),
        ({"n_kv_head": 0}, "n_kv_head=0 must be at least 1"),
        ({"head_dim": 0}, "head_dim=0 must be at least 1"),
        ({"n_hidden": -1}, "n_hidden=-1 must be at least 1"),
        ({"n_kv_head": 1, "differential": True}, "n_kv_head=1 is odd"),
        ({"where": "post", "block": "parallel"}, "a parallel block has one sum"),
        ({"position": "alibi", "decay": "alibi"}, "position='alibi' is a decay itself"),
        ({"position": "t5", "attention": "beta"}, "In beta a low score is no small weight"),
        ({"position": "relative", "attention": "laser"}, "must be linear in its values, and laser is not"),
        ({"position": "relative", "short_attention": "laser", "heads": "SL"}, "linear in its values, and laser is not"),
        ({"attn_dropout": 0.1, "short_attention": "laser", "heads": "SL"}, "attention='laser' allows no dropout"),
        ({"short_attention": "sofmax", "heads": "SL"}, "short_attention='sofmax' is not one of softmax, laser, beta"),
        ({"short_attention": "beta"}, "needs both short and long heads, but heads='L' has one kind"),
        ({"decay": "linear"}, "decay='linear' is not one of none, alibi, learned"),
        ({"position": "alibi", "decay": "learned"}, "leave decay='learned' out, or use --position=none"),
        ({"conv": -1}, "conv=-1 must be 0 (no convolution) or a width up to 64"),
        ({"conv": 65}, "conv=65 must be 0"),
        ({"rope_base": 100.0}, "is used only with position=rope, not 'learned'"),
        ({"rope_base": 0.0, "position": "rope"}, "must be a positive number"),
        ({"max_distance": 9}, "is used only with position=relative or t5, not 'learned'"),
        ({"max_distance": 0, "position": "relative"}, "must be at least 1"),
        ({"max_distance": 16, "position": "t5"}, "must be at least 17"),
        ({"nope_long": True, "heads": "SL"}, "attention (rope, alibi, relative, t5), not for position='learned'"),
        ({"nope_long": True, "position": "rope"}, "has one kind"),
        ({"norm_eps": 0.0}, "between 0 and 1"),
        ({"z_loss": -1.0}, "must not be negative"),
        ({"label_smoothing": 1.0}, "must be in [0, 1)"),
        ({"logit_softcap": 0.0}, "must be a positive number"),
    ],
)
def test_a_bad_config_says_what_is_legal(wrong, says):
    with pytest.raises(ValueError) as error:
        config(**wrong)
    assert says in str(error.value)


def test_dropout_on_weights_follows_the_core():
    assert config(dropout=0.2).resolved().attn_dropout == 0.2
    assert config(dropout=0.2, attn_dropout=0.0).resolved().attn_dropout == 0.0
    assert config(dropout=0.2, attention="beta").resolved().attn_dropout == 0.2
    laser = replace(config(dropout=0.2), attention="laser")
    assert laser.resolved().attn_dropout == 0.0
    assert GPT(laser).train()(tokens(), tokens())[1].isfinite()


def test_counts():
    C, L = 32, 2
    block = 2 * 2 * C + 3 * C * C + 3 * C + C * C + C + 8 * C * C + 5 * C  # norms, attention, MLP
    n = V * C + L * block + 2 * C
    gpt = GPT(config())
    assert estimate.num_params(gpt) == n
    assert estimate.num_params(gpt, non_embedding=False) == n + T * C
    assert estimate.flops(gpt) == 6 * n + 12 * L * C * T
    beta = {"attention": "beta", "block_size": 300}
    assert estimate.flops(GPT(config(**beta))) == 6 * n + 12 * L * C * (64 + 16)  # linear
    assert estimate.flops(GPT(config(**beta, dropout=0.1))) == 6 * n + 12 * L * C * 300  # not with dropped weights
    features = 8 * 9 / 2  # of beta_squared, for heads of 8
    beta_squared = GPT(
        config(attention="beta_squared", short_attention="softmax", heads="SL", window=3, block_size=300, conv=4)
    )
    taps = L * 3 * C * 4
    assert estimate.flops(beta_squared) == 6 * (n + taps) + 12 * L * 8 * (2 * (64 + features * 9 / 8) + 2 * 4)
    wide = GPT(config(differential=True))
    assert estimate.flops(wide) == 6 * estimate.num_params(wide) + 18 * L * C * T  # values are twice as wide
    assert estimate.flops(GPT(config(heads="SL", window=3))) == 6 * n + 12 * L * 8 * (2 * T + 2 * 4)
    assert estimate.num_params(GPT(config(bias=False))) == V * C + L * (2 * C + 12 * C * C) + C


# -----------------------------------------------------------------------------
# what happens to queries and keys, and differential attention


def parts_of(attn, x: torch.Tensor) -> tuple:
    """q, k and v of a layer, each (B, H, T, D), straight from its projection."""
    return tuple(t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in attn.c_attn(x).split(32, dim=2))


def merged(attn, y: torch.Tensor) -> torch.Tensor:
    return attn.c_proj(y.transpose(1, 2).reshape(2, T, 32))


@cores
@pytest.mark.parametrize("qk_norm", QK_NORM)
@pytest.mark.parametrize("per_dim", [False, True])
def test_norms_and_temperatures_of_queries_and_keys(core, qk_norm, per_dim):
    """LASER, section 4: Q D K^T / (tau sqrt(d)), LayerNorm(Q) LayerNorm(K)^T; Henry et al.: g Q^ K^^T."""
    gpt = GPT(config(attention=core, qk_norm=qk_norm, per_dim_temperature=per_dim, temperature=0.6)).double()
    attn, x = gpt.transformer.h[1].attn, torch.randn(2, T, 32, dtype=torch.float64)
    for p in attn.parameters():
        p.data += 0.3 * torch.randn_like(p)
    q, k, v = parts_of(attn, x)
    scale = 8**-0.5 / 0.6
    if qk_norm == "layernorm":
        q, k = (F.layer_norm(t, (8,), n.weight, n.bias) for t, n in ((q, attn.q_norm), (k, attn.k_norm)))
    elif qk_norm == "rmsnorm":
        q, k = (
            t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * n.weight
            for t, n in ((q, attn.q_norm), (k, attn.k_norm))
        )
    elif qk_norm == "l2":
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
        q = q * attn.q_norm.scale * 8**0.5
    if per_dim:
        q = q @ torch.diag(torch.log(1 + attn.per_dim_temperature.exp()))
    torch.testing.assert_close(attn(x), merged(attn, naive_attention(core, q, k, v, scale=scale)), rtol=0, atol=1e-11)


def test_neutral_starts():
    """Per-dimension temperature begins as none; l2 learns g, the scores' scale, which begins at log2(T^2 - T)."""
    torch.manual_seed(3)
    plain, x = GPT(config()), tokens()
    scaled = GPT(config(per_dim_temperature=True))
    scaled.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(scaled(x)[0], plain(x)[0])
    attn = GPT(config(qk_norm="l2")).transformer.h[0].attn
    assert attn.q_norm.scale.item() == pytest.approx(math.log2(T * T - T)) and attn.scale == 8**-0.5
    assert not list(attn.k_norm.parameters())


@cores
@pytest.mark.parametrize(("heads", "window"), [("L", None), ("S", 3), ("SSLL", 3), ("LLSS", 5), ("SS/LL", 0)])
def test_differential_is_the_papers(core, heads, window):
    """y = (norm(A1 V - lambda A2 V)) (1 - lambda_init), lambda = exp(q1 k1) - exp(q2 k2) + lambda_init, V twice
    as wide, heads 2i and 2i + 1 a pair (Ye et al. 2024, equations 1 to 3); with LASER a log of each map."""
    c = config(attention=core, heads=heads, window=window, differential=True)
    gpt, x = GPT(c).double(), torch.randn(2, T, 32, dtype=torch.float64)
    for layer, block in enumerate(gpt.transformer.h):
        attn = block.attn
        attn.ln_head.weight.data += torch.randn(16)
        init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        lam = torch.exp(attn.lambda_q1 @ attn.lambda_k1) - torch.exp(attn.lambda_q2 @ attn.lambda_k2) + init
        q, k, v = (
            t.view(2, T, -1, D).transpose(1, 2) for t, D in zip(attn.c_attn(x).split(32, 2), (8, 8, 16), strict=True)
        )
        y = []
        for pair in range(2):
            span = window if c.layer_heads(layer)[2 * pair] == "S" else None
            V = v[:, pair : pair + 1]
            a1, a2 = (
                naive_attention(core, q[:, h : h + 1], k[:, h : h + 1], V, window=span)
                for h in (2 * pair, 2 * pair + 1)
            )
            d = a1 - lam * a2
            d = d / (d.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attn.ln_head.weight
            y.append(d * (1 - init))
        torch.testing.assert_close(attn(x), merged(attn, torch.cat(y, 1)), rtol=0, atol=1e-12)
    assert all(p.grad is None or p.grad.isfinite().all() for p in gpt.parameters())
    gpt(tokens(), tokens())[1].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in gpt.parameters())


def test_differential_without_lambda_is_the_plain_core():
    """With lambda = 0 only the first map of a pair is left: plain attention of its heads, normalised."""
    gpt, x = GPT(config(differential=True)).double(), torch.randn(2, T, 32, dtype=torch.float64)
    attn = gpt.transformer.h[0].attn
    for p in (attn.lambda_q1, attn.lambda_k1, attn.lambda_q2, attn.lambda_k2):
        p.data.zero_()
    init, attn.lambda_init = attn.lambda_init, 0.0
    assert init == pytest.approx(0.2)
    q, k, _ = parts_of(attn, x)
    v = attn.c_attn(x)[..., 64:].view(2, T, 2, 16).transpose(1, 2)
    y = F.rms_norm(fast("softmax")(q[:, ::2], k[:, ::2], v), (16,), eps=1e-5)
    torch.testing.assert_close(attn(x), merged(attn, y), rtol=0, atol=1e-12)


# -----------------------------------------------------------------------------
# decoding with a cache


@pytest.mark.parametrize(("core", "of_heads", "length"), pairwise(ATTENTION, [("L", None), ("SLSL", 5)], (1, T, T + 5)))
def test_generated_text_is_the_same_with_and_without_a_cache(core, of_heads, length):
    """A batch of prompts, from within block_size to past it, where the window slides, and a prompt longer than it."""
    gpt = shaken(config(attention=core, heads=of_heads[0], window=of_heads[1]), by=0.03)
    x = torch.randint(V, (3, length))
    a, b = (gpt.generate(x, T + 8, temperature=0.8, seed=5, use_cache=cached) for cached in (True, False))
    assert torch.equal(a, b) and a.shape == (3, length + T + 8)


def test_bytes_of_a_cache():
    def nbytes(tokens: int, **kwargs: object) -> int:
        gpt = GPT(config(block_size=400, **kwargs))
        cache = gpt.new_cache()
        assert cache.nbytes == 0
        gpt(torch.zeros(3, tokens, dtype=torch.long), cache=cache)
        gpt(torch.zeros(3, 1, dtype=torch.long), cache=cache)
        return cache.nbytes

    row = 2 * 3 * 8 * 4  # two layers, three rows, head dim 8, float32
    assert nbytes(10) == nbytes(300) == row * 4 * 2 * 400  # four heads, keys and values
    assert nbytes(300, heads="S", window=20) == row * 4 * 2 * 21
    assert nbytes(300, heads="SSSL", window=20) == row * 2 * (3 * 21 + 400)
    assert nbytes(10, attention="beta") == nbytes(300, attention="beta") == row * 4 * 2 * 8  # two 8 x 8 states
    assert nbytes(300, attention="beta", heads="SSSL", window=20) == row * 2 * (3 * 21 + 8)
    assert nbytes(300, differential=True) == row * 4 * 2 * 400  # the value of a pair is kept once
    assert nbytes(300, n_kv_head=2) == 2 * nbytes(300, n_kv_head=1) == row * 2 * 2 * 400
    for n_kv_head, heads in ((2, "SSLL"), (1, "SSSL")):  # a kind of head for each; both kinds need the one
        assert nbytes(300, n_kv_head=n_kv_head, heads=heads, window=20) == row * 2 * (400 + 21)
    assert nbytes(300, position="relative", attention="beta") == row * 4 * 2 * 400  # no running sums with a bias
    long, short = (GPT(config(block_size=8192, n_head=8, heads=h)) for h in ("L", "SSSSSSSL"))
    sizes = []
    for gpt in (long, short):
        cache = gpt.new_cache()
        gpt(torch.zeros(1, 102, dtype=torch.long), cache=cache)
        sizes.append(cache.nbytes)
    assert sizes[0] / sizes[1] == pytest.approx(8 * 8192 / (8192 + 7 * 101))


def test_a_cache_past_its_end_and_other_misuse():
    gpt, x = GPT(config()).eval(), tokens()
    cache = gpt.new_cache(10)
    gpt(x[:, :9], cache=cache)
    with pytest.raises(ValueError, match=r"9 \+ 2 tokens do not fit into a cache of 10"):
        gpt(x[:, 9:11], cache=cache)
    with pytest.raises(ValueError, match="is for a batch of 2"):
        gpt(x[:1, 9:10], cache=cache)
    gpt(x[:, 9:10], cache=cache)  # neither broke it
    with pytest.raises(ValueError, match=f"block_size={T}"):
        gpt.new_cache(T + 1)
    with pytest.raises(ValueError, match=r"0 \+ 1 tokens do not fit into a cache of 0"):
        gpt(x[:, :1], cache=gpt.new_cache(0))
    with pytest.raises(ValueError, match=r"10 \+ 11 tokens do not fit into a cache of 10"):
        gpt(x[:, :11], cache=cache)
    with pytest.raises(ValueError, match="0 tokens do not fit"):
        gpt(x[:, :0])
    with pytest.raises(ValueError, match=f"block_size={T}"):
        gpt(torch.zeros(1, T + 1, dtype=torch.long))
    beta = GPT(config(attention="beta", dropout=0.1)).train()
    cache = beta.new_cache()
    with pytest.raises(ValueError, match=r"eval\(\)"):
        beta(x, cache=cache)
    with pytest.raises(ValueError, match="did not finish"):  # some layers may have it, others not
        beta.eval()(x, cache=cache)


@cores
def test_a_cache_keeps_no_graph_and_takes_another_precision(core):
    gpt, x = GPT(config(attention=core, heads="SSSL", window=3)).eval(), tokens()
    cache = gpt.new_cache()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        gpt(x[:, :9], cache=cache)
    logits, _ = gpt(x[:, 9:12], cache=cache)
    assert not logits.requires_grad and logits.dtype == torch.float32
    assert (logits - gpt(x[:, :12])[0]).abs().max() < 0.05


def test_logits_that_are_not_finite_are_no_text():
    with pytest.raises(ValueError, match="logits are not finite"):
        biased([0.0, math.nan]).generate(tokens().clamp(max=1), 1)


# -----------------------------------------------------------------------------
# sampling


def biased(logits: list[float]) -> GPT:
    """A model that always gives these logits."""
    gpt = GPT(config(vocab_size=len(logits)))
    gpt.forward = lambda idx, cache=None: (torch.tensor(logits).expand(len(idx), 1, -1), None)
    return gpt.eval()


def test_greedy_and_seeds():
    gpt, x = GPT(config()).eval(), tokens()[:, :4]
    greedy = gpt.generate(x, 40, temperature=0)
    for t in range(4, T):
        assert torch.equal(greedy[:, t], gpt(greedy[:, :t])[0][:, -1].argmax(-1))
    state = torch.get_rng_state()
    a, b = gpt.generate(x, 10, seed=7), gpt.generate(x, 10, seed=7)
    assert torch.equal(a, b) and not torch.equal(a, gpt.generate(x, 10, seed=8))
    assert torch.equal(state, torch.get_rng_state())
    assert a.shape == (2, 14) and torch.equal(a[:, :4], x)
    assert torch.equal(gpt.generate(x, 10, top_k=1), greedy[:, :14])


def test_top_k_top_p_and_padding():
    x = torch.zeros(2000, 1, dtype=torch.long)
    log = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    gpt = biased(log)

    def drawn(**kwargs: object) -> torch.Tensor:
        return torch.bincount(gpt.generate(x, 1, seed=3, **kwargs)[:, 1], minlength=4) / 2000

    torch.testing.assert_close(drawn(), torch.tensor([0.5, 0.3, 0.15, 0.05]), rtol=0, atol=0.04)
    torch.testing.assert_close(drawn(top_k=2), torch.tensor([0.625, 0.375, 0, 0]), rtol=0, atol=0.04)
    torch.testing.assert_close(drawn(top_k=99), drawn())
    torch.testing.assert_close(drawn(top_p=0.7), torch.tensor([0.625, 0.375, 0, 0]), rtol=0, atol=0.04)
    assert drawn(top_p=0.1)[0] == 1
    assert drawn(temperature=0.05)[0] > 0.99 and drawn(temperature=1e-45)[0] == 1
    torch.set_flush_denormal(True)  # as the scripts do
    assert drawn(temperature=1e-45)[0] == 1
    torch.set_flush_denormal(False)
    assert drawn(vocab_size=3)[3] == 0
    assert biased([0.0, 0.0, 9.0]).generate(x, 1, temperature=0, vocab_size=2)[:, 1].max() < 2


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ValueError, match="sampling needs"):
        GPT(config()).generate(tokens(), 1, **wrong)
