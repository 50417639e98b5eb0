"""variants.py, the tables that train its variants, and the post's total derivative of beta."""

import pytest
import torch
from harness import assert_equal, parametrize
from reference import SIZES, assert_one_model, randomised
from test_optimizers import SETTINGS
from torch.nn import functional as F
from torch.testing import assert_close

from lab.experiments.tables import TABLES
from lab.experiments.times import model_of
from lab.experiments.variants import MAPS, VARIANT, change
from model import GPT, GPTConfig
from training.optimizers import muon

SMALL = SIZES | {"vocab_size": 29, "n_layer": 3, "bias": False}


def gpt_of(variants, **fields):
    """A small GPT with these variants; always of the same seed."""
    torch.manual_seed(0)
    if "beta_" in variants:
        fields["attention"] = "beta"
    if "after_" in variants:
        fields["n_kv_head"] = 2
    return change(GPT(GPTConfig(**SMALL | fields)), variants)


def size(module):
    """The number of weights."""
    return sum(p.numel() for p in module.parameters())


def matrices(gpt):
    """The weights that Muon trains."""
    return muon(gpt, SETTINGS)[0].param_groups[0]["params"]


@pytest.fixture
def x():
    return torch.randint(29, (2, 24))


SEVERAL = "rezero_norm,factorised,shared"


@parametrize("variants", [*(x for x in VARIANT if x != "bfloat16"), SEVERAL])
def test_a_variant_is_causal_and_decodes_with_a_cache_as_without(variants, x):
    """And each of its weights has a gradient; short heads as well."""
    gpt = randomised(gpt_of(variants, heads="SL", window=5)).double()
    assert_one_model(gpt, x, [7, 1, 1, 15], 15)


@parametrize("variant", ["rezero", "fixup", "rezero_norm"])
def test_rezero_and_fixup_begin_as_the_identity(variant, x):
    gpt = gpt_of(variant)
    h = gpt.transformer.wpe(gpt.transformer.wte(x), torch.arange(24))
    if variant == "rezero_norm":
        h = F.layer_norm(h, (32,))
    logits = h @ gpt.lm_head.weight.T
    assert_close(gpt(x, x)[0], logits, rtol=1e-5, atol=1e-6)


def test_fixups_first_weights():
    """Fixup: sqrt(2 / 32) times L^(-1/2), L = 6."""
    first = gpt_of("fixup").transformer.h[2].mlp.c_fc[0].weight
    assert first.std().item() == pytest.approx((2 / 32 / 6) ** 0.5, rel=0.05)


def test_the_maps_of_beta():
    """Of the numbers 3 and -4: their norm is 5, their squares' sum 25, their sizes' sum 7."""
    divisors = {"unit": 5, "root": 26**0.5, "l1": 8, "max": 5}
    x = torch.tensor([3.0, -4.0])
    for name, found in MAPS.items():
        assert_close(found(x), x / divisors[name])


def test_the_numbers_of_weights():
    """V E + E C of an embedding, E C more of a head that shares it."""
    V, C, E = 29, 32, 5
    assert len(matrices(gpt_of("shared"))) == 4  # each once
    added = {
        "factorised": V * E + 2 * E * C - V * C,
        "shared": -2 * size(gpt_of("").transformer.h[0]),
    }
    for name, weights in added.items():
        assert size(gpt_of(name)) - size(gpt_of("")) == weights, name


def attention(Q, K, V):
    """beta(Q K^T) V: Att(Q, K, V) of the post on beta ("Other normalizing maps")."""
    p = Q @ K.T
    return p / (1 + p.norm(dim=1, keepdim=True)) @ V


def test_the_total_derivative_of_beta_attention():
    """dAtt = D Z V - diag(f) Att + Att(Q, K, V'), Z = Q' K^T + Q K'^T, D = diag(1 / (1 + r)).

    f_i = <p_i, z_i> / (r_i (1 + r_i)), with r_i = ||p_i||. The post has diag(<p_i, z_i> / (r_i^2
    (1 + r_i))) Att in the place of the first two terms, which is right only if each z_i is a
    multiple of p_i: for example if Q' is a multiple of Q.
    """
    Q, K, V, dQ, dK, dV = torch.randn(6, 12, 4).double()
    y, true = torch.func.jvp(attention, (Q, K, V), (dQ, dK, dV))
    p = Q @ K.T
    z = dQ @ K.T + Q @ dK.T
    r = p.norm(dim=1, keepdim=True)
    f = (p * z).sum(1, keepdim=True) / (r * (1 + r))
    ours = z / (1 + r) @ V - f * y + attention(Q, K, dV)
    assert_equal(ours, true, 1e-12)
    post = f / r * y + attention(Q, K, dV)
    assert (post - true).norm() > 0.1 * true.norm()


@parametrize("table", ["narang", "maps"])
def test_every_row_is_a_model(table):
    t = TABLES[table]
    for flags in t.rows.values():
        model_of(t.file, t.flags | flags, 65)  # raises an error for wrong flags
