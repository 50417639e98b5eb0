"""Each choice against its formula written out, in every attention, cached and uncached."""

import math

import pytest
import torch
from harness import legal, pairwise
from reference import fast, naive_attention, shaken
from test_attention import close
from torch.nn import functional as F

import positions
from attention import fast as forms
from attention.heads import HeadGroup
from attention.sums import SUMS
from choices import ACTIVATION, WHERE
from model import ATTENTION, GPT, GPTConfig
from positions import POSITION, alibi_slopes, t5_bucket
from training import checkpoint, estimate

V, T, C, H, D = 65, 24, 32, 4, 8
POSITIONS = [p for p in POSITION if POSITION[p][1]]


def config(**kwargs: object) -> GPTConfig:
    sizes = {"block_size": T, "vocab_size": V, "n_layer": 2, "n_head": H, "n_embd": C}
    return GPTConfig(**sizes | kwargs)


def tokens(B: int = 2, n: int = T) -> torch.Tensor:
    return torch.randint(V, (B, n))


def test_what_is_refused():
    """The only refused pairs are these. Many tests skip refused pairs, so they skip no others."""
    refused = {(a, p) for a in ATTENTION for p in POSITION if not legal(config, attention=a, position=p)}
    assert refused == {("beta", "t5"), ("beta_squared", "t5"), ("laser", "relative")}


# -----------------------------------------------------------------------------
# positions: the bias by distance, and each scheme


FAR = [
    (None, 1), (None, 9), (None, 200), (0, 9), (16, 9), (16, 200), (100, 9)
]  # window, n  # fmt: skip


@pytest.mark.parametrize(
    ("core", "kind", "few"),  # few: a few queries at a time
    pairwise([core for core in ATTENTION if core != "laser"], FAR, [False, True]),  # it is not linear in its values
)
def test_values_by_distance(core, kind, few, monkeypatch):
    """Outputs and every gradient, in blocks and in rows, against one query at a time; also of the last queries."""
    window, n = kind
    monkeypatch.setattr(forms, "NUMBERS", 40 * 200 * 2 if few else 2**24)
    q, k, v = (torch.randn(1, 2, 200, d, dtype=torch.float64, requires_grad=True) for d in (8, 8, 5))
    bias = torch.randn(1, 2, 200, 200, dtype=torch.float64, requires_grad=True)
    far = torch.randn(n, 5, dtype=torch.float64, requires_grad=True)
    y = fast(core)(q, k, v, window=window, bias=bias, far=far)
    exact = naive_attention(core, q, k, v, window=window, bias=bias, far=far)
    assert close(y, exact, 1e-12)
    dy = torch.randn_like(y)
    found = [torch.autograd.grad(x, (q, k, v, bias, far), dy) for x in (y, exact)]
    assert all(close(ours, theirs, 1e-11) for ours, theirs in zip(*found, strict=True))
    for Tq in (1, 7, 150):
        last = fast(core)(q[..., -Tq:, :], k, v, window=window, bias=bias[..., -Tq:, :], far=far)
        assert close(last, exact[..., -Tq:, :], 1e-12)


