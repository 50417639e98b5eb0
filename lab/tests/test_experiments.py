"""Experiments at a tiny scale, by their own commands."""

import functools
import json
import math
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from harness import ROOT, assert_equal, done, parametrize, refused, slow
from reference import ONE_QUERY, randomised
from torch.nn import functional as F
from torch.testing import assert_close

from attention.scores import visible
from lab.experiments import (
    attention_probabilities,
    compare,
    endless,
    local_dependencies,
)
from lab.experiments.tables import TABLES
from model import GPT, GPTConfig
from text.dataset import Tokens

pytestmark = pytest.mark.usefixtures("quick")
SMALL = """
device = "cpu"
block_size = n_embd = 32
n_layer = gradient_accumulation_steps = eval_iters = warmup_iters = 1
n_head = batch_size = 4
max_iters = 2
learning_rate = 1e-3
beta2 = 0.99
min_lr = 0.0
"""
STEPS = "--max_iters=3 --lr_decay_iters=3 --eval_interval=3"


@pytest.fixture
def small(data, tmp_path):
    """The path of a config file for runs of two steps."""
    path = tmp_path / "small.py"
    path.write_text(f"dataset = {data!r}\n" + SMALL)
    return str(path)


@pytest.fixture
def experiment(run, tmp_path):
    """experiment(name, *flags) runs it: (what it printed, the content of its JSON file)."""
    path = tmp_path / "x.json"

    def experiment(name, *flags):
        out = done(run(f"lab.experiments.{name}", f"--out={path}", *flags))
        return out, json.loads(path.read_text())

    return experiment


def tables(out):
    """The tables in what a script printed: rows of cells, without the heads."""
    found = []
    for table in re.findall(r"^\|---.*\n((?:\| .*\n)+)", out, re.MULTILINE):
        found.append([row.strip("| ").split(" | ") for row in table.splitlines()])
    return found


@slow
def test_compare(experiment, small, tmp_path):
    """Rows by name, with the row that they are compared with; nothing is made twice."""
    flags = f"--config_file={small} --out_dir={tmp_path / 'runs'} --seeds=2 --repeats=2 --jobs=2"
    flags = [*flags.split(), f"--extra={STEPS}", "--table=choices"]
    out, results = experiment("compare", *flags, "--only=swiglu;muon")
    ((gpt2, swiglu, _),) = tables(out)
    assert swiglu[0] == "swiglu"
    vals = {run["val"] for run in results["runs"].values()}
    assert len(vals) == len(results["runs"]) == 3 * 2
    flags += ["--what=train,show", "--only=swiglu"]
    again, _ = experiment("compare", *flags)
    assert "seed 1" not in again
    assert tables(again) == [[gpt2, swiglu]]


def test_mistakes(run, small, tmp_path):
    cases = {
        "compare --only=swiglo": "'swiglo' is not one of softmax; LASER",
        "compare --extra=--block_size=9999": "this run failed",
        f"compare --config_file={ROOT}/README.md": "is not Python",
        f"compare --out={small}": "is damaged",
        "variants --variant=rezro": "'rezro' is not one of rezero,",
        "variants --variant=rezero --where=post": "is for where='pre', not 'post'",
    }
    flags = {
        "compare": [f"--config_file={small}", f"--out={tmp_path / 'x.json'}"],
        "variants": [small],
    }
    for case, message in cases.items():
        script, *wrong = case.split()
        start = [f"--out_dir={tmp_path}", *flags[script]]
        refused(run(f"lab.experiments.{script}", *start, *wrong), message)


