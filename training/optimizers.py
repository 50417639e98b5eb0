"""The optimizers: AdamW for everything; Muon for the blocks' matrices, beside AdamW."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass
class Settings:
    """The flags of train.py that optimizers read."""

    lr: float  # the schedule's largest learning rate, but for Muon
    betas: tuple[float, float]  # of AdamW
    weight_decay: float
    eps: float | None = None  # AdamW divides by sqrt(v) + eps; None: its default
    fused: bool = True  # one kernel for AdamW's step, on CUDA and CPU
    muon_lr: float = 0.02  # the schedule's largest learning rate, for Muon
    muon_beta: float = 0.95  # Muon's momentum


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum, orthogonalised, for matrices.

        m_t = mu m_t-1 + (1 - mu) g_t      u_t = orthogonal((1 - mu) g_t + mu m_t)
        w_t = (1 - lr weight_decay) w_t-1 - lr sqrt(max(1, rows / columns)) u_t

    As torch.optim.Muon, but only a GPU orthogonalises in bfloat16: a CPU without bfloat16 units
    would take four times as long as in float32. The queries, keys and values of a layer are one
    matrix (c_attn), and are orthogonalised as one.
    """

    def __init__(self, params, lr, weight_decay=0.1, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            mu = group["momentum"]
            lr = group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                m = state["momentum_buffer"]
                m.lerp_(p.grad, 1 - mu)
                u = orthogonal(p.grad.lerp(m, mu))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(u, alpha=-lr * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Nearly U V^T of a matrix g = U S V^T, by Jordan's quintic Newton-Schulz iteration.

    After its five steps the singular values are 0.7 to 1.2.
    """
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = g.shape[0] > g.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.mT
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    return (x.mT if tall else x).to(g.dtype)


def by_decay(params: Iterable, settings: Settings) -> list[dict]:
    """Two groups of the trained parameters: matrices and embeddings are decayed, others are not."""
    params = [p for p in params if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def adam_settings(params: Iterable, s: Settings) -> dict:
    """What all of Adam's family take. Without --adam_eps each optimizer has its own eps."""
    settings = {"params": by_decay(params, s), "lr": s.lr, "betas": s.betas}
    if s.eps is not None:
        settings["eps"] = s.eps
    return settings


def adamw(params: Iterable, s: Settings) -> torch.optim.AdamW:
    return torch.optim.AdamW(**adam_settings(params, s), fused=s.fused)


def muon(model: torch.nn.Module, s: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the Linears' matrices inside the blocks; AdamW for all other parameters."""
    matrices = [
        m.weight
        for m in model.transformer.h.modules()
        if isinstance(m, torch.nn.Linear) and m.weight.requires_grad
    ]
    by_muon = set(matrices)
    return [
        Muon(matrices, lr=s.muon_lr, weight_decay=s.weight_decay, momentum=s.muon_beta),
        adamw([p for p in model.parameters() if p not in by_muon], s),
    ]


# {name: (model, settings) -> its optimizers}: each parameter that is trained is in exactly one of
# these optimizers
OPTIMIZER = {
    "adamw": lambda model, s: [adamw(model.parameters(), s)],
    "muon": muon,
}