def saved_bytes(f) -> int:
    """What a forward pass keeps for its backward pass, each piece of memory once."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.__setitem__(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) or t, lambda t: t
    ):
        f()
    return sum(kept.values())


@pytest.mark.parametrize(
    ("position", "core", "window"),
    pairwise(
        [p for p in POSITIONS if not POSITION[p][1].biased], ATTENTION, [None, 40],
        legal=lambda position, core, window: core in SUMS or window is not None,  # long heads of others hold scores
    ),
)  # fmt: skip
def test_a_position_without_a_bias_costs_no_memory_that_grows_with_the_square(position, core, window, monkeypatch):
    """What a layer keeps for its backward pass, and the largest tensor that it makes."""
    heads = {"heads": "L"} if window is None else {"heads": "S", "window": window}
    monkeypatch.setattr(forms, "NUMBERS", 2**16)
    largest, kept = {}, {}
    for n in (512, 2048):
        attn = GPT(config(attention=core, position=position, block_size=n, n_layer=1, **heads)).transformer.h[0].attn
        x, sizes = torch.randn(1, n, C, requires_grad=True), []

        class Watch(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, f, types, args=(), kwargs=None):
                out = f(*args, **(kwargs or {}))
                if isinstance(out, torch.Tensor):
                    sizes.append(out.untyped_storage().nbytes())  # noqa: B023
                return out

        with Watch():
            kept[n] = saved_bytes(lambda: attn(x))  # noqa: B023
        largest[n] = max(sizes)
    assert kept[2048] <= 4.5 * kept[512]
    assert largest[2048] <= 4.5 * largest[512]


SPANS = [
    {},
    {"heads": "SSLL", "window": 3, "differential": True, "n_kv_head": 2},
    {"heads": "SLLS/SSSL", "window": 5, "n_kv_head": 1},
    {"heads": "SLLS/SSSL", "window": 5, "nope_long": True, "per_dim_temperature": True},
    {"heads": "SSLL", "window": 100},
]


@pytest.mark.parametrize(
    ("position", "core", "more"),
    pairwise(POSITION, ATTENTION, SPANS, legal=lambda p, core, more: legal(config, position=p, attention=core, **more)),
)
@torch.no_grad()
def test_cached_logits_equal_uncached(position, core, more):
    gpt = shaken(config(attention=core, position=position, block_size=140, **more), by=0.03)
    x = tokens(n=140)
    full = gpt(x, x)[0]
    for pieces in ([1] * 30, [3, 1, 120, 1, 15]):
        cache, at, logits = gpt.new_cache(), 0, []
        for n in pieces:
            logits.append(gpt(x[:, at : at + n], x[:, at : at + n], cache=cache)[0])
            at += n
        torch.testing.assert_close(torch.cat(logits, 1), full[:, :at], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("position", "core", "where"),
    pairwise(POSITION, ATTENTION, WHERE, legal=lambda p, core, where: legal(config, attention=core, position=p)),
)
def test_causal_and_every_parameter_learns(position, core, where):
    """Checked by gradients and by changing a later token. Every parameter has a finite gradient."""
    gpt = shaken(config(attention=core, position=position, where=where, heads="SSSL", window=4, n_kv_head=2), by=0.1)
    x, seen = tokens(), []
    gpt.transformer.drop.register_forward_hook(lambda m, a, out: seen.append(out.detach().requires_grad_()) or seen[-1])
    logits = gpt(x, x)[0]
    for i in (0, T // 2, T - 2):
        (g,) = torch.autograd.grad(logits[:, i].square().sum(), seen[-1], retain_graph=True)
        reached = g.abs().sum((0, 2)) > 0
        assert reached[0] and reached[i] and not reached[i + 1 :].any()
    other = x.clone()
    other[:, -1] = (x[:, -1] + 1) % V
    assert (gpt(other, x)[0] - logits)[:, :-1].abs().max() < 1e-5
    gpt = shaken(gpt.config, by=0.1)
    gpt(x, x)[1].backward()
    for name, p in gpt.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name


@pytest.mark.parametrize("position", POSITION)
def test_bfloat16_autocast_stays_near_float32(position):
    """Far from initialisation. The difference is far smaller than to a model without its position."""
    more = {"norm": "rmsnorm", "qk_norm": "rmsnorm", "n_kv_head": 2}
    gpt, x = shaken(config(position=position, heads="SSSL", window=4, **more)), tokens()
    exact = gpt(x, x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = gpt(x, x)
    loss.backward()
    error = (logits.float() - exact).norm() / exact.norm()
    assert error < 0.03
    if POSITION[position][1]:
        plain = GPT(config(position="none", heads="SSSL", window=4, **more)).eval()
        plain.load_state_dict(gpt.state_dict(), strict=False)
        assert (plain(x, x)[0] - exact).norm() / exact.norm() > 3 * error


def test_rope_is_the_seeds_matrix(monkeypatch):
    """R x = x * cos + (-x2, x1, -x4, x3, ...) * sin, on complex numbers and on real ones."""
    rope = positions.RoPE(config(position="rope").resolved())
    x, m = torch.randn(1, 1, T, D), torch.arange(T)[:, None]
    theta = 10000.0 ** (-2 * torch.arange(D // 2) / D)
    cos, sin = ((m * theta).cos().repeat_interleave(2, 1), (m * theta).sin().repeat_interleave(2, 1))
    seeds = x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda c=compiling: c)
        q, k, more = rope(x, 2 * x, None, 0)
        assert more == {}
        torch.testing.assert_close(q, seeds, rtol=0, atol=1e-5)
        torch.testing.assert_close(k, 2 * seeds, rtol=0, atol=1e-5)


def test_alibi_slopes_are_the_papers():
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(16) == [2.0 ** (-h / 2) for h in range(1, 17)]
    assert alibi_slopes(12) == [2.0**-h for h in range(1, 9)] + [2.0**-h for h in (0.5, 1.5, 2.5, 3.5)]
    assert alibi_slopes(1) == [2.0**-8]
    assert all(len(set(alibi_slopes(n))) == n for n in range(1, 40))


def group(n_head: int) -> HeadGroup:
    """All heads of a layer, with an attention that takes no `fade`."""
    return HeadGroup([*range(n_head)], None, "softmax", ATTENTION["softmax"])


@pytest.mark.parametrize("n_head", [4, 6])  # slopes that are powers of two, and some that are not
@pytest.mark.parametrize("differential", [False, True])  # the maps of a pair decay alike
@pytest.mark.parametrize("past", [0, 1700])
def test_alibis_products_are_slopes_times_distances(n_head, differential, past):
    c = config(position="alibi", n_head=n_head, head_dim=D, differential=differential, block_size=2000, temperature=3.0)
    slopes = torch.tensor(alibi_slopes(n_head // 2)).repeat_interleave(2) if differential else alibi_slopes(n_head)
    expected = -torch.as_tensor(slopes)[:, None, None] * (torch.arange(300)[:, None] - torch.arange(300))
    for dtype, tolerance in (
        (torch.float64, 1e-6),
        (torch.float32, 3e-6),
        (torch.bfloat16, 2e-5),
        (torch.float16, 2e-5),
    ):
        x = torch.zeros(2, n_head, 300, D, dtype=dtype)
        q, k, more = positions.ALiBi(c.resolved())(x, x, group(n_head), past)
        assert more == {} and q.dtype == k.dtype == dtype
        s = q.double() @ k.double().mT * c.scale
        assert (s - expected).abs().max() < tolerance * 2000


def test_a_span_survives_a_shorter_context():
    gpt = GPT(config(position="alibi", heads="S", block_size=4096))
    gpt.crop_block_size(2048)
    assert gpt.config.resolved().window == gpt.transformer.h[0].attn.groups[0].window == 100


def test_alibi_stays_within_float16():
    """At long contexts and low scales too, where slope / scale times a position does not; and in endless decoding."""
    c = config(position="alibi", n_embd=512, head_dim=128, block_size=65536, temperature=8.0)
    x = torch.zeros(1, H, 100, 128, dtype=torch.float16)
    for past in (0, 65436, 400_000):
        q, k, _ = positions.ALiBi(c.resolved())(x, x, group(H), past)
        s = (q.float() @ k.float().mT * c.scale)[0].diagonal(-50, -2, -1)
        expected = -50 * torch.tensor(alibi_slopes(H))[:, None]
        assert ((s - expected).abs() <= 0.02 * expected.abs() + 0.1).all()


def test_a_model_cast_to_bfloat16_keeps_its_positions():
    for position in POSITIONS:
        gpt, x = shaken(config(position=position)), tokens()
        exact = gpt(x, x)[0]
        error = (gpt.bfloat16()(x, x)[0].float() - exact).norm() / exact.norm()
        assert error < 0.05, position


def test_alibi_of_slope_zero_is_no_position():
    x, gpt = tokens(), shaken(config(position="alibi"))
    plain = GPT(config(position="none")).eval()
    plain.load_state_dict(gpt.state_dict())
    assert (plain(x, x)[0] - gpt(x, x)[0]).abs().max() > 1e-3
    gpt.transformer.h[0].attn.position.q.zero_()
    torch.testing.assert_close(plain(x, x)[0], gpt(x, x)[0], rtol=0, atol=1e-5)


def test_t5_buckets_are_the_papers():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(3000)
    for max_distance in (20, 64, 128, 1000):
        theirs = t5._relative_position_bucket(-distance, False, 32, max_distance)
        assert torch.equal(t5_bucket(distance, max_distance), theirs)


def test_t5_shares_its_table_and_relative_does_not():
    t5, relative = (GPT(config(position=p)).transformer.h for p in ("t5", "relative"))
    assert t5[0].attn.position is t5[1].attn.position
    assert relative[0].attn.position is not relative[1].attn.position
    assert relative[0].attn.position.k.shape == (17, D)


def test_sinusoids_are_the_papers():
    gpt = GPT(config(position="sinusoidal"))
    x, seen = tokens(), []
    gpt.transformer.drop.register_forward_hook(lambda m, a, out: seen.append(out))
    gpt(x)
    expected = gpt.transformer.wte.weight[x] * C**0.5
    for pos in range(T):
        for i in range(C // 2):
            expected[:, pos, 2 * i] += math.sin(pos / 10000 ** (2 * i / C))
            expected[:, pos, 2 * i + 1] += math.cos(pos / 10000 ** (2 * i / C))
    torch.testing.assert_close(seen[0], expected)


def test_without_positions_a_model_with_one_layer_sees_a_bag_of_tokens():
    gpt, x = shaken(config(position="none", n_layer=1)), tokens()
    mixed = torch.cat((x[:, :-1][:, torch.randperm(T - 1)], x[:, -1:]), 1)
    torch.testing.assert_close(gpt(x)[0], gpt(mixed)[0], rtol=0, atol=1e-5)
    for position in set(POSITION) - {"none"}:
        gpt = shaken(config(position=position, n_layer=1))
        assert (gpt(x)[0] - gpt(mixed)[0]).abs().max() > 1e-3, position


@pytest.mark.parametrize("position", POSITION)
def test_cropping_keeps_what_is_within(position):
    gpt, x = shaken(config(position=position)), tokens()[:, :8]
    before = gpt(x, x)[0]
    gpt.crop_block_size(8)
    torch.testing.assert_close(gpt(x, x)[0], before)
    again = checkpoint.model_of({"model_args": vars(gpt.config), "model": gpt.state_dict()}).eval()
    torch.testing.assert_close(again(x, x)[0], before)
    assert gpt.generate(x, 5).shape == (2, 13)


@pytest.mark.parametrize("position", POSITION)
def test_a_longer_context_is_that_of_a_model_built_with_it(position):
    choices = {"position": position, "heads": "SSSL", "window": 30}
    gpt, long, x = shaken(config(**choices)), GPT(config(**choices, block_size=4 * T)).eval(), tokens(n=4 * T)
    if position == "learned":
        with pytest.raises(ValueError, match=f"block_size={4 * T} is below 1 or, if positions are learned, above {T}"):
            gpt.crop_block_size(4 * T)
        return
    long.load_state_dict(gpt.state_dict())
    gpt.crop_block_size(4 * T)
    torch.testing.assert_close(gpt(x, x)[0], long(x, x)[0], rtol=0, atol=1e-6 if position != "alibi" else 1e-5)


# -----------------------------------------------------------------------------
# heads


@pytest.mark.parametrize("core", ATTENTION)
@pytest.mark.parametrize("differential", [False, True])
@pytest.mark.parametrize("heads", ["L", "SSLL", "SSSSSSLL"])
def test_shared_heads_are_repeated_heads(core, differential, heads):
    """A model whose groups of query heads share keys and values is one whose keys and values are equal within a
    group; n_kv_head = n_head is plain."""
    kwargs = {"n_head": 8, "n_embd": 64, "attention": core, "differential": differential, "heads": heads}
    plain = GPT(config(**kwargs))
    same = GPT(config(**kwargs, n_kv_head=8))
    assert plain.state_dict().keys() == same.state_dict().keys()
    for G in (4, 2):
        shared = shaken(config(**kwargs, n_kv_head=G))
        state = shared.state_dict()
        for key in [k for k in state if "c_attn" in k]:
            q, k, v = state[key].split((64, 8 * G, 8 * G))
            n_map, n = 2 if differential else 1, 8 // G  # a pair's maps stay apart, its value is one
            k = k.unflatten(0, (G // n_map, 1, n_map * 8)).expand(-1, n, *(-1,) * k.dim()).flatten(0, 2)
            v = v.unflatten(0, (G // n_map, 1, n_map * 8)).expand(-1, n, *(-1,) * v.dim()).flatten(0, 2)
            state[key] = torch.cat((q, k, v))
        plain.load_state_dict(state)
        x = tokens()
        torch.testing.assert_close(shared(x, x)[0], plain(x, x)[0], rtol=0, atol=1e-5)
        assert estimate.num_params(shared) < estimate.num_params(plain)


def test_a_head_dim_of_its_own():
    c = config(n_head=3, head_dim=10, n_kv_head=1)
    gpt, x = GPT(c), tokens()
    assert gpt.transformer.h[0].attn.c_attn.weight.shape == (30 + 20, C)
    assert gpt.transformer.h[0].attn.c_proj.weight.shape == (C, 30)
    gpt(x, x)[1].backward()
    assert estimate.flops(gpt) == 6 * estimate.num_params(gpt) + 12 * 2 * 3 * 10 * T


# -----------------------------------------------------------------------------
# blocks


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_are_the_seeds(where, block, norm, bias):
    """transformer-choices, "Pre-vs-post Norm" and "Serial and Parallel Layers", equation by equation."""
    if (where, block) == ("post", "parallel"):
        pytest.skip("refused")
    gpt = shaken(config(where=where, block=block, norm=norm, bias=bias, norm_eps=1e-3)).double()
    b, x = gpt.transformer.h[1], torch.randn(2, T, C, dtype=torch.float64)

    def n(m, x):
        assert (getattr(m, "bias", None) is None) == (norm == "rmsnorm" or not bias)
        mean = x.mean(-1, keepdim=True) if norm == "layernorm" else 0.0
        y = (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-3).sqrt() * m.weight
        return y if getattr(m, "bias", None) is None else y + m.bias

    if block == "parallel":
        h = {"olmo2": x}.get(where)
        h = n(b.ln_1, x) if h is None else h
        a, m = b.attn(h), b.mlp(h)
        if where != "pre":
            a, m = n(b.ln_1_after, a), n(b.ln_2_after, m)
        expected = x + a + m
    elif where == "pre":
        y = x + b.attn(n(b.ln_1, x))
        expected = y + b.mlp(n(b.ln_2, y))
    elif where == "post":
        y = n(b.ln_1, x + b.attn(x))
        expected = n(b.ln_2, y + b.mlp(y))
    elif where == "sandwich":
        y = x + n(b.ln_1_after, b.attn(n(b.ln_1, x)))
        expected = y + n(b.ln_2_after, b.mlp(n(b.ln_2, y)))
    else:
        y = x + n(b.ln_1_after, b.attn(x))
        expected = y + n(b.ln_2_after, b.mlp(y))
    torch.testing.assert_close(b(x), expected, rtol=0, atol=1e-11)
    assert isinstance(gpt.transformer.ln_f, torch.nn.Identity) == (where == "post")
    norms = {name.split(".")[0] for name, _ in b.named_parameters() if name.startswith("ln_")}
    one = {"pre": {"ln_1"}, "post": {"ln_1"}, "sandwich": {"ln_1", "ln_1_after"}, "olmo2": {"ln_1_after"}}[where]
    two = {name.replace("1", "2") for name in one}
    assert norms == one | (two - {"ln_2"} if block == "parallel" else two)


FORMULAS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "swish": lambda x: x / (1 + torch.exp(-x)),
    "elu": lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
    "selu": lambda x: 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * (torch.exp(x) - 1)),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "softplus": lambda x: torch.log(1 + torch.exp(x)),
}
GATES = {"glu": "sigmoid", "reglu": "relu", "geglu": "gelu", "swiglu": "swish", "liglu": None}


@pytest.mark.parametrize("mlp", ACTIVATION)
@pytest.mark.parametrize("n_hidden", [None, 20])
def test_mlps_are_the_papers(mlp, n_hidden):
    """Gated: (f(x W) * (x V)) W2 (Shazeer 2020, equation 6), with as many weights as ungated."""
    m = shaken(config(mlp=mlp, n_hidden=n_hidden, n_embd=96)).transformer.h[0].mlp.double()
    x = torch.randn(2, T, 96, dtype=torch.float64)
    if mlp in GATES:
        hidden = n_hidden or 256
        W, V = m.c_fc.weight.split(hidden)
        b, c = m.c_fc.bias.split(hidden)
        f = FORMULAS.get(GATES[mlp], lambda x: x)
        y = f(x @ W.T + b) * (x @ V.T + c)
    else:
        assert mlp in FORMULAS, f"no reference for {mlp}: its formula goes into FORMULAS"
        y = FORMULAS[mlp](m.c_fc(x))
        assert y.shape[-1] == (n_hidden or 4 * 96)
    torch.testing.assert_close(m(x), y @ m.c_proj.weight.T + m.c_proj.bias, rtol=0, atol=1e-9)
    if n_hidden is None:
        assert m.c_fc.weight.numel() + m.c_proj.weight.numel() == 8 * 96 * 96


# -----------------------------------------------------------------------------
# the head and the loss


def test_the_soft_cap_bounds_the_logits():
    x, gpt = tokens(), shaken(config())
    logits = gpt(x, x)[0]
    gpt.config.logit_softcap = 3.0
    capped, loss = gpt(x, x)
    torch.testing.assert_close(capped, 3 * torch.tanh(logits / 3))
    torch.testing.assert_close(gpt(x)[0], capped[:, [-1]])
    torch.testing.assert_close(loss, F.cross_entropy(capped.flatten(0, 1), x.flatten()))
    assert capped.abs().max() <= 3 < logits.abs().max()


def test_z_loss_is_palms_and_in_training_alone():
    gpt, x = shaken(config(z_loss=0.01)), tokens()
    targets = x.roll(-1, 1)
    targets[:, -3:] = -1  # ignored in both terms
    logits, loss = gpt(x, targets)
    plain = F.cross_entropy(logits[:, :-3].flatten(0, 1), targets[:, :-3].flatten())
    torch.testing.assert_close(loss, plain)
    z = torch.log(logits[:, :-3].exp().sum(-1))
    torch.testing.assert_close(gpt.train()(x, targets)[1], plain + 0.01 * (z**2).mean())


def test_labels_are_smoothed_in_training_alone():
    """Section 7 of Szegedy et al. 2016: the target has 1 - p + p / V, every other token p / V."""
    gpt, x = shaken(config(label_smoothing=0.1)), tokens()
    targets = x.roll(-1, 1)
    targets[:, -3:] = -1  # ignored
    logits, loss = gpt(x, targets)
    log_p = logits[:, :-3].log_softmax(-1)
    plain = -log_p.gather(-1, targets[:, :-3, None]).mean()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(gpt.train()(x, targets)[1], 0.9 * plain - 0.1 * log_p.mean())


@pytest.mark.parametrize("where", ["pre", "sandwich", "olmo2"])
def test_zero_init_starts_from_the_embedding(where):
    gpt, x = GPT(config(zero_init=True, where=where)), tokens()
    seen = []
    gpt.transformer.ln_f.register_forward_hook(lambda m, args, out: seen.append(args[0]))
    gpt(x, x)[1].backward()
    torch.testing.assert_close(seen[0], gpt.transformer.wte(x) + gpt.transformer.wpe.weight)
    grads = [p.grad.norm() for p in gpt.parameters()]
    assert max(grads) < 10  # an output norm of what is zero would have a slope of 300
    assert sum(bool(g) for g in grads) > 4
