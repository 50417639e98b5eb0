"""Each choice against its formula written out, in every attention, cached and uncached."""

import math
from functools import partial

import pytest
import torch
from harness import assert_equal, legal, pairwise, parametrize, refusal
from reference import assert_one_model, cached, shaken
from test_model import C, D, T, config, gpt_of, normalised, tokens
from torch.autograd import grad
from torch.nn import functional as F
from torch.testing import assert_close

import bench
from attention.cache import Context, heads_of
from attention.forms import FORM
from attention.scores import has_argument
from model import ATTENTION, GPT
from parts import ACTIVATION, POSITION, WHERE, alibi_slopes, turns
from training import checkpoint

SCHEMES = {name: scheme for name, (_, scheme) in POSITION.items() if scheme is not None}
positions = parametrize("position", POSITION)


# -----------------------------------------------------------------------------
# positions, in every attention


def needs_no_scores(position, core, window) -> bool:
    """Whether a head of this position and attention need not hold T x T scores."""
    has_sums = core in FORM and FORM[core].sums is not None
    return SCHEMES[position].wrap is None and (has_sums or window is not None)


@parametrize(
    "position, core, window",
    pairwise(SCHEMES, ATTENTION, [None, 40], legal=needs_no_scores),
)
def test_a_position_without_a_bias_costs_no_memory_that_grows_with_the_square(
    position, core, window
):
    """The most memory of a layer at any time, and so what it keeps for its backward pass."""
    heads = {"heads": "L" if window is None else "S", "window": window}
    peaks = []
    for n in (512, 2048):
        c = config(attention=core, position=position, block_size=n, n_layer=1, **heads)
        attn = GPT(c).transformer.h[0].attn
        x = torch.randn(1, n, C, requires_grad=True)
        peaks.append(bench.peak_memory(partial(attn, x), "cpu"))
    assert peaks[1] <= 4.5 * peaks[0]


SPANS = [
    {},
    {"heads": "SLLL", "window": 3, "n_kv_head": 2},
    {"heads": "SLLS/SSSL", "window": 5, "n_kv_head": 1},
    {"heads": "SLLS/SSSL", "window": 5, "nope_long": True},
    {"heads": "SSLL", "window": 100},
]


def is_legal(position, core, fields) -> bool:
    return legal(config, attention=core, position=position, **fields)


@parametrize(
    "position, core, span",
    pairwise(POSITION, ATTENTION, SPANS, legal=is_legal),
)
@torch.no_grad()
def test_cached_logits_equal_uncached(position, core, span):
    c = config(attention=core, position=position, block_size=140, **span)
    gpt = shaken(c, by=0.03)
    x = tokens(n=140)
    full = gpt(x, x)[0]
    for pieces in ([1] * 30, [3, 1, 120, 1, 15]):
        n = sum(pieces)
        assert_close(cached(gpt, x[:, :n], pieces), full[:, :n], rtol=1e-5, atol=1e-5)


def outputs_of(module) -> list[torch.Tensor]:
    """A list to which each call of the module adds its output."""
    outputs = []
    module.register_forward_hook(lambda module, args, output: outputs.append(output))
    return outputs


BLOCKS = [
    {"where": where, "block": block}
    for where in WHERE
    for block in ("serial", "parallel")
    if legal(config, where=where, block=block)
]


