"""Ideas of later papers: each is a function of scores.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas --attention=sink

Importing this file adds them to model.ATTENTION; a file of your own does the same. model.py
explains the arguments of a definition. lab/experiments/results/ideas.md has their losses.

docs/zoo.md has these and others, which are no functions of scores.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.fast import general_form, laser_by_exp, sdpa, windowed
from attention.forms import FORM, Form
from attention.scores import learned, of_token
from errors import UserError
from lab.ideas.stick_breaking import stick_breaking
from model import ATTENTION, CausalSelfAttention, laser_attention


def sink_attention(s, seen, v, drop, b=learned(0.0)):
    """y = e^s / (e^b + sum e^s) v (gpt-oss, arXiv 2508.10925).

    The learned score b takes weight away, and has no value.
    """
    s = s.where(seen, -math.inf)
    return drop((s - s.logsumexp(-1, keepdim=True).logaddexp(b)).exp()) @ v


def forgetting_attention(s, seen, v, drop, f=of_token(4.0)):
    """y = softmax(s_ij + sum of log sigmoid(f_l) over j < l <= i) v (FoX, arXiv 2503.02130).

    The sum is c_i - c_j of running sums c, and softmax does not change with c_i.
    """
    c = F.logsigmoid(f).cumsum(-2).mT
    return drop((s - c).where(seen, -math.inf).softmax(-1)) @ v


def ssmax_attention(s, seen, v, drop, b=learned(0.43)):
    """SSMax: y = softmax(b log(n) s) v, n the number of keys seen (arXiv 2501.19399)."""
    s = b * seen.sum(-1, keepdim=True).log() * s
    return drop(s.where(seen, -math.inf).softmax(-1)) @ v


def softpick_attention(s, seen, v, drop, fade):
    """y = relu(e^s - 1) / (sum |e^s - 1| + 1e-6) v, all times e^-m, m = max(0, s).

    No key becomes a sink (arXiv 2504.20966).
    """
    s = s.where(seen, 0.0)  # e^0 - 1 = 0
    m = s.amax(-1, keepdim=True).clamp(min=0)
    x = fade((s - m).exp() - (-m).exp())
    return drop(x.relu() / (x.abs().sum(-1, keepdim=True) + 1e-6)) @ v


def log_sticks(s, seen, own_weight):
    """log a_ij: a_ij = sigmoid(s_ij) times the product of 1 - sigmoid(s_il) over j < l < i.

    own_weight: whether the token itself gets what is left of its stick; else it has no weight.
    """
    last = seen & (sums_from_here(seen) == 1)  # the last key that is seen, the token's own
    before = seen & ~last
    left = sums_from_here(F.logsigmoid(-s).where(before, 0.0))
    log_weights = (s + left).where(before, -math.inf)
    return torch.where(last, left[..., :1], log_weights) if own_weight else log_weights


def sums_from_here(x: Tensor) -> Tensor:
    """The sums of x (..., T) from each place to the last one."""
    return x.flip(-1).cumsum(-1).flip(-1)


def stick_breaking_attention(s, seen, v, drop):
    """y = a v: from the last key back each takes a share sigmoid(s) of the rest (2410.17980)."""
    return drop(log_sticks(s, seen, own_weight=False).exp()) @ v


def stick_laser_attention(s, seen, v):
    """y = log(sum_j a_ij exp(v_j)): stick-breaking; the rest goes to the own token (ours)."""
    log_weights = log_sticks(s, seen, own_weight=True)
    return (log_weights[..., None] + v[..., None, :, :]).logsumexp(-2)


def stick_mean(s, seen, v):
    """What stick_laser_attention is the logarithm of."""
    return log_sticks(s, seen, own_weight=True).exp() @ v


def top_k_attention(s, seen, v, drop):
    """y = softmax(s) v over a query's 8 largest scores (Sparse Transformer, arXiv 1912.11637)."""
    s = s.where(seen, -math.inf)
    least = s.topk(min(8, s.shape[-1]), dim=-1).values[..., -1:]
    return drop(s.where(s >= least, -math.inf).softmax(-1)) @ v


def beta_learned_attention(s, seen, v, drop, fade, b=learned(0.0)):
    """y = s / (e^b + ||s||) v: beta with a learned scalar in the place of its 1 (ours)."""
    s = fade(s).where(seen, 0.0)
    return drop(s / (b.exp() + s.norm(dim=-1, keepdim=True))) @ v


def beta_squared_learned_attention(s, seen, v, drop, fade, b=learned(0.0)):
    """y = s^2 / (e^b + sum s^2) v: beta squared with a learned scalar instead of its 1 (ours)."""
    s2 = fade(s.square()).where(seen, 0.0)
    return drop(s2 / (b.exp() + s2.sum(-1, keepdim=True))) @ v


