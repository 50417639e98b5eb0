"""The variants of variants.py, the tables that train them, and the post's total derivative of beta attention."""

import math

import pytest
import torch
from reference import randomised
from torch.nn import functional as F

from attention.scores import scores
from lab.experiments.tables import TABLES
from lab.experiments.times import model_of
from lab.experiments.variants import MAPS, VARIANT, change
from model import GPT, GPTConfig
from training.optimizers import Settings, muon

SMALL = {"block_size": 24, "vocab_size": 29, "n_layer": 3, "n_head": 4, "n_embd": 32, "bias": False}


def gpt_of(variants: str, **more: object) -> GPT:
    """A small GPT with these variants; of one seed."""
    torch.manual_seed(0)
    more |= {"attention": "beta"} if "beta_" in variants else {}
    return change(GPT(GPTConfig(**SMALL | more)), variants)


def size(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    "variants",
    [*(x for x in VARIANT if x != "bfloat16"), "rezero_norm,factorised,qkv_apart,synthesizer_random_plus,shared"],
)
def test_a_variant_is_causal_and_decodes_with_a_cache_as_without(variants):
    """And each of its weights has a gradient; short heads as well."""
    gpt, x = randomised(gpt_of(variants, heads="SL", window=5)), torch.randint(29, (2, 24))
    loss = gpt(x, x)[1]
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in gpt.parameters())
    other = x.clone()
    other[:, 15:] = (x[:, 15:] + 1) % 29
    with torch.no_grad():
        y, changed = gpt(x, x)[0], gpt(other, x)[0]
        cache = gpt.new_cache()
        steps = [gpt(part, part, cache=cache)[0] for part in x.split((7, 1, 1, 15), dim=1)]
    assert torch.equal(y[:, :15], changed[:, :15]) and not y[:, 15:].allclose(changed[:, 15:])
    torch.testing.assert_close(torch.cat(steps, dim=1), y, rtol=1e-4, atol=1e-4)


def test_rezero_and_fixup_begin_as_the_identity():
    x = torch.randint(29, (2, 24))
    for variant in ("rezero", "fixup", "rezero_norm"):
        gpt = gpt_of(variant)
        h = gpt.transformer.wte(x) + gpt.transformer.wpe(torch.arange(24))
        h = F.layer_norm(h, (32,)) if variant == "rezero_norm" else h
        torch.testing.assert_close(gpt(x, x)[0], h @ gpt.lm_head.weight.T, rtol=1e-5, atol=1e-6)


def test_the_numbers_of_weights():
    """V E + E C for an embedding, and E C more for a head that shares it; one block; no queries where none are used."""
    V, C, T, E = 29, 32, 24, 5
    base = size(gpt_of(""))
    assert base - size(gpt_of("factorised")) == V * C - (V * E + 2 * E * C)
    assert size(gpt_of("", tied=False)) - size(gpt_of("factorised", tied=False)) == V * C - (V * E + E * C)
    shared = gpt_of("shared")
    assert 3 * size(shared.transformer.h) == size(gpt_of("").transformer.h)
    assert len(muon(shared, Settings(1e-3, (0.9, 0.99), 0.1))[0].param_groups[0]["params"]) == 4  # each once
    for kind, more in (("dense", C * T - C * C), ("dense_plus", C * T), ("random", 4 * T * T - 2 * C * C),
                       ("random_plus", 4 * T * T)):  # fmt: skip
        assert size(gpt_of(f"synthesizer_{kind}")) - base == 3 * more, kind


def test_qkv_apart_is_the_same_model_with_three_matrices():
    x = torch.randint(29, (2, 24))
    for more in ({"n_kv_head": 2, "bias": True}, {}):
        assert torch.equal(gpt_of("", **more)(x, x)[0], gpt_of("qkv_apart", **more)(x, x)[0])
    matrices = muon(gpt_of("qkv_apart"), Settings(1e-3, (0.9, 0.99), 0.1))[0].param_groups[0]["params"]
    assert sorted(p.shape for p in matrices).count((32, 32)) == 3 * 4  # q, k, v and c_proj of 3 layers


