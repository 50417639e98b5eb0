"""LAMB and NAdamW against their papers' equations. test_positions.py resumes a run."""

from types import SimpleNamespace

import torch
from harness import parametrize
from test_optimizers import NOT_PLAIN, check_groups, model
from torch.testing import assert_close

from lab.ideas.lamb import Lamb
from training.optimizers import OPTIMIZER


@parametrize("start, decay", [(torch.eye(3).double(), 0.3), (torch.zeros(5).double(), 0.0)])
def test_lamb_is_the_papers(start, decay):
    """Algorithm 2 of You et al., spelled out, over three steps; the first gradient is 0.

    Without a decay its update has the norm 0; the second start has the norm 0.
    """
    b1 = 0.8
    b2 = 0.9
    w = start.clone()
    p = torch.nn.Parameter(start)
    o = Lamb([p], lr=0.1, betas=(b1, b2), weight_decay=decay, eps=1e-6)
    m = 0.0
    v = 0.0
    for t in (1, 2, 3):
        g = torch.randn_like(w) * (t - 1)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        deviation = (v / (1 - b2**t)).sqrt()
        u = m / (1 - b1**t) / (deviation + 1e-6) + decay * w
        ratio = 1.0
        if w.norm() and u.norm():
            ratio = w.norm() / u.norm()
        w -= 0.1 * ratio * u
        p.grad = g
        o.step()
        assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


def test_nadamw_is_optaxs():
    """Nesterov's momentum in Adam, with a constant momentum, over three steps; decay is apart.

    m^ = b1 m_t / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t), as in optax.nadamw (Dozat 2016,
    algorithm 2).
    """
    b1 = 0.9
    b2 = 0.95
    gpt = model()
    settings = SimpleNamespace(
        learning_rate=0.01, beta1=b1, beta2=b2, weight_decay=0.1, adam_eps=1e-3
    )
    (o,) = OPTIMIZER["nadamw"](gpt, settings)
    p = gpt.lm_head.weight

    w = p.detach().double()
    m = 0.0
    v = 0.0
    for t in (1, 2, 3):
        p.grad = torch.randn_like(p)
        g = p.grad.double()
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        nesterov = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        deviation = (v / (1 - b2**t)).sqrt()
        w = (1 - 0.01 * 0.1) * w - 0.01 * nesterov / (deviation + 1e-3)

        o.step()
        assert_close(p.double(), w, rtol=1e-5, atol=1e-7)


@parametrize("name", ["lamb", "nadamw"])
@parametrize("fields", [{}, NOT_PLAIN])
def test_every_trained_parameter_is_in_one_group(name, fields):
    check_groups(name, fields)