STARTS_A_WORKER = """
import time
from lab.experiments.times import fresh_processes
if __name__ == "__main__":
    with fresh_processes(1) as pool:
        print(pool.submit(str).result() or "it is there", flush=True)
        pool.submit(time.sleep, 60)
"""


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    """Also where that one is killed."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS_A_WORKER)
    env = os.environ | {"PYTHONPATH": ROOT}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=env) as process:
        process.stdout.readline()
        process.kill()
        began = time.monotonic()
        process.stdout.read()  # until the worker, which has the pipe too, has ended
    assert time.monotonic() - began < 20


@slow
def test_a_table_of_rows(experiment, small, tmp_path):
    flags = [f"--config_file={small}", f"--out_dir={tmp_path}", f"--extra={STEPS}", "--seeds=1"]
    out, results = experiment("compare", *flags, "--rows=plain; mine: --mlp=relu", "--repeats=1")
    assert [row[0] for row in tables(out)[0]] == ["plain", "mine"]
    assert f"rows, mine, {small}, --mlp=relu, {STEPS}, seed 1" in results["runs"]
    assert results["times"][f"rows, mine, {small}, --mlp=relu"][2] == "plain"


def test_times_of_a_table(monkeypatch, tmp_path):
    own = tmp_path / "own.json"
    monkeypatch.setattr(compare, "SHIPPED", str(tmp_path / "shipped.json"))
    monkeypatch.setattr(compare, "out", str(own))
    times = {"64, LS": [9.0, 2.0, "beta"], "64, beta": [8.0, 3.0]}
    own.write_text(json.dumps({"times": times}))
    assert compare.times_of(TABLES["64"]) == {"beta": (8.0, 3.0)}  # of its own base


@slow
def test_compare_in_equal_time(experiment, data, tmp_path):
    """Runs of equal steps and of equal time, each once."""
    extra = f"--dataset={data} {STEPS} --warmup_iters=1 --eval_iters=1 --n_layer=1 --device=cpu"
    flags = [f"--extra={extra}", f"--out_dir={tmp_path / 'runs'}", "--seeds=1", "--repeats=1"]
    flags += ["--table=256", "--only=LS, conv"]
    out, results = experiment("compare", *flags)
    steps = {name: round(1500 / x[1]) for name, x in results["times"].items()}
    (ms, *one, of), (others_ms, ratio, base, _) = results["times"].values()  # of one round
    assert [one, ratio] == [[1.0, base], pytest.approx(others_ms / ms)] and len(of) == 10
    n = steps["256, LS, conv"]
    assert f"256, LS, conv, {n} steps, {extra}, seed 1" in results["runs"]
    assert len(results["runs"]) == 3
    again, _ = experiment("compare", *flags, "--what=train,equal,show")
    assert "seed 1" not in again
    assert tables(again) == tables(out)


@pytest.mark.filterwarnings("ignore:a channel of the values")
def test_lasers_precision(experiment):
    """By expm1 it is as exact as softmax, for any values, and by exp it is not."""
    for is_measured in (True, False):  # the second time it reads them from --out
        out, _ = experiment("laser_precision")
        assert ("errors, " in out) == is_measured
        *of_sigma, before = tables(out)
        for rows in of_sigma:
            for sigma, *cells in rows:
                softmax, exp, shifted, expm1 = map(float, cells)
                assert expm1 < 2 * softmax < 0.01, sigma
                assert (sigma == "30.0") == (exp == shifted == math.inf)
        assert min(map(float, of_sigma[0][0][2:4])) > 0.1
        errors = {last: float(expm1) / float(softmax) for last, softmax, _, _, expm1 in before}
        assert max(errors["-2.0"], errors["5.0"]) < 1.6 and errors["-5.0"] > 100


def test_probabilities(experiment, train, tmp_path):
    train("--attention=laser --max_iters=2")
    flags = (f"--out_dir={tmp_path / 'out'}", "--batches=2", "--device=cpu")
    out, _ = experiment("attention_probabilities", *flags)
    (((name, seeds, *_),),) = tables(out)
    assert (name, seeds) == ("laser, 32 tokens", "1")


def test_attention_probabilities_and_jacobians():
    """As autograd has the Jacobians, and as counted one by one."""
    q, k, v = (torch.randn(1, 2, 20, 4, dtype=torch.float64) * size for size in (12, 1, 3))
    found = attention_probabilities.measures(q, k, v, window=9)
    for h, i in ((0, 0), (1, 3), (0, 19)):
        seen = slice(max(0, i - 9), i + 1)
        s = k[0, h, seen] @ q[0, h, i] / 2
        p = s.softmax(-1)
        want = [len(s), (p < 1e-3).sum(), (p < 1e-7).sum()]
        for attention in ("softmax", "laser"):
            one_query = functools.partial(ONE_QUERY[attention], v=v[0, h, seen], f=torch.ones(()))
            want.append(torch.autograd.functional.jacobian(one_query, s).norm())
        assert_close(found[0, h, i], torch.tensor([*want, 1]).double())
    assert found[..., 1].sum() > found[..., 2].sum() > 0


@parametrize("window", [None, 50])
def test_fits_have_the_gradients_of_autograd(window):
    p = local_dependencies.target(300).double()
    distance = torch.arange(300)[:, None] - torch.arange(300)
    assert not p[(distance < 1) | (distance > 50)].any()
    assert 20 < p[50:].count_nonzero(-1).double().mean() < 30
    has_target = p.any(-1)
    assert_equal(p.sum(-1), has_target.double(), 1e-5)
    q, k = (torch.randn(300, 5).double().requires_grad_() for _ in range(2))
    a = (q @ k.T).masked_fill(~visible(q, k, window), -torch.inf).softmax(-1)
    missed = (a - p)[has_target].square().sum()
    gradients = torch.autograd.grad(missed, (q, k))
    found = local_dependencies.gradients(q, k, local_dependencies.pieces(p, window))
    assert found[0].item() == pytest.approx(missed.item(), rel=1e-6)
    assert_equal(found[1:], gradients, 1e-12)


def test_local_dependencies(experiment):
    flags = "--what=full,show --n=60 --steps=20 --seeds=1"
    _, results = experiment("local_dependencies", *flags.split())
    fits = results["fits"]
    assert len(fits) == 2 * 3 + 2  # three rates for a tenth of the steps, and the best one
    *_, fit = fits.values()  # of short attention at its best rate
    missed = fit["1"]["missed"]
    assert missed[-1] < 0.9 * missed[0] < 0.9  # equal weights miss less than all


@pytest.mark.usefixtures("no_new_processes")
def test_endless(experiment, data, small, tmp_path):
    flags = f"--dataset={data} --config_file={small} --out_dir={tmp_path / 'runs'} --steps=3 "
    flags += "--block_size=32 --tokens=100 --slide=20"
    flags = [*flags.split(), "--only=beta, alibi"]
    out, results = experiment("endless", *flags)
    written = results["decode"]["beta, alibi"]["32"]["endless"]
    assert written["first"]["cache_bytes"] == written["last"]["cache_bytes"] > 0
    again, _ = experiment("endless", *flags)
    assert "far, " not in again
    assert tables(again) == tables(out)


def test_losses_by_position(data):
    """Through a cache as without one; in windows each loss is that of a window that ends there."""
    sizes = {"window": 4, "vocab_size": 29, "n_layer": 2, "n_head": 4, "n_embd": 32}
    fields = endless.TRAINED["softmax short, beta_squared long, conv, rope"] | sizes
    gpt, whole = (GPT(GPTConfig(**fields, block_size=n)).eval() for n in (16, 70))
    whole.load_state_dict(randomised(gpt).state_dict())
    text = Tokens(data, "val", 16)
    text.ids = text.ids[:71]
    text.places = 71 - 16
    x = torch.from_numpy(text.ids.astype("int64"))[None]
    found = endless.in_windows(gpt, text)[None]  # a hop of 1
    for t in range(70):
        logits = gpt(x[:, max(0, t - 15) : t + 1])[0][:, 0]
        loss = F.cross_entropy(logits, x[:, t + 1], reduction="none")
        assert_close(found[:, t], loss)
    logits = whole(x[:, :-1], x[:, 1:])[0]
    want = F.cross_entropy(logits.mT, x[:, 1:], reduction="none")
    cached = endless.through_a_cache(gpt, x, piece=13)
    assert_close(cached, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_new_processes")
def test_length(experiment):
    flags = "--repeats=1 --double=64 --lengths=64,128".split()
    flags.append("--only=softmax;beta, decay")
    _, results = experiment("length", *flags)
    for row in results["double"].values():  # of one round
        assert row["128"]["ratio"] == pytest.approx(row["128"]["s_128"] / row["128"]["s_64"])
