"""lab/ideas/positions.py: Shaw's and T5's positions, and the tests that every position passes."""

import os
import subprocess
import sys

import pytest
import test_endless
import test_forms
import test_mixed
import test_model
import test_optimizers
import torch
from harness import (
    ROOT,
    assert_equal,
    done,
    legal,
    pairwise,
    parametrize,
    refusal,
    refused,
    slow,
    state_of,
)
from reference import fast, naive_attention
from test_model import config, gpt_of
from torch.autograd import grad

import attention.fast
import model
from attention.scores import distances
from lab.ideas.positions import t5_bucket, with_vectors
from model import ATTENTION, GPTConfig
from positions import POSITION
from training.optimizers import OPTIMIZER

NEW = ("relative", "t5")


@slow
def test_what_every_position_passes():
    """The core's tests of each position in each attention, in a process that has these two."""
    files = [f"tests/test_{name}.py" for name in ("choices", "documents", "gpu")]
    flags = ["-n", "0", "--import=apart", "--import=lab.ideas.positions", "-k", "relative or t5"]
    command = [sys.executable, "-m", "pytest", *flags, *files]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert result.returncode == 0, result.stdout
    assert int(result.stdout.split(" passed")[0].split()[-1]) > 50


def test_what_is_refused():
    """The only refused pairs are these."""
    assert [
        (core, position)
        for core in ATTENTION
        for position in NEW
        if not legal(config, attention=core, position=position)
    ] == [("laser", "relative"), ("beta", "t5"), ("beta_squared", "t5")]


# -----------------------------------------------------------------------------
# layers by hand


def t5(scheme, c, head, q, distance):
    return {"bias": scheme.table(t5_bucket(distance, c.max_distance))[..., head]}


def relative(scheme, c, head, q, distance):
    of_keys = scheme.k[distance.clamp(max=c.max_distance)]
    bias = torch.einsum("bhid,ijd->bhij", q, of_keys) * c.scale
    return {"bias": bias, "far": scheme.v}


LAYERS = [
    ("LS/SL", {"position": "t5", "max_distance": 20, "n_kv_head": 2}),
    ("SLLS", {"position": "t5", "nope_long": True}),
    ("LSLS", {"position": "relative", "max_distance": 5, "n_kv_head": 1}),
    ("SSLL", {"position": "relative", "nope_long": True}),
    ("SSLL", {"position": "relative", "differential": True}),
]


@parametrize(
    "short, long, layer",
    pairwise(ATTENTION, ATTENTION, LAYERS, legal=lambda *row: legal(test_mixed.layers, *row)),
)
def test_each_head_is_its_attention_with_its_span(short, long, layer, monkeypatch):
    monkeypatch.setattr(test_mixed, "BY_HAND", {"t5": t5, "relative": relative})
    test_mixed.test_each_head_is_its_attention_with_its_span(short, long, layer)


# -----------------------------------------------------------------------------
# Shaw's vectors of values


LINEAR = [core for core in ATTENTION if core != "laser"]  # linear in their values
FAR = [  # window, rows of far
    (None, 1),
    (None, 9),
    (None, 200),
    (0, 9),
    (16, 9),
    (16, 200),
    (100, 9),
]


@parametrize(
    "core, window_and_rows, in_parts",
    pairwise(LINEAR, FAR, [False, True]),
)
def test_values_by_distance(core, window_and_rows, in_parts, monkeypatch):
    """Outputs and gradients, in blocks and in parts, against one query at a time."""
    window, n = window_and_rows
    monkeypatch.setattr(attention.fast, "AT_ONCE", 16000 if in_parts else 2**24)
    shapes = [
        (1, 2, 200, 8),
        (1, 2, 200, 8),
        (1, 2, 200, 5),
        (1, 2, 200, 200),
        (n, 5),
    ]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    q, k, v, bias, far = inputs

    def place(Tq, T, device):
        return distances(Tq, T, device).clamp(0, n - 1)

    def around(definition):
        return with_vectors(far, place, definition)

    settings = {"window": window, "bias": bias, "around": around}
    y = fast(core)(q, k, v, **settings)
    exact = naive_attention(core, q, k, v, window=window, bias=bias, far=far)
    assert_equal(y, exact, 1e-12)
    ours = grad(y.sin().sum(), inputs)
    theirs = grad(exact.sin().sum(), inputs)
    assert_equal(ours, theirs, 1e-11)
    for Tq in (1, 7, 150):  # the last queries, as in decoding
        settings["bias"] = bias[..., -Tq:, :]
        y = fast(core)(q[..., -Tq:, :], k, v, **settings)
        assert_equal(y, exact[..., -Tq:, :], 1e-12)


def test_values_by_distance_need_a_linear_attention(monkeypatch):
    """The check looks at what an attention computes, not at its name."""
    monkeypatch.setitem(ATTENTION, "mine", test_forms.sigmoid_attention)
    GPTConfig(**test_forms.SMALL, position="relative", attention="mine")

    def squared(s, seen, v, drop):
        return model.softmax_attention(s, seen, v * v, drop)

    for not_linear in (squared, lambda s, seen, v: model.laser_attention(s, seen, v)):
        monkeypatch.setitem(ATTENTION, "mine", not_linear)
        with refusal("must be linear in its values, and mine is not"):
            GPTConfig(**test_forms.SMALL, position="relative", attention="mine")


# -----------------------------------------------------------------------------
# which code runs, and what a model has of them


