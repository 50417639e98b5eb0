"""What goes beside any attention: an attention for each span, a decay beside a position, a short convolution."""

import functools
import itertools

import pytest
import reference
import torch
from harness import legal, pairwise
from reference import ONE_QUERY, naive_attention, plain
from torch.nn import functional as F

from attention.cache import run_definitions
from attention.sums import LINEAR_FROM
from model import ATTENTION, GPT, CausalSelfAttention, GPTConfig
from positions import POSITION, alibi_slopes, t5_bucket
from training.optimizers import Settings, by_decay

V, C, H, D = 29, 32, 4, 8
LONG = LINEAR_FROM + 34  # more than beta's and beta_squared's chunks, and no whole of them
cores = pytest.mark.parametrize("core", ATTENTION)
shaken = functools.partial(reference.shaken, by=0.1, dtype=torch.float64)


def config(**kwargs: object) -> GPTConfig:
    sizes = {"block_size": LONG, "vocab_size": V, "n_layer": 2, "n_head": H, "n_embd": C}
    return GPTConfig(**sizes | kwargs)


def tokens(n: int = LONG, B: int = 2) -> torch.Tensor:
    return torch.randint(V, (B, n))


# -----------------------------------------------------------------------------
# a layer by hand


def by_hand(gpt: GPT, layer: int, x: torch.Tensor) -> torch.Tensor:
    """The output of a layer's attention, from the formulas of its parts, head by head and query by query."""
    c, attn, T = gpt.config.resolved(), gpt.transformer.h[layer].attn, x.shape[1]
    n_map = 2 if c.differential else 1
    qkv = attn.c_attn(x)
    if c.conv:
        before = qkv.clone()
        for t in range(T):
            for o in range(min(c.conv, t + 1)):
                qkv[:, t] += attn.conv.weight[:, o] * before[:, t - o]
    q, k, v = qkv.split((H * D, c.n_kv_head * D, c.n_kv_head * D), dim=-1)
    q, k, v = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t, width in ((q, D), (k, D), (v, n_map * D)))
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    slopes = torch.tensor(alibi_slopes(H // n_map)).repeat_interleave(n_map).double()
    if c.decay == "learned":
        slopes = attn.decay.log_slopes.exp()
    y = []
    for h, letter in enumerate(c.layer_heads(layer)):
        value = h // n_map // (H // c.n_kv_head)
        one = q[:, [h]], k[:, [n_map * value + h % n_map]]
        position, bias, far = "none" if c.nope_long and letter == "L" else c.position, None, None
        if position == "rope":
            angle = torch.arange(T)[:, None] * c.rope_base ** (-torch.arange(0, D, 2) / D).double()
            turned = (
                torch.view_as_complex(t.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(()).double(), angle)
                for t in one
            )
            one = [torch.view_as_real(t).flatten(-2) for t in turned]
        elif position == "t5":
            bias = attn.position.table(t5_bucket(distance, c.max_distance))[..., h]
        elif position == "relative":
            k_of, far = attn.position.k[distance.clamp(max=c.max_distance)], attn.position.v
            bias = torch.einsum("bhid,ijd->bhij", one[0], k_of) * c.scale
        if c.per_dim_temperature:
            one = one[0] * F.softplus(attn.per_dim_temperature), one[1]
        decays = c.decay != "none" or position == "alibi"
        name, window = (c.short_attention, c.window) if letter == "S" else (c.attention, None)
        more = {"decay": slopes[[h], None, None] if decays else None, "bias": bias, "far": far}
        y.append(naive_attention(name, *one, v[:, [value]], window=window, scale=c.scale, **more))
    y = torch.cat(y, dim=1)
    if c.differential:
        y = y[:, ::2] - attn.lambda_of_pairs() * y[:, 1::2]
        y = F.rms_norm(y, (2 * D,), attn.ln_head.weight, 1e-5) * (1 - attn.lambda_init)
    if c.after != "none":
        y = y * gates(attn, x, y) if c.after != "xsa" else y - along(y, v.repeat_interleave(len(y[0]) // len(v[0]), 1))
    return attn.c_proj(y.transpose(1, 2).flatten(2))


def gates(attn: CausalSelfAttention, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """sigmoid(W x) of each channel of y (B, H, T, D), or of each head."""
    gate = (x @ attn.after.c_gate.weight.T).sigmoid()
    return (
        gate.mT[..., None] if gate.shape[-1] == y.shape[1] else gate.view(*x.shape[:2], y.shape[1], -1).transpose(1, 2)
    )


def along(y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The part of y that has the direction of v."""
    return (y * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True) * v


LAYERS = [
    ("SLSL/SSSL", {"decay": "learned", "conv": 3, "after": "xsa", "n_kv_head": 2}),
    ("SSLL", {"decay": "learned", "differential": True, "n_kv_head": 2, "after": "gate"}),
    ("LSLS", {"decay": "alibi", "position": "rope", "rope_base": 50.0, "n_kv_head": 2, "per_dim_temperature": True}),
    ("SLLS", {"position": "rope", "nope_long": True, "per_dim_temperature": True}),
    ("SLLS", {"position": "alibi", "nope_long": True, "conv": 2, "after": "gate_head"}),
    ("LS/SL", {"position": "t5", "max_distance": 20, "n_kv_head": 2}),
    ("SLLS", {"position": "t5", "nope_long": True}),
    ("LSLS", {"position": "relative", "max_distance": 5, "n_kv_head": 1}),
    ("SSLL", {"position": "relative", "nope_long": True}),
    ("SSLL", {"differential": True, "after": "xsa"}),
    ("LSLS", {"after": "gate"}),
]


def layers(short: str, long: str, kind: tuple) -> GPTConfig:
    return config(attention=long, short_attention=short, heads=kind[0], window=3, **kind[1])


@pytest.mark.parametrize(
    ("short", "long", "kind"), pairwise(ATTENTION, ATTENTION, LAYERS, legal=lambda *row: legal(layers, *row))
)
def test_each_head_is_its_attention_with_its_span(short, long, kind):
    gpt, x = shaken(layers(short, long, kind)), torch.randn(1, 24, C, dtype=torch.float64)
    assert {p for p in POSITION if POSITION[p][1]} <= {more.get("position") for _, more in LAYERS}  # a new one: by_hand
    fixed = kind[1].get("decay") != "learned"  # tables of fixed positions are in float32
    for layer, block in enumerate(gpt.transformer.h):
        torch.testing.assert_close(block.attn(x), by_hand(gpt, layer, x), rtol=0, atol=2e-6 if fixed else 1e-12)


MORE = {
    "learned": {"decay": "learned", "conv": 4, "n_kv_head": 2, "after": "xsa"},
    "nope_long": {"position": "alibi", "nope_long": True, "differential": True, "conv": 6, "after": "gate"},
}


OTHERS = [*zip(ATTENTION, [*ATTENTION][1:] + [*ATTENTION][:1], itertools.cycle(MORE), strict=False)]


@pytest.mark.parametrize(("short", "long", "more"), [*OTHERS, ("softmax", "beta", "learned")])
def test_cached_packed_and_plain_are_the_same(short, long, more):
    """Logits and every gradient of the fast forms are those of the definitions; a cache and documents change none."""
    gpt = shaken(config(attention=long, short_attention=short, heads="SSLL", window=20, **MORE[more]), by=0.05)
    x, y = tokens(), tokens()
    logits, loss = gpt(x, y)
    grads = torch.autograd.grad(loss, gpt.parameters())
    cuts = [0, 2, 5, 275, LONG]  # documents shorter than the convolution, and one in linear time
    pos = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cuts)]).expand(2, -1)
    with torch.no_grad():
        packed = gpt(x, y, pos=pos)[0]
        for a, b in itertools.pairwise(cuts):
            alone = gpt(x[:, a:b], y[:, a:b])[0]
            atol = 1e-6 if {short, long} <= {*ONE_QUERY} else 2e-6  # ALiBi's table is in float32
            torch.testing.assert_close(packed[:, a:b], alone, rtol=0, atol=atol)
        for pieces in ([1, 1, 1, 2, 1, 7, 1], [267, 1, 3, 1, 18]):  # shorter and longer than the convolution
            cache, parts = gpt.new_cache(), []
            for part in x[:, : sum(pieces)].split(pieces, dim=1):
                parts.append(gpt(part, part, cache=cache)[0])
            torch.testing.assert_close(torch.cat(parts, 1), logits[:, : sum(pieces)], rtol=0, atol=1e-10)
    run_definitions(gpt)
    plain, loss = gpt(x, y)
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)
    for ours, theirs in zip(grads, torch.autograd.grad(loss, gpt.parameters()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


# -----------------------------------------------------------------------------
# the decay


@cores
def test_learned_slopes_begin_at_alibis(core):
    torch.manual_seed(1)
    learned = GPT(config(attention=core, decay="learned"))
    torch.manual_seed(1)
    fixed, x = GPT(config(attention=core, decay="alibi")), tokens(40)
    torch.testing.assert_close(learned(x, x)[0], fixed(x, x)[0], rtol=0, atol=1e-5)
    slopes = [p for name, p in learned.named_parameters() if name.endswith("attn.decay.log_slopes")]
    assert [p.shape for p in slopes] == [(H,), (H,)]
    groups = by_decay([*learned.parameters()], Settings(1e-3, (0.9, 0.99), weight_decay=0.1))
    assert {group["weight_decay"] for group in groups for p in group["params"] if any(p is s for s in slopes)} == {0.0}


def fading_attention(s, seen, v, fade):
    """A researcher's own: y = sum_j sigmoid(s_ij) gamma^(i - j) v_j."""
    return fade(s.sigmoid()).where(seen, 0.0) @ v


@pytest.mark.parametrize("fades", [True, False])
def test_a_new_attention_decays(fades, monkeypatch):
    """One with a `fade` gets its heads' slopes, another one ALiBi's bias; in short heads, cut into blocks, too."""

    def own(s, seen, v):
        return fading_attention(s, seen, v, lambda x: x)

    monkeypatch.setitem(ATTENTION, "mine", fading_attention if fades else own)
    c = config(attention="softmax", short_attention="mine", heads="SLSS", window=20, decay="learned", n_layer=1)
    gpt, x = shaken(c), torch.randn(1, 200, C, dtype=torch.float64)
    attn = gpt.transformer.h[0].attn
    q, k, v = (t.unflatten(-1, (H, D)).transpose(1, 2) for t in attn.c_attn(x).split(C, dim=-1))
    slopes = attn.decay.log_slopes.exp()[:, None, None]
    by_distance = -slopes * (torch.arange(200)[:, None] - torch.arange(200))
    more = {"decay": slopes} if fades else {"bias": by_distance}
    y = plain("mine")(q, k, v, window=20, **more)
    y[:, 1] = naive_attention("softmax", q[:, [1]], k[:, [1]], v[:, [1]], decay=slopes[[1]])[:, 0]
    torch.testing.assert_close(attn(x), attn.c_proj(y.transpose(1, 2).flatten(2)), rtol=0, atol=1e-11)


# -----------------------------------------------------------------------------
# the short convolution


@cores
def test_causal_by_gradient_and_of_one_document_with_all_of_it(core):
    """More tokens than chunks: no gradient comes from a later token or from another document."""
    gpt = shaken(config(attention=core, short_attention="softmax", heads="SL", window=20, decay="learned", conv=4))
    x, seen = tokens(B=1), []
    gpt.transformer.drop.register_forward_hook(lambda m, a, out: seen.append(out.detach().requires_grad_()) or seen[-1])
    for start, pos in ((0, None), (100, torch.cat((torch.arange(100), torch.arange(LONG - 100)))[None])):
        logits = gpt(x, x, pos=pos)[0]
        for i in (start, start + 1, start + 70, LONG - 1):
            (grad,) = torch.autograd.grad(logits[:, i].square().sum(), seen[-1], retain_graph=True)
            reached = grad.abs().sum((0, 2)) > 0
            assert reached[start] and reached[i] and not reached[i + 1 :].any() and not reached[:start].any()


@cores
def test_bfloat16_autocast_stays_near_float32(core):
    """Losses, and all gradients together, that of the slopes too."""
    choices = {"attention": core, "heads": "SSLL", "window": 20, "decay": "learned", "conv": 4}
    gpt, x, grads = shaken(config(**choices), by=0.02).float(), tokens(), []
    for half in (False, True):
        gpt.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = gpt(x, x)[1]
        loss.backward()
        grads.append({name: p.grad for name, p in gpt.named_parameters()})
    slopes = ["log_slopes"] * (core in ONE_QUERY)  # their gradient may be nearly 0 in a sparse attention of your own
    for part in (*slopes, "conv.weight", "c_attn.weight"):
        exact, ours = (torch.cat([g.flatten() for name, g in found.items() if name.endswith(part)]) for found in grads)
        assert 0 < (ours - exact).norm() < 4 * 2**-8 * exact.norm(), part


def test_activation_checkpointing_of_all_of_it():
    """A convolution in packed documents and learned slopes: the same gradients, bit for bit."""
    choices = {"attention": "beta_squared", "short_attention": "laser", "heads": "SL", "decay": "learned", "conv": 4}
    gpt, x, grads = shaken(config(window=20, **choices)).train(), tokens(), []
    pos = torch.cat((torch.arange(20), torch.arange(LONG - 20))).expand(2, -1)
    for again in (False, True):
        gpt.config.activation_checkpointing = again
        gpt.zero_grad()
        gpt(x, x, pos=pos)[1].backward()
        grads.append([p.grad for p in gpt.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
