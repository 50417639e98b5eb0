"""The optimizers: AdamW, NAdamW or LAMB for everything; Muon for the matrices of the blocks, beside AdamW."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class Settings:
    """The flags of train.py that optimizers read."""

    lr: float  # the schedule's largest learning rate, for AdamW, NAdamW or LAMB
    betas: tuple[float, float]  # of AdamW, NAdamW or LAMB
    weight_decay: float
    eps: float | None = None  # AdamW, NAdamW and LAMB divide by sqrt(v) + eps; None: 1e-8, LAMB: 1e-6
    fused: bool = True  # one kernel for AdamW's step, on CUDA and CPU
    muon_lr: float = 0.02  # the schedule's largest learning rate, for Muon
    muon_beta: float = 0.95  # its momentum


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum, orthogonalised, for matrices.

        m_t = mu m_t-1 + (1 - mu) g_t      u_t = orthogonal((1 - mu) g_t + mu m_t)
        w_t = (1 - lr weight_decay) w_t-1 - lr sqrt(max(1, rows / columns)) u_t

    As torch.optim.Muon, but only a GPU orthogonalises in bfloat16: a CPU without bfloat16 units would take four times
    as long as in float32. A layer's queries, keys and values are one matrix (c_attn), which is orthogonalised as one.
    """

    def __init__(self, params, lr: float, weight_decay: float = 0.1, momentum: float = 0.95, steps: int = 5):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "steps": steps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            mu, lr = group["momentum"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                m = self.state[p]["momentum_buffer"]
                m.lerp_(p.grad, 1 - mu)
                u = orthogonal(p.grad.lerp(m, mu), group["steps"])
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(u, alpha=-lr * math.sqrt(max(1, p.shape[0] / p.shape[1])))


def orthogonal(g: torch.Tensor, steps: int) -> torch.Tensor:
    """Nearly U V^T of a matrix g = U S V^T (singular values 0.7 to 1.2): Jordan's quintic Newton-Schulz iteration."""
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = g.shape[0] > g.shape[1]
    x = x.mT if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).to(g.dtype)


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2019, algorithm 2): Adam's update, rescaled to the size of the weights, layer by layer.

        m_t = b1 m_t-1 + (1 - b1) g_t      v_t = b2 v_t-1 + (1 - b2) g_t^2
        r_t = (m_t / (1 - b1^t)) / (sqrt(v_t / (1 - b2^t)) + eps)      u_t = r_t + weight_decay w_t-1
        w_t = w_t-1 - lr phi(||w_t-1||) / ||u_t|| u_t

    The paper leaves phi open; here phi(z) = z. Each norm is of a whole parameter; if one is 0, their ratio is 1. A
    layer's queries, keys and values are one parameter (c_attn), with one ratio.
    """

    def __init__(self, params, lr: float, betas: tuple = (0.9, 0.999), weight_decay: float = 0.0, eps: float = 1e-6):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                t = state["step"]
                m = state["m"].lerp_(p.grad, 1 - b1)
                v = state["v"].lerp_(p.grad.square(), 1 - b2)
                u = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + group["eps"]) + group["weight_decay"] * p
                size, length = p.norm(), u.norm()
                ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
                p.sub_(group["lr"] * ratio * u)


def by_decay(params: list, settings: Settings) -> list[dict]:
    """Two groups of the parameters that are trained: matrices and embeddings are decayed, biases and norms are not."""
    params = [p for p in params if p.requires_grad]
    eps = {} if settings.eps is None else {"eps": settings.eps}  # else each optimizer has its own
    decayed = {"params": [p for p in params if p.dim() >= 2], "weight_decay": settings.weight_decay} | eps
    return [decayed, {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0} | eps]


def adamw(params: list, s: Settings) -> torch.optim.AdamW:
    return torch.optim.AdamW(by_decay(params, s), lr=s.lr, betas=s.betas, fused=s.fused)


def nadamw(params: list, s: Settings) -> torch.optim.NAdam:
    """AdamW with Nesterov's momentum (Dozat 2016), which is beta1 from the first step to the last, as in optax."""
    own = {"momentum_decay": math.inf, "decoupled_weight_decay": True}  # beta1 (1 - 0.96^(t inf) / 2) is beta1
    return torch.optim.NAdam(by_decay(params, s), lr=s.lr, betas=s.betas, **own)


def muon(model: torch.nn.Module, s: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the Linears' matrices inside the blocks; AdamW for embeddings, head, norms, biases and scalars."""
    linears = [m.weight for m in model.transformer.h.modules() if isinstance(m, torch.nn.Linear)]
    rest = [p for p in model.parameters() if all(p is not m for m in linears)]
    return [Muon([p for p in linears if p.requires_grad], s.muon_lr, s.weight_decay, s.muon_beta), adamw(rest, s)]


# {name: (model, settings) -> its optimizers}: every parameter that is trained is in exactly one of them
OPTIMIZER: dict[str, Callable] = {
    "adamw": lambda model, s: [adamw(list(model.parameters()), s)],
    "nadamw": lambda model, s: [nadamw(list(model.parameters()), s)],
    "muon": muon,
    "lamb": lambda model, s: [Lamb(by_decay(list(model.parameters()), s), lr=s.lr, betas=s.betas)],
}
