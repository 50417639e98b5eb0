"""The optimizers against their papers' equations, and which optimizer gets which parameters."""

import math
from types import SimpleNamespace

import torch
from harness import done, parametrize

from model import GPT, GPTConfig
from training.optimizers import OPTIMIZER, Muon


def model(**fields) -> GPT:
    return GPT(GPTConfig(block_size=16, vocab_size=20, n_layer=2, n_head=4, n_embd=32, **fields))


SETTINGS = SimpleNamespace(
    learning_rate=1e-3,
    beta1=0.9,
    beta2=0.95,
    weight_decay=0.3,
    adam_eps=None,
    muon_lr=0.05,
    muon_beta=0.8,
)
NOT_PLAIN = {"tied": False, "qk_norm": "layernorm", "conv": 4}


@parametrize("name", OPTIMIZER)
@parametrize("fields", [{}, NOT_PLAIN])
def test_every_parameter_is_in_one_optimizer(name, fields):
    check_groups(name, fields)


def check_groups(name: str, fields: dict) -> None:
    """Every parameter is in one optimizer, and matrices alone are decayed."""
    gpt = model(**fields)
    optimizers = OPTIMIZER[name](gpt, SETTINGS)

    groups = [group for o in optimizers for group in o.param_groups]
    held = [p for group in groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, gpt.parameters()))
    for group in groups:
        for p in group["params"]:
            assert (p.dim() >= 2) == (group["weight_decay"] == 0.3)

    if name == "muon":
        matrices = {id(p) for p in groups[0]["params"]}
        names = {n.split(".")[-2] for n, p in gpt.named_parameters() if id(p) in matrices}
        assert names == {"c_attn", "c_proj", "c_fc"}


@parametrize("name", OPTIMIZER)
@parametrize("given, eps", [(None, 1e-8), (0.0, 0.0)])
def test_epsilon(name, given, eps):
    """The flag's or, without it, the optimizer's own; Muon itself has none."""
    adam = OPTIMIZER[name](model(), SimpleNamespace(**vars(SETTINGS) | {"adam_eps": given}))[-1]
    assert all(group["eps"] == eps for group in adam.param_groups)


@parametrize("shape", [(96, 32), (32, 128)])
def test_muon_is_torchs_in_float32(shape):
    ours = torch.nn.Parameter(torch.ones(shape))
    theirs = torch.nn.Parameter(torch.ones(shape))
    settings = {"lr": 0.05, "weight_decay": 0.3, "momentum": 0.8}
    a = Muon([ours], settings)
    b = torch.optim.Muon([theirs], **settings)

    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()

    change = (theirs - 1).norm()
    assert (ours - theirs).norm() < 0.05 * change  # theirs is in bfloat16: measured 0.01 to 0.02
    assert a.state[ours]["momentum_buffer"].equal(b.state[theirs]["momentum_buffer"])


def test_no_optimizer_steps_where_one_has_overflowed(train, monkeypatch):
    """float16: where a gradient of AdamW's is infinite, Muon must not step on momentum alone."""
    steps = []
    norms = []
    step = Muon.step
    norm = torch.nn.utils.clip_grad_norm_

    def overflown(*args):
        norms.append(norm(*args))
        return torch.tensor(math.inf) if len(norms) == 2 else norms[-1]

    def counted(self):
        steps.append(len(norms))
        step(self)

    monkeypatch.setattr(Muon, "step", counted)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflown)
    done(train("--dtype=float16 --optimizer=muon --max_iters=4"))
    assert steps == [n for n in (1, 3, 4) if norms[n - 1].isfinite()] and len(norms) == 4
