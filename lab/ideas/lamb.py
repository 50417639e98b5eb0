"""LAMB and NAdamW, for train.py: --import=lab.ideas.lamb --optimizer=lamb.

--beta1, --beta2 and --adam_eps are their flags too; without --adam_eps LAMB's eps is 1e-6.
"""

import math
from types import SimpleNamespace

import torch

from training.optimizers import OPTIMIZER, adam_settings


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2019, algorithm 2): Adam's update, rescaled to each layer's weights.

        m_t = b1 m_t-1 + (1 - b1) g_t      v_t = b2 v_t-1 + (1 - b2) g_t^2
        r_t = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + eps)
        u_t = r_t + weight_decay w_t-1
        w_t = w_t-1 - lr phi(||w_t-1||) / ||u_t|| u_t

    The paper leaves phi open; here phi(z) = z. Each norm is of a whole parameter; if one is 0,
    their ratio is 1. The queries, keys and values of a layer are one parameter (c_attn), with one
    ratio.
    """

    def __init__(
        self,
        params,
        lr: float,
        betas: tuple = (0.9, 0.999),
        weight_decay: float = 0.0,
        eps: float = 1e-6,
    ):
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue

                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                t = state["step"]

                # Adam's update, and how long it should be
                m = state["m"].lerp_(p.grad, 1 - b1)
                v = state["v"].lerp_(p.grad.square(), 1 - b2)
                r = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                u = r + group["weight_decay"] * p
                size = p.norm()
                length = u.norm()
                ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
                p.sub_(group["lr"] * ratio * u)


def lamb(model: torch.nn.Module, c: SimpleNamespace) -> list[Lamb]:
    return [Lamb(**adam_settings(list(model.parameters()), c))]


def nadamw(model: torch.nn.Module, c: SimpleNamespace) -> list[torch.optim.NAdam]:
    """AdamW with Nesterov's momentum (Dozat 2016), which is beta1 in all steps, as in optax."""
    nadam = torch.optim.NAdam(
        **adam_settings(list(model.parameters()), c),
        momentum_decay=math.inf,  # the momentum of step t is beta1 (1 - 0.96^(t inf) / 2) = beta1
        decoupled_weight_decay=True,
    )
    return [nadam]


OPTIMIZER["lamb"] = lamb
OPTIMIZER["nadamw"] = nadamw