@pytest.mark.parametrize("kind", ["dense", "dense_plus", "random", "random_plus"])
def test_a_synthesizer_has_its_scores(kind):
    attn, x = randomised(gpt_of(f"synthesizer_{kind}")).transformer.h[0].attn, torch.randn(2, 20, 32)
    q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in attn.c_attn(x).chunk(3, dim=-1))
    s = scores(q, k) if "plus" in kind else 0.0
    s = s + (q.relu() @ attn.synthesizer.table if "dense" in kind else attn.synthesizer.table[:, :20])[..., :20]
    y = s.masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf).softmax(-1) @ v
    torch.testing.assert_close(attn(x), attn.c_proj(y.transpose(1, 2).flatten(2)))


# -----------------------------------------------------------------------------
# The post on beta, "Other normalizing maps"


def attention(Q, K, V):
    """Att(Q, K, V) = beta(Q K^T) V, as in the post: no mask, no scale."""
    p = Q @ K.T
    return p / (1 + p.norm(dim=1, keepdim=True)) @ V


def test_the_total_derivative_of_beta_attention():
    """dAtt = D Z V - diag(f) Att + Att(Q, K, V'), Z = Q' K^T + Q K'^T, D = diag(1 / (1 + r)), f_i = <p_i, z_i> / (r_i
    (1 + r_i)), with r_i = ||p_i||. The post has diag(<p_i, z_i> / (r_i^2 (1 + r_i))) Att in the place of the first two
    terms, which is right only if each z_i is a multiple of p_i: for example if Q' is a multiple of Q."""
    Q, K, V, *changes = torch.randn(6, 12, 4, dtype=torch.float64)
    for along in (False, True):
        dQ, dK, dV = (0.3 * Q, -2.0 * K, changes[2]) if along else changes
        y, true = torch.func.jvp(attention, (Q, K, V), (dQ, dK, dV))
        p, z = Q @ K.T, dQ @ K.T + Q @ dK.T
        r, pz = p.norm(dim=1, keepdim=True), (p * z).sum(1, keepdim=True)
        ours = z / (1 + r) @ V - pz / (r * (1 + r)) * y + attention(Q, K, dV)
        torch.testing.assert_close(ours, true, rtol=0, atol=1e-12)
        error = (pz / (r**2 * (1 + r)) * y + attention(Q, K, dV) - true).norm() / true.norm()
        assert error < 1e-12 if along else error > 0.1


@pytest.mark.parametrize("name", MAPS)
def test_no_map_has_the_posts_property(name):
    """d map(x) h = f(x, h) map(x) for all h would make the Jacobian a matrix of rank 1; its rank is n, or n - 1."""
    x = torch.randn(8, dtype=torch.float64)
    rank = torch.linalg.matrix_rank(torch.autograd.functional.jacobian(MAPS[name], x))
    assert rank == (7 if name == "unit" else 8)


# -----------------------------------------------------------------------------
# The script


def test_mistakes_are_said(run, data):
    flags = ("config/train_shakespeare_char_cpu.py", f"--dataset={data}", "--device=cpu")
    for wrong, says in ((["--variant=rezro"], "'rezro' is not one of rezero,"),
                        (["--variant=rezero", "--where=post"], "is for where='pre', not 'post'"),
                        (["--variant=beta_l1"], "add --attention=beta"),
                        (["--variant=synthesizer_random", "--position=rope"], "cannot be combined")):  # fmt: skip
        code, _, err = run("lab.experiments.variants", *flags, *wrong)
        assert code == 2 and says in err
    assert isinstance(GPT(GPTConfig(**SMALL)).transformer.h[0].ln_1, torch.nn.LayerNorm)


def test_every_row_is_a_model():
    for t in (TABLES[name] for name in ("narang", "maps", "qkv")):
        for row, flags in t.rows.items():
            gpt, _ = model_of(t.file, t.flags | flags, t.vocab_size)
            assert gpt(torch.zeros(1, 9, dtype=torch.long))[0].shape == (1, 1, 65), row
