"""lab/ideas/positions.py: Shaw's and T5's positions, and learned slopes.

test_ideas.py has caches, documents and gradients of them.
"""

import pytest
import torch
from harness import assert_equal, done, legal, parametrize, refusal, refused, same, weights_of
from reference import ONE_QUERY, shaken
from test_optimizers import check_groups

from lab.ideas.positions import t5_bucket
from model import ATTENTION, GPT, GPTConfig
from parts import POSITION
from training.optimizers import OPTIMIZER

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "vocab_size": 11, "block_size": 64}
NEW = ("relative", "t5")


def gpt_of(**fields: object) -> GPT:
    return GPT(GPTConfig(**SIZES | fields))


def test_what_is_refused():
    """The only refused pairs are these."""
    assert [
        (core, position)
        for core in ATTENTION
        for position in NEW
        if not legal(gpt_of, attention=core, position=position)
    ] == [("laser", "relative"), ("beta", "t5"), ("beta_squared", "t5")]


REFUSED = {  # part of the message: fields
    "In beta_attention a low score is no small weight": {"position": "t5", "attention": "beta"},
    "linear in its values, and laser_attention is not": {
        "position": "relative",
        "short_attention": "laser",
        "heads": "SL",
    },
}


@parametrize("says, fields", REFUSED.items())
def test_a_bad_config_says_what_is_legal(says, fields):
    with refusal(says):
        gpt_of(**fields)


# -----------------------------------------------------------------------------
# formulas


LEARNED = {"position": "none", "decay": "learned"}
LAYERS = [
    ("laser", {"position": "t5"}),
    ("beta", {"position": "relative"}),
    ("beta_squared", {"position": "relative", "nope_long": True}),
    ("softcap", {"position": "t5", "nope_long": True}),
    ("softmax", {"position": "t5", "decay": "learned"}),
    ("laser", LEARNED),
    ("softmax", {"position": "relative", "decay": "learned"}),
]


@parametrize("core, choices", LAYERS)
def test_a_layer_query_by_query(core, choices):
    """With short heads between long ones: a layer has them first, and slopes keep their letter."""
    fields = choices | {"attention": core, "heads": "LSLS", "window": 5, "n_kv_head": 2}
    c = GPTConfig(**SIZES | fields)
    attn = shaken(c, dtype=torch.float64).transformer.h[0].attn
    x = torch.randn(1, 40, 16, dtype=torch.float64)
    q, k, v = attn.c_attn(x)[0].unflatten(-1, (-1, 4)).split((4, 2, 2), dim=1)  # (T, heads, D)
    y = torch.empty_like(q)
    for head, letter in enumerate((1, 3, 0, 2)):
        for i in range(40):
            first = max(0, i - 5) if head < 2 else 0
            keys = k[first : i + 1, head // 2]
            values = v[first : i + 1, head // 2]
            distance = i - torch.arange(first, i + 1)
            bias = torch.zeros(())
            fades = torch.ones_like(distance, dtype=x.dtype)
            position = "none" if head >= 2 and c.nope_long else c.position
            if position == "relative":
                keys = keys + attn.position.k[distance.clamp(max=16)]
                values = values + attn.position.v[distance.clamp(max=16)]
            elif position == "t5":
                bias = attn.position.table.weight[t5_bucket(distance, 128), letter]
            if c.decay == "learned":
                fades = (-attn.decay.log_slopes[letter].exp() * distance).exp()
            s = keys @ q[i, head] / 2 + bias
            y[i, head] = ONE_QUERY[core](s[None, None], values[None, None], fades[None])
    assert_equal(attn(x)[0], attn.c_proj(y.flatten(1)), 1e-12)


@parametrize("max_distance", [20, 64, 128, 1000])
def test_t5_buckets_are_the_papers(max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(3000)
    theirs = t5._relative_position_bucket(-distance, False, 32, max_distance)
    assert torch.equal(t5_bucket(distance, max_distance), theirs)


def test_layers_share_t5s_numbers():
    first, second = gpt_of(position="t5").transformer.h
    assert first.attn.position.table is second.attn.position.table


def test_learned_slopes_begin_at_alibis():
    """They are of one dimension: not decayed by the optimizer."""
    gpt = gpt_of(decay="learned")
    slopes = gpt.state_dict()["transformer.h.1.attn.decay.log_slopes"].exp().tolist()
    assert slopes == pytest.approx([1 / 4, 1 / 16, 1 / 64, 1 / 256])


# -----------------------------------------------------------------------------
# in scripts


@parametrize("name", OPTIMIZER)
@pytest.mark.usefixtures("ideas")
def test_every_trained_parameter_is_in_one_optimizer(name):
    choices = {"attention": "differential", "position": "t5", "decay": "learned", "tied": False}
    check_groups(name, choices)


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


@parametrize(
    "flags",
    [
        "--optimizer=muon --import=lab.ideas.positions --position=t5 --decay=learned --dropout=0.1",
        "--import=lab.ideas.lamb --optimizer=lamb --schedule=constant --adam_eps=1e-3",
        "--import=lab.ideas.after --attention=laser_gate",
        "--import=lab.ideas.differential --attention=differential --heads=SSLL --window=9",
    ],
)
@pytest.mark.usefixtures("ideas")
def test_resume_is_exact(flags, train, tmp_path):
    """2 + 3 steps are 5 steps, bit for bit."""
    done(train(flags, "--max_iters=5"))
    straight = weights_of(tmp_path)
    done(train(flags, "--max_iters=2"))
    done(train("--init_from=resume --max_iters=5"))
    assert same(weights_of(tmp_path), straight)


def test_they_are_timed(run, tmp_path):
    """bench.py compares both with the definition, and has their rows."""
    flags = "--import=lab.ideas.positions --only=t5,relative --device=cpu --n_head=2"
    sizes = "--heads=SL --lengths=16,64 --head_dim=8 --tokens=128 --repeats=2"
    out_file = f"--out={tmp_path / 'b.json'}"
    out = done(run("bench.py", *flags.split(), *sizes.split(), out_file), "t5", "relative")
    assert "WRONG" not in out and "left out" not in out
