"""The course: solutions pass, exercises as given fail, and typical mistakes are named."""

import inspect
import re
import subprocess
import sys
import types

import pytest
from harness import ROOT, done, log_of, parametrize
from test_docs import read

import model
from lab.course import micro
from lab.course.__main__ import state
from lab.course.checks import CHECKS

# {exercise: (what is exchanged in the solution, by what, the message that it gives)}
WRONG = {
    "ex1_lookup": [
        ("total / len(v)", "total", "mean: row 0 is"),
        (" / q.shape[-1] ** 0.5", "", "the scores are not divided by sqrt(D)"),
        ("weights.sum(-1, keepdim=True)", "weights.sum(0)", "the columns sum to 1, not the rows"),
        ("s.amax(-1, keepdim=True)", "s.max()", "below another row's is not finite"),
    ],
    "ex2_causal": [
        (".tril()", ".tril(-1)", "row 0 does not see token 0"),
        (", dtype=torch.bool", "", "seen: it has numbers of torch.float32, not torch.bool"),
        ("-math.inf", "0.0", "row 0 sees token 1"),
        ("@ v", "@ v.cumsum(0)", "causal_attention: row 1 is"),
        (
            "grad(y[i].sum(), x,",
            "grad(y[i].sum(), x[2:],",
            "sees_later does not find that later keys count in the sum of the weights",
        ),
    ],
    "ex3_window": [
        ("    T, D", "    w = w - 1\n    T, D", "row 2 does not see token 0"),
        ("s.where(j >= 0, -math.inf)", "s", "the weights of row 0's tokens sum to 0."),
    ],
    "ex4_laser": [
        ("v.exp()).log()", "v.exp())", "laser_as_written: row 0 is"),
        (
            "(log_weights(q, k)[..., None] + v).logsumexp(1)",
            "(log_weights(q, k).exp() @ (v - v.amax(0)).exp()).log() + v.amax(0)",
            "after token 5 got a value of 1000: row 0 is [-inf",
        ),
        (
            "log_softmax(-1)",
            "softmax(-1).log()",
            "a gradient of row 0 is not finite",
        ),
        ("return low", "return 0.5", "at a weight of 0.500 softmax's gradient is 1.250"),
    ],
    "ex5_beta": [
        (".sqrt()", "", "beta: the norm has no square root"),
        ("    q = q / D**0.5\n", "", "beta: q is not divided by sqrt(D)"),
        (
            "in reversed(range(len(q)))",
            "in range(len(q))",
            "dk: it is a sum over the queries i <= j, not over i >= j",
        ),
        (
            "    dq, dk, dv =",
            "    return (dz @ v.T).tril() @ k, (dz @ v.T).tril().T @ q, (q @ k.T).tril().T @ dz\n"
            "    dq, dk, dv =",
            "256 tokens make a tensor of 256 x 256 numbers",
        ),
    ],
    "ex6_cache": [
        ("first = max(0, len(keys) - w)", "first = 0", "it sees tokens before its window"),
        ("return q @ S, (S,)", "return q @ S - q @ k * v, (S,)", "does not see itself"),
        (".clone()", "", "holds 32 numbers in memory, not 24"),
    ],
    "ex7_positions": [
        ("(t.sin(), t.cos())", "(t.cos(), t.sin())", "cosines stand before sines"),
        ("- b * t.sin(), a * t.sin() +", "+ b * t.sin(), -a * t.sin() +", "it turns clockwise"),
        ("(q, -i, one)", "(q, i, -one)", "far keys get higher scores"),
    ],
}


def module_of(text):
    module = types.ModuleType("exercise")
    exec(text, module.__dict__)
    return module


def solution(name):
    return read(f"lab/course/solutions/{name}.py")


@parametrize("name", CHECKS)
def test_solutions_pass_and_exercises_fail(name):
    exercise = module_of(read(f"lab/course/{name}.py"))
    for check in CHECKS[name]:
        check(module_of(solution(name)))
        with pytest.raises(NotImplementedError):
            check(exercise)


@parametrize("name", CHECKS)
def test_mistakes_are_named(name):
    for old, new, message in WRONG[name]:
        assert old in solution(name)
        module = module_of(solution(name).replace(old, new))
        with pytest.raises(AssertionError, match=re.escape(message)):
            for check in CHECKS[name]:
                check(module)


def test_an_exercise_that_ends_python_is_named(monkeypatch):
    def ends(exercise):
        raise SystemExit(3)

    monkeypatch.setitem(CHECKS, "ex1_lookup", [ends])
    assert state("ex1_lookup") == "ends: SystemExit: 3"


def test_python_without_asserts_checks_nothing():
    command = [sys.executable, "-O", "-m", "lab.course"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and "start it without -O" in result.stderr


# -----------------------------------------------------------------------------
# lesson 0, micro.py


@parametrize("name", micro.ATTENTION)
def test_lesson_0_has_the_losses_of_train_py(name, run, train, tmp_path):
    data = tmp_path / "shakespeare"
    done(run("data/shakespeare_char/prepare.py", f"--out_dir={data}"))
    flags = (
        f"--dataset={data} --attention={name} --n_layer={micro.LAYERS} --n_head={micro.H} "
        f"--n_embd={micro.C} --block_size={micro.T} --batch_size={micro.BATCH} --seed={micro.SEED} "
        f"--learning_rate={micro.LEARNING_RATE} --warmup_iters={micro.WARM_UP} "
        "--schedule=constant --beta2=0.99 --plain --max_iters=20 --log_interval=1"
    )
    done(train(flags, "--gradient_accumulation_steps=1 --weight_decay=0.1 --grad_clip=1.0"))
    theirs = [row["loss"] for row in log_of(tmp_path) if "loss" in row]
    state = micro.new(name)
    ours = [micro.train_step(*state, step) for step in range(20)]
    assert len(theirs) == 20
    assert ours == pytest.approx(theirs, abs=1e-6)


def test_lesson_0_has_the_definitions_of_model_py():
    for name, definition in micro.ATTENTION.items():
        assert inspect.getsource(definition) == inspect.getsource(model.ATTENTION[name])


def test_lesson_0_trains_and_writes(monkeypatch, capsys):
    monkeypatch.setattr(micro, "STEPS", 50)
    micro.main(["softmax", "beta"])
    out = capsys.readouterr().out
    assert re.search(r"\n +50 +3\.\d+ +3\.\d+\n", out)
    assert "--- softmax\n" in out and "--- beta\n" in out
    with pytest.raises(SystemExit, match="there is no attention 'bta' here, but softmax, laser"):
        micro.main(["bta"])
