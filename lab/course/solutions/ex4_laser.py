"""A solution of exercise 4. ../ex4_laser.py has the shapes."""

import math

import torch


def log_weights(q, k):
    s = q @ k.T / q.shape[-1] ** 0.5
    return s.where(torch.ones_like(s).tril() > 0, -math.inf).log_softmax(-1)


def laser_as_written(q, k, v):
    return (log_weights(q, k).exp() @ v.exp()).log()


def laser(q, k, v):
    return (log_weights(q, k)[..., None] + v).logsumexp(1)


def gradients(a):
    values = torch.tensor([5.0, 0.0], dtype=torch.float64)
    found = []
    for attend in (lambda w: w @ values, lambda w: (w @ values.exp()).log()):
        s = torch.tensor([a, 1 - a], dtype=torch.float64).log().requires_grad_()
        attend(s.softmax(0)).backward()
        found.append(s.grad[0].item())
    return found[0], found[1]


def equal_at():
    low, high = 0.01, 0.99
    while high - low > 1e-6:
        middle = (low + high) / 2
        softmax, laser = gradients(middle)
        low, high = (middle, high) if laser > softmax else (low, middle)
    return low
