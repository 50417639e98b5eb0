"""The optimizers: AdamW for everything; Muon for the blocks' matrices, beside AdamW."""

import math
from collections.abc import Iterable
from types import SimpleNamespace

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum, orthogonalised, for matrices.

        m_t = mu m_t-1 + (1 - mu) g_t      u_t = orthogonal((1 - mu) g_t + mu m_t)
        w_t = (1 - lr weight_decay) w_t-1 - lr sqrt(max(1, rows / columns)) u_t

    As torch.optim.Muon, but only a GPU orthogonalises in bfloat16: a CPU without bfloat16 units
    would take four times as long as in float32. The queries, keys and values of a layer are one
    matrix (c_attn), and are orthogonalised as one.
    """

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr = group["lr"]
            mu = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue

                # momentum, then Nesterov's step from it
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - mu)
                u = orthogonal(p.grad.lerp(m, mu))

                p.mul_(1 - lr * group["weight_decay"])
                p.add_(u, alpha=-lr * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def orthogonal(g: Tensor) -> Tensor:
    """Nearly U V^T of a matrix g = U S V^T, by Jordan's quintic Newton-Schulz iteration.

    After its five steps the singular values are 0.7 to 1.2.
    """
    if g.shape[0] > g.shape[1]:
        return orthogonal(g.mT).mT
    x = g.bfloat16() if g.is_cuda else g.float()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    return x.to(g.dtype)


def adam_settings(params: Iterable[Tensor], c: SimpleNamespace) -> dict:
    """What all of Adam's family take. Only what has two dimensions is decayed.

    c: train.py's flags; without adam_eps each optimizer has its own eps.
    """
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": c.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    settings = {"params": groups, "lr": c.learning_rate, "betas": (c.beta1, c.beta2)}
    return settings if c.adam_eps is None else settings | {"eps": c.adam_eps}


def adamw(params: Iterable[Tensor], c: SimpleNamespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(**adam_settings(params, c), fused=True)


def muon(model: nn.Module, c: SimpleNamespace) -> list[torch.optim.Optimizer]:
    """Muon for the Linears' matrices inside the blocks; AdamW for all other parameters."""
    matrices = [m.weight for m in model.transformer.h.modules() if isinstance(m, nn.Linear)]
    by_muon = {*matrices}
    return [
        Muon(matrices, {"lr": c.muon_lr, "weight_decay": c.weight_decay, "momentum": c.muon_beta}),
        adamw([p for p in model.parameters() if p not in by_muon], c),
    ]


# {name: f(model, c) -> its optimizers}: each parameter is in exactly one of these optimizers; c has
# train.py's flags learning_rate, beta1, beta2, weight_decay, adam_eps, muon_lr and muon_beta
OPTIMIZER = {
    "adamw": lambda model, c: [adamw(model.parameters(), c)],
    "muon": muon,
}