@parametrize(
    "position, core, block",
    pairwise(POSITION, ATTENTION, BLOCKS, legal=is_legal),
)
def test_causal_and_every_parameter_learns(position, core, block):
    """Checked by gradients and by changing a later token. Every parameter has a gradient."""
    fields = block | {"attention": core, "position": position}
    gpt = shaken(config(heads="SSSL", window=4, n_kv_head=2, **fields), 0.1, torch.float64)
    x = tokens()
    embedded = outputs_of(gpt.transformer.drop)
    logits, _ = gpt(x, x)
    for i in (0, T // 2, T - 2):
        y = logits[:, i].square().sum()
        (g,) = grad(y, embedded, retain_graph=True)
        reached = g.abs().sum((0, 2)) > 0
        assert reached[0] and reached[i] and not reached[i + 1 :].any()
    assert_one_model(gpt, x, [4, T - 5, 1], T - 1)


@positions
def test_cropping_keeps_what_is_within(position):
    given = config(position=position)
    gpt = shaken(given)
    x = tokens(n=8)
    logits = gpt(x, x)[0]
    gpt.crop_block_size(8)
    assert (given.block_size, given.window) == (T, None)  # another GPT may be made of it
    assert_close(gpt(x, x)[0], logits)
    state = {"path": "here", "model_args": vars(gpt.config), "model": gpt.state_dict()}
    assert_close(checkpoint.model_of(state).eval()(x, x)[0], logits)
    assert gpt.generate(x, 5).shape == (2, 13)


@parametrize("position", [name for name in POSITION if name != "learned"])
def test_a_longer_context_is_that_of_a_model_built_with_it(position):
    fields = {"position": position, "heads": "SSSL", "window": 30}
    if position == "rope":
        fields["rope_base"] = 50.0
    gpt = shaken(config(**fields))
    long = gpt_of(**fields, block_size=4 * T).eval()
    long.load_state_dict(gpt.state_dict())
    gpt.crop_block_size(4 * T)
    x = tokens(n=4 * T)
    tolerance = 1e-5 if position == "alibi" else 1e-6
    assert_equal(gpt(x, x)[0], long(x, x)[0], tolerance)


def test_learned_positions_end():
    with refusal(f"block_size={T + 1} is above {T}, and positions are learned"):
        gpt_of().crop_block_size(T + 1)


def test_a_span_survives_a_shorter_context():
    gpt = gpt_of(heads="S", block_size=2049)
    gpt.crop_block_size(2048)
    assert {heads.window for heads in heads_of(gpt)} == {100}
    assert gpt.config.window == 100 and gpt_of(heads="S", block_size=2048).config.window == 50


# -----------------------------------------------------------------------------
# each position


@parametrize("start", [0, 10**6])
def test_turns_are_right_far_away(start):
    """At a million, an angle in float32 would be wrong by 0.003."""
    turn = turns(start, start + 3, 8, 10000.0, torch.device("cpu"))
    assert turn.dtype == torch.float32
    theta = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    angle = torch.arange(start, start + 3)[:, None] * theta
    expected = torch.stack((angle.cos(), angle.sin()), dim=-1)
    assert_equal(turn.double(), expected, 1e-7)


SLOPES = {  # the papers', by the number of heads
    2: [1 / 16, 1 / 256],
    3: [1 / 16, 1 / 256, 1 / 4],
    4: [1 / 4, 1 / 16, 1 / 64, 1 / 256],
    6: [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8],
}


def test_alibi_slopes_are_the_papers():
    for n, slopes in (SLOPES | {1: [2.0**-8]}).items():
        assert alibi_slopes(n) == slopes


def alibi_scores(c, x, past):
    """What ALiBi adds to the scores of queries and keys x (B, H, T, D), in float64."""
    attn = GPT(c).transformer.h[0].attn
    q, k, arguments = attn.position(x, x, attn.heads[0], past)
    assert arguments == {}
    assert q.dtype == k.dtype == x.dtype
    return q.double() @ k.double().mT * c.scale


PRECISIONS = {
    torch.float64: 1e-6,
    torch.float32: 3e-6,
    torch.bfloat16: 2e-5,
    torch.float16: 2e-5,
}


@parametrize("n_head", [4, 6])  # slopes that are powers of two, and some that are not
@parametrize("past", [0, 1700])
@parametrize("dtype, tolerance", PRECISIONS.items())
def test_alibis_products_are_slopes_times_distances(n_head, past, dtype, tolerance):
    sizes = {"n_head": n_head, "head_dim": D, "block_size": 2000}
    c = config(position="alibi", temperature=3.0, **sizes)
    slopes = torch.tensor(SLOPES[n_head])[:, None, None]
    i = torch.arange(300)
    expected = -slopes * (i[:, None] - i)
    x = torch.zeros(2, n_head, 300, D, dtype=dtype)
    s = alibi_scores(c, x, past)
    assert (s - expected).abs().max() < tolerance * 2000


@parametrize("past", [0, 65436, 400_000])
def test_alibi_stays_within_float16(past):
    """At long contexts, low scales and in endless decoding: slope / scale times i is too large."""
    c = config(position="alibi", n_embd=512, head_dim=128, temperature=8.0, block_size=65536)
    x = torch.zeros(1, 4, 100, 128, dtype=torch.float16)
    s = alibi_scores(c, x, past)[0]
    expected = -50 * torch.tensor(SLOPES[4])[:, None]
    error = (s.diagonal(-50, -2, -1) - expected).abs()
    assert (error <= 0.02 * expected.abs() + 0.1).all()


# -----------------------------------------------------------------------------
# blocks


@parametrize("fields", BLOCKS)
@parametrize("norm", ["layernorm", "rmsnorm"])
@parametrize("bias", [False, True])
def test_blocks_are_the_papers(fields, norm, bias):
    """Where norms stand, and what serial and parallel layers are, equation by equation."""
    gpt = shaken(config(norm=norm, bias=bias, norm_eps=1e-3, **fields), dtype=torch.float64)
    b = gpt.transformer.h[1]
    x = torch.randn(2, T, C, dtype=torch.float64)

    def n(name, x):
        return normalised(x, getattr(b, name), norm, eps=1e-3)

    where = fields["where"]
    if fields["block"] == "parallel":
        h = x if where == "olmo2" else n("ln_1", x)
        a, m = b.attn(h), b.mlp(h)
        expected = x + (a + m if where == "pre" else n("ln_1_after", a) + n("ln_2_after", m))
    elif where == "pre":
        y = x + b.attn(n("ln_1", x))
        expected = y + b.mlp(n("ln_2", y))
    elif where == "post":
        y = n("ln_1", x + b.attn(x))
        expected = n("ln_2", y + b.mlp(y))
    elif where == "sandwich":
        y = x + n("ln_1_after", b.attn(n("ln_1", x)))
        expected = y + n("ln_2_after", b.mlp(n("ln_2", y)))
    else:
        y = x + n("ln_1_after", b.attn(x))
        expected = y + n("ln_2_after", b.mlp(y))
    assert_equal(b(x), expected, 1e-11)
    has_no_last_norm = isinstance(gpt.transformer.ln_f, torch.nn.Identity)
    assert has_no_last_norm == (where == "post")


def gelu(x):
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + torch.tanh(inner))