def laser_temperature_attention(s, seen, v, t=learned(1.0)):
    """y = log(softmax(s) exp(t v)) / t: LASER at t = 1, and softmax in the limit t = 0.

    The read of the Free Energy Mixer (arXiv 2602.07160), without its gates.
    """
    log_weights = s.where(seen, -math.inf).log_softmax(-1)
    t = t[..., None]
    return (log_weights[..., None] + t * v[..., None, :, :]).logsumexp(-2) / t[..., 0]


def by_laser(mean: Callable, definition: Callable) -> Callable:
    """The code of LASER with a temperature, which is LASER's of t v. mean: see laser_by_exp."""
    laser = laser_by_exp(mean, laser_attention)

    def with_temperature(q, k, v, *, t=1.0, **settings):
        return (laser(q, k, t * v, **settings) / t).to(v.dtype)

    return with_temperature


def delta_rule_attention(s, seen, v, k, fade):
    """y_i = S_i q_i, S_i = S_(i-1) (I - b_i k_i k_i^T) + b_i v_i k_i^T (DeltaNet, 2406.06484).

    Keys are divided by their length |k|; the rate b = |k|^2 / (1 + |k|^2) is ours, DeltaNet's is a
    function of x. All steps at once: y = A (I + L)^-1 (b v), A = q k^T of seen keys, and
    L_jl = b_j k_j k_l for l < j.
    """
    length = k.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    unit = F.normalize(k, dim=-1)
    b = length.square() / (1 + length.square())
    identity = torch.eye(k.shape[-2], dtype=s.dtype, device=s.device)
    system = (b * (unit @ unit.mT)).tril(-1) + identity  # (B, H, T, T)
    return with_updates(fade(s / length.mT), seen, system, b * v)


def with_updates(weights: Tensor, seen: Tensor, system: Tensor, v: Tensor) -> Tensor:
    """y = weights system^-1 v over the keys that are seen: the delta rule's, all steps at once."""
    weights = weights.where(seen, 0.0)  # (B, H, Tq, T)
    if seen[..., 0].all():  # every query sees all keys before its own: all share a system
        return weights @ torch.linalg.solve_triangular(system, v, upper=False)

    # a system for each query's own keys: slow
    identity = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device)
    both = seen[..., :, None] & seen[..., None, :]
    systems = torch.where(both, system[..., None, :, :], identity)  # (B, H, Tq, T, T)
    values = v[..., None, :, :].expand(*weights.shape, -1)  # (B, H, Tq, T, Dv)
    updates = torch.linalg.solve_triangular(systems, values, upper=False)
    return (weights[..., None, :] @ updates)[..., 0, :]


def gated_delta_rule_attention(s, seen, v, k, fade, b=of_token(0.0), f=of_token(4.0)):
    """The delta rule: S_i = g_i S_(i-1) (I - r_i k_i k_i^T) + r_i v_i k_i^T, with rates of tokens.

    r = sigmoid(b), and the state fades by g = sigmoid(f) (Gated DeltaNet, 2412.06464, equation 10).
    gated_delta.py has it as a layer in linear time, with all that the paper has around it.
    """
    length = k.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    unit = F.normalize(k, dim=-1)
    c = F.logsigmoid(f).cumsum(-2)
    gates = (c - c.mT).clamp(max=0).exp()  # (B, H, T, T): from key l to key j

    identity = torch.eye(k.shape[-2], dtype=s.dtype, device=s.device)
    system = (b.sigmoid() * (unit @ unit.mT) * gates).tril(-1) + identity
    weights = fade(s / length.mT) * gates[..., -s.shape[-2] :, :]
    return with_updates(weights, seen, system, b.sigmoid() * v)


class Long(CausalSelfAttention):
    """A layer whose heads must be long: they need all keys, or the scores of all heads at once."""

    def __init__(self, c, layer):
        if "S" in c.layer_heads(layer):
            raise UserError(
                f"{type(self).__name__} needs all keys: the heads of its layers are long"
            )
        super().__init__(c, layer)


ATTENTION |= {
    "sink": sink_attention,
    "forgetting": forgetting_attention,
    "ssmax": ssmax_attention,
    "softpick": softpick_attention,
    "stick_breaking": stick_breaking_attention,
    "stick_laser": stick_laser_attention,
    "top_k": top_k_attention,
    "beta_learned": beta_learned_attention,
    "beta_squared_learned": beta_squared_learned_attention,
    "laser_temperature": laser_temperature_attention,
    "delta_rule": delta_rule_attention,
    "gated_delta_rule": gated_delta_rule_attention,
}

by_mean = partial(laser_by_exp, general_form(stick_mean))
FORM["stick_breaking"] = Form(
    written_for="e1049afcceeabb27",
    words="blocks from the last key back",
    long=stick_breaking,
)
FORM["stick_laser"] = Form(
    written_for="f68f4535271d3450",
    words="expm1 and log1p around stick-breaking",
    long=by_mean,
    short=by_mean,
)
FORM["laser_temperature"] = Form(
    written_for="854c74ca35eed972",
    words=FORM["laser"].words,
    long=partial(by_laser, sdpa),
    short=partial(by_laser, windowed),
)
