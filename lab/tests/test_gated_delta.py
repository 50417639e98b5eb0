"""Gated DeltaNet: its equation, decoding and extreme inputs. test_zoo.py has what all share."""

import pytest
import torch
from harness import assert_equal
from reference import randomised

from attention.cache import Cache
from lab.ideas.documents import Documents
from lab.ideas.gated_delta import GatedDelta, chunked
from model import GPTConfig

DOCUMENTS = Documents(torch.arange(140).expand(2, -1) % 90)  # two in each row


@pytest.fixture
def layer():
    """A layer that remembers about 50 tokens."""
    layer = randomised(GatedDelta(GPTConfig(n_head=2, n_embd=12, conv=3).resolved(), 0))
    layer.log_A.data.fill_(-4.0)
    return layer.double()


@pytest.fixture
def x():
    return torch.randn(2, 140, 12).double().requires_grad_()


def one_head(q, k, v, beta, log_alpha, S):
    """The same as chunked: q (T, D), and so on."""
    outputs = []
    for t in range(len(q)):
        write = beta[t] * k[t][:, None]  # (D, 1)
        S = log_alpha[t].exp() * (torch.eye(5) - write * k[t]) @ S + write * v[t]
        outputs.append(q[t] @ S)
    return torch.stack(outputs), S


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_chunks_are_the_equation(length):
    """With a state before them: y, the state after them, and all gradients."""
    q, k, v = 0.4 * torch.randn(3, 2, 3, length, 5).double()
    beta, rate = torch.rand(2, 2, 3, length, 1).double()
    S = torch.randn(2, 3, 5, 5).double()
    results = []
    for form in (chunked, torch.vmap(torch.vmap(one_head))):
        output, gradients = torch.func.vjp(form, q, k, v, beta, -0.1 * rate, S)
        results.append([*output, *gradients(output)])
    assert_equal(*results, 1e-10)


def test_decoding_with_a_cache_of_constant_size(layer, x):
    """In pieces of many tokens and of one."""
    cache = Cache(140)
    decoded = [layer(piece, cache) for piece in x.split((70, 68, 1, 1), 1)]
    assert_equal(torch.cat(decoded, 1), layer(x), 1e-10)
    assert cache.state[layer].shape == (2, 2, 6, 6)


def test_extreme_inputs_give_finite_values_and_gradients(layer, x):
    """A row of zeros and a row of large numbers, in float32."""
    scale = torch.tensor([0.0, 100.0])[:, None, None]
    y = layer.float()(scale * x.float(), DOCUMENTS)
    y.sum().backward()
    for result in (y, x.grad, *(p.grad for p in layer.parameters())):
        assert result.isfinite().all()