FORMULAS = {
    "gelu": gelu,
    "gelu_exact": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),  # the gate of swiglu
}
GATES = {"geglu": "gelu", "swiglu": "silu"}


@parametrize("mlp", ACTIVATION)
@parametrize("n_hidden", [None, 20])
def test_mlps_are_the_papers(mlp, n_hidden):
    """Gated: (f(x W) * (x V)) W2 (Shazeer 2020, equation 6), with as many weights as ungated.

    A new activation's formula goes into FORMULAS.
    """
    m = shaken(config(mlp=mlp, n_hidden=n_hidden, n_embd=92)).transformer.h[0].mlp.double()
    x = torch.randn(2, T, 92, dtype=torch.float64)
    y = m.c_fc(x)
    width = 4 * 92
    if mlp in GATES:
        gate, value = y.chunk(2, dim=-1)
        y = FORMULAS[GATES[mlp]](gate) * value
        width = 248
    else:
        y = FORMULAS[mlp](y)
    assert y.shape[-1] == (n_hidden or width)
    assert_equal(m(x), m.c_proj(y), 1e-9)
    if n_hidden is None:
        weights = m.c_fc.weight.numel() + m.c_proj.weight.numel()
        assert weights == pytest.approx(8 * 92 * 92, rel=0.02)