NEEDS = [  # fields of GPTConfig, and which code short and long heads then run
    ("softmax", {"position": "t5"}, "PyTorch's fused attention"),
    ("softmax", {"position": "relative"}, "its definition"),
    ("laser", {"position": "t5"}, "exp and log around PyTorch's fused attention"),
    ("beta", {"position": "relative"}, "its definition"),
]


@parametrize("core, fields, code", NEEDS)
def test_which_code_runs(core, fields, code):
    test_forms.test_a_form_is_chosen_for_what_it_must_take(core, fields, code)


def test_no_running_sums_with_a_bias():
    fields = {"attention": "beta", "position": "relative"}
    test_model.test_bytes_of_a_cache(300, fields, 4 * 400)
    says = test_endless.KEEPS_ALL.format("beta")
    test_endless.test_a_cache_that_cannot_go_on_says_why(fields, says)


@parametrize("fields", [{"position": "relative"}, {"position": "t5", "differential": True}])
def test_an_attention_of_ones_own(fields, monkeypatch):
    """In short and in long heads, decoded, and by its definition alone."""
    monkeypatch.setitem(ATTENTION, "sigmoid", test_forms.sigmoid_attention)
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "heads": "SSLL", "window": 20}
    gpt = test_forms.gpt_of(attention="sigmoid", **sizes, **fields).eval()
    idx = torch.randint(11, (2, 300))
    full = gpt(idx, idx)[0]
    test_forms.assert_cached(gpt, idx, full, 1e-5)
    test_forms.run_definitions(gpt)
    assert_equal(gpt(idx, idx)[0], full, 1e-5)


@parametrize("max_distance", [20, 64, 128, 1000])
def test_t5_buckets_are_the_papers(max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(3000)
    theirs = t5._relative_position_bucket(-distance, False, 32, max_distance)
    assert torch.equal(t5_bucket(distance, max_distance), theirs)


@parametrize("position, is_shared, most", [("t5", True, 128), ("relative", False, 16)])
def test_layers_share_a_position_or_do_not(position, is_shared, most):
    gpt = gpt_of(position=position)
    first, second = gpt.transformer.h
    assert (first.attn.position is second.attn.position) == is_shared
    assert gpt.config.resolved().max_distance == most


@parametrize("core", [name for name in ATTENTION if "beta" not in name])
def test_activation_checkpointing_changes_memory_alone(core):
    test_model.test_activation_checkpointing_changes_memory_alone(core, "t5")


@parametrize("name", OPTIMIZER)
def test_every_trained_parameter_is_in_one_optimizer(name):
    test_optimizers.check_groups(name, {"position": "t5", "tied": False, "differential": True})


REFUSED = {  # part of the message: fields
    "In beta a low score is no small weight": {"position": "t5", "attention": "beta"},
    "linear in its values, and laser is not": {
        "position": "relative",
        "short_attention": "laser",
        "heads": "SL",
    },
    "max_distance=9 is not used by position='learned', only by relative or t5": {"max_distance": 9},
    "max_distance=0 must be at least 1": {"max_distance": 0, "position": "relative"},
    "max_distance=16 must be at least 17": {"max_distance": 16, "position": "t5"},
}


@parametrize("says, fields", REFUSED.items())
def test_a_bad_config_says_what_is_legal(says, fields):
    with refusal(says):
        config(**fields)


# -----------------------------------------------------------------------------
# scripts


@parametrize("position", NEW)
def test_a_checkpoint_needs_the_import(position, train, run, tmp_path, monkeypatch):
    """Without it a sentence names it; with it training goes on."""
    done(train(f"--import=lab.ideas.positions --position={position} --max_iters=3"))
    ours = POSITION[position]
    monkeypatch.delitem(POSITION, position)
    says = f"position='{position}' is not one of"
    result = run("eval.py", f"--out_dir={tmp_path / 'out'}", "--which=latest")
    refused(result, says, "--import=lab.ideas.positions")
    refused(train("--init_from=resume"), says, "--import=lab.ideas.positions")
    refused(train(f"--position={position}"), says, "--import= adds your own")
    monkeypatch.setitem(POSITION, position, ours)
    done(train("--import=lab.ideas.positions --init_from=resume --max_iters=5"))
    assert state_of(tmp_path)["iter_num"] == 5


def test_resume_is_exact(train, tmp_path):
    """2 + 3 steps are 5 steps, bit for bit."""
    flags = "--optimizer=muon --import=lab.ideas.positions --position=t5 --dropout=0.1"
    done(train(flags, "--max_iters=5"))
    straight = state_of(tmp_path)["model"]
    done(train(flags, "--max_iters=2"))
    done(train("--init_from=resume --max_iters=5"))
    resumed = state_of(tmp_path)["model"]
    assert all(torch.equal(resumed[name], x) for name, x in straight.items())


def test_vectors_that_were_not_trained_are_missed(train, tmp_path):
    position = "--import=lab.ideas.positions --position=relative --nope_long"
    done(train(position, "--heads=S/L --window=4 --max_iters=2"))
    flags = f"--init_from={tmp_path / 'out'} --out_dir={tmp_path / 'more'}"
    refused(train(flags, "--heads=S/SL"), "transformer.h.1.attn.position.k")


def test_they_are_timed(run, tmp_path):
    """bench.py compares both with the definition, and has their rows."""
    flags = "--import=lab.ideas.positions --only=t5,relative --device=cpu --n_head=2"
    sizes = "--heads=SL --lengths=16,64 --head_dim=8 --tokens=128 --repeats=2"
    out_file = f"--out={tmp_path / 'b.json'}"
    out = done(run("bench.py", *flags.split(), *sizes.split(), out_file), "t5", "relative")
    assert "WRONG" not in out and "left out" not in out
