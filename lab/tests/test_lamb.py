"""LAMB and NAdamW against their papers' equations. test_positions.py resumes a run."""

from types import SimpleNamespace

import torch
from harness import parametrize
from test_optimizers import NOT_PLAIN, check_groups
from torch.testing import assert_close

import lab.ideas.lamb  # noqa: F401
from training.optimizers import OPTIMIZER


@parametrize("name, exact", [("lamb", 1e-12), ("nadamw", 1e-6)])
@parametrize("start, decay", [(torch.eye(3), 0.3), (torch.zeros(5), 0.0)])
def test_three_steps_are_the_papers(name, exact, start, decay):
    """The first gradient is 0. What has one dimension is not decayed.

    LAMB: algorithm 2 of You et al. Without a decay its update has the norm 0; the second start has
    the norm 0. NAdamW: algorithm 2 of Dozat 2016, as optax.nadamw, with a constant momentum:
    m^ = b1 m_t / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t).
    """
    w = start.double()
    p = torch.nn.Parameter(w.clone())
    c = {"learning_rate": 0.1, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.3, "adam_eps": 1e-6}
    (o,) = OPTIMIZER[name](SimpleNamespace(parameters=lambda: [p]), SimpleNamespace(**c))
    m = 0.0
    v = 0.0
    for t in (1, 2, 3):
        p.grad = torch.randn_like(w) * (t - 1)
        m = 0.8 * m + 0.2 * p.grad
        v = 0.9 * v + 0.1 * p.grad**2
        deviation = (v / (1 - 0.9**t)).sqrt() + 1e-6
        if name == "lamb":
            u = m / (1 - 0.8**t) / deviation + decay * w
            u = u * (w.norm() / u.norm() if w.norm() and u.norm() else 1.0)
        else:
            u = 0.8 * m / (1 - 0.8 ** (t + 1)) + 0.2 * p.grad / (1 - 0.8**t)
            u = u / deviation + decay * w
        w = w - 0.1 * u
        o.step()
        assert_close(p.detach(), w, rtol=exact, atol=exact)


@parametrize("name", ["lamb", "nadamw"])
@parametrize("fields", [{}, NOT_PLAIN])
def test_every_trained_parameter_is_in_one_group(name, fields):
    check_groups(name, fields)