@parametrize("core", [name for name, f in ATTENTION.items() if has_argument(f, "drop")])
def test_where_and_how_often_dropout_drops(core):
    """A fifth of the embedding and of the layers' outputs, half of the attention weights.

    What is kept grows by as much. With values of ones and zeros an output is its weights.
    """
    gpt = gpt_of(attention=core, dropout=0.2, attn_dropout=0.5)
    block = gpt.transformer.h[0]
    drops = [gpt.transformer.drop, block.attn.resid_dropout, block.mlp.dropout]
    outputs = [outputs_of(module) for module in drops]
    gpt(tokens(16))
    for (y,) in outputs:
        assert (y == 0).float().mean().item() == pytest.approx(0.2, abs=0.03)
    q, k = torch.randn(2, 1, 4, 260, D)  # from 256 tokens on beta has running sums
    x = q, k, torch.eye(260).expand(1, 4, 260, 260), torch.randn(1, 260, gpt.config.n_embd)
    seen = torch.ones(260, 260).tril().bool()
    weights = block.attn.attend(*x, Context())[..., seen]
    kept = weights != 0
    whole = block.eval().attn.attend(*x, Context())[..., seen]
    assert kept.float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert_equal(weights, 2 * whole * kept, 1e-5)
    assert (whole != 0).all()
    mixed = config(attention=core, short_attention="laser", heads="SL", dropout=0.2)
    assert mixed.resolved().attn_dropout == 0  # LASER can drop no weights


# -----------------------------------------------------------------------------
# the head and the loss


def test_the_soft_cap_bounds_the_logits():
    x = tokens()
    gpt = shaken(config())
    logits = gpt(x, x)[0]
    gpt.config.logit_softcap = 3.0
    capped, loss = gpt(x, x)
    assert_close(capped, 3 * torch.tanh(logits / 3))
    assert_close(gpt(x)[0], capped[:, [-1]])
    assert_close(loss, F.cross_entropy(capped.flatten(0, 1), x.flatten()))
    assert capped.abs().max() <= 3 < logits.abs().max()


TERMS = [  # fields; the training loss from log p of all tokens, -log p of the targets, and Z
    ({"z_loss": 0.01}, lambda log_p, nll, Z: (nll + 0.01 * torch.log(Z) ** 2).mean()),
    ({"label_smoothing": 0.1}, lambda log_p, nll, Z: 0.9 * nll.mean() - 0.1 * log_p.mean()),
]


@parametrize("fields, formula", TERMS)
def test_terms_of_the_loss_are_the_papers_and_in_training_alone(fields, formula):
    """PaLM's z-loss; smoothing gives the target 1 - p + p / V (Szegedy et al. 2016, section 7)."""
    gpt = shaken(config(**fields))
    x = tokens()
    targets = x.roll(-1, 1)
    targets[:, -3:] = -1  # ignored in all terms
    logits, loss = gpt(x, targets)
    counted = logits[:, :-3]
    log_p = counted.log_softmax(-1)
    nll = -log_p.gather(-1, targets[:, :-3, None])
    assert_close(loss, nll.mean())
    Z = counted.exp().sum(-1, keepdim=True)
    assert_close(gpt.train()(x, targets)[1], formula(log_p, nll, Z))


@parametrize("fields", [{}, {"z_loss": 0.01, "label_smoothing": 0.1, "logit_softcap": 3.0}])
def test_a_loss_of_too_many_logits_takes_them_in_parts(fields, monkeypatch):
    """The same loss and gradients, also where targets are missing; no logits are returned."""
    gpt = shaken(config(**fields)).train()
    x = tokens()
    targets = x.roll(-1, 1)
    targets[0, :5] = -1
    found = []
    for most in (2**28, 8 * 3 * gpt.config.vocab_size):
        monkeypatch.setattr("model.MOST_LOGITS", most)
        logits, loss = gpt(x, targets)
        found.append((loss, *torch.autograd.grad(loss, gpt.parameters())))
    assert logits is None
    for whole, in_parts in zip(*found, strict=True):
        assert_close(in_parts, whole)


@parametrize("where", ["pre", "sandwich", "olmo2"])
def test_zero_init_starts_from_the_embedding(where):
    gpt = gpt_of(zero_init=True, where=where)
    x = tokens()
    outputs = outputs_of(gpt.transformer.h[-1])
    gpt(x, x)[1].backward()
    expected = gpt.transformer.wte(x) + gpt.transformer.wpe.weight
    assert_close(outputs[0], expected)
    zeros = "c_proj.weight" if where == "pre" else "_after.weight"
    for name, p in gpt.named_parameters():
        slope = p.grad.norm()
        assert slope < 10, name  # an output norm of what is zero would have a slope of 300
        assert slope > 0 or not name.endswith(zeros), name
