"""The optimizers against their papers' equations, and which optimizer gets which parameters."""

import math

import pytest
import torch

from model import GPT, GPTConfig
from training.optimizers import OPTIMIZER, Lamb, Muon, Settings


def model(**kwargs: object) -> GPT:
    sizes = {"block_size": 16, "vocab_size": 20, "n_layer": 2, "n_head": 4, "n_embd": 32}
    return GPT(GPTConfig(**sizes | kwargs))


SETTINGS = Settings(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, muon_lr=0.02)


@pytest.mark.parametrize("name", OPTIMIZER)
@pytest.mark.parametrize("kwargs", [{}, {"tied": False, "position": "t5", "qk_norm": "l2", "differential": True}])
def test_every_parameter_is_in_one_optimizer_and_matrices_alone_are_decayed(name, kwargs):
    gpt = model(**kwargs)
    groups = [group for o in OPTIMIZER[name](gpt, SETTINGS) for group in o.param_groups]
    held = [p for group in groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, gpt.parameters()))
    for group in groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])
    names = {id(p): name for name, p in gpt.named_parameters()}
    if name == "muon":
        assert {n.split(".")[-2] for p in groups[0]["params"] if (n := names[id(p)])} == {"c_attn", "c_proj", "c_fc"}
        assert groups[0]["lr"] == 0.02 and all(group["lr"] == 1e-3 for group in groups[1:])


@pytest.mark.parametrize("name", OPTIMIZER)
def test_a_frozen_parameter_stays(name):
    gpt = model()
    gpt.transformer.wte.weight.requires_grad_(False)
    gpt.transformer.h[0].attn.c_attn.weight.requires_grad_(False)
    before = {n: p.detach().clone() for n, p in gpt.named_parameters()}
    x = torch.randint(20, (2, 16))
    gpt(x, x)[1].backward()
    for o in OPTIMIZER[name](gpt, SETTINGS):
        o.step()
    for n, p in gpt.named_parameters():
        assert torch.equal(p, before[n]) != p.requires_grad, n


def test_lamb_is_the_papers():
    """Algorithm 2 of You et al., spelled out, over three steps; a weight and an update of norm 0 among them."""
    b1, b2, eps, lr, decay = 0.8, 0.9, 1e-6, 0.1, 0.3
    params = [torch.nn.Parameter(torch.randn(3, 4).double()), torch.nn.Parameter(torch.zeros(5).double())]
    ours = [torch.nn.Parameter(p.detach().clone()) for p in params]
    o = Lamb([{"params": ours[:1], "weight_decay": decay}, {"params": ours[1:]}], lr=lr, betas=(b1, b2), eps=eps)
    m, v = ([torch.zeros_like(p) for p in params] for _ in "mv")
    for t in (1, 2, 3):
        for i, (p, q) in enumerate(zip(params, ours, strict=True)):
            g = torch.randn_like(p) if i == 0 or t > 1 else torch.zeros_like(p)
            q.grad = g.clone()
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g**2
            r = (m[i] / (1 - b1**t)) / ((v[i] / (1 - b2**t)).sqrt() + eps)
            u = r + (decay if i == 0 else 0.0) * p.detach()
            size, length = p.norm().item(), u.norm().item()
            p.data -= lr * (size / length if size and length else 1.0) * u
        o.step()
        for p, q in zip(params, ours, strict=True):
            torch.testing.assert_close(q, p, rtol=1e-12, atol=1e-12)


def test_nadamw_is_optaxs():
    """Nesterov's momentum in Adam with a constant momentum, over three steps; the decay does not pass through it.

    m^ = b1 m_t / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t), as in optax.nadamw (Dozat 2016, algorithm 2).
    """
    b1, b2, eps, lr, decay = 0.9, 0.95, 1e-3, 0.01, 0.1
    gpt = model()
    (o,) = OPTIMIZER["nadamw"](gpt, Settings(lr, (b1, b2), decay, eps))
    p = gpt.lm_head.weight
    w, m, v = p.detach().double(), 0.0, 0.0
    for t in (1, 2, 3):
        p.grad = torch.randn_like(p)
        g = p.grad.double()
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        nesterov = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        w = (1 - lr * decay) * w - lr * nesterov / ((v / (1 - b2**t)).sqrt() + eps)
        o.step()
        torch.testing.assert_close(p.double(), w, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("name", "own"), [("adamw", 1e-8), ("nadamw", 1e-8), ("lamb", 1e-6), ("muon", 1e-8)])
def test_epsilon(name, own):
    """The flag's or, without it, the optimizer's own; Muon itself has none."""
    for given, eps in ((None, own), (0.0, 0.0), (1e-24, 1e-24)):
        optimizers = OPTIMIZER[name](model(), Settings(0.1, (0.9, 0.99), 0.1, given))
        groups = [group for o in optimizers if not isinstance(o, Muon) for group in o.param_groups]
        assert groups and all(group["eps"] == eps for group in groups)


@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (32, 128)])
def test_muon_is_torchs_in_float32(shape):
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    a, b = Muon([ours], lr=0.02, weight_decay=0.1), torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1)
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    change = (theirs - 1).norm()
    assert (ours - theirs).norm() < 0.05 * change  # theirs is in bfloat16: measured 0.01 to 0.02
    assert a.state[ours]["momentum_buffer"].equal(b.state[theirs]["momentum_buffer"])


def test_no_optimizer_steps_where_one_has_overflowed(train, monkeypatch):
    """float16: where the embedding's gradient, which is AdamW's, is infinite, Muon must not step on momentum alone."""
    steps, norms = [], []
    step, norm = Muon.step, torch.nn.utils.clip_grad_norm_

    def overflown(*args: object) -> torch.Tensor:
        norms.append(norm(*args))
        return torch.tensor(math.inf) if len(norms) == 2 else norms[-1]

    monkeypatch.setattr(Muon, "step", lambda self: steps.append(len(norms)) or step(self))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflown)
    code, _, err = train("--dtype=float16", "--optimizer=muon", "--max_iters=4")
    assert code == 0, err
    assert steps == [n for n in (1, 3, 4) if norms[n - 1].isfinite()] and len(norms) == 4
