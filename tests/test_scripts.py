"""sample.py and bench.py as a user runs them, on a small model; and what all scripts share."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
import sys

import pytest
import torch
from harness import ROOT

from attention import forms
from attention.scores import visible
from choices import ACTIVATION, NORM, POSITION, QK_NORM, WHERE
from model import ATTENTION, GPT, GPTConfig
from training import timing

# -----------------------------------------------------------------------------
# sample.py


@pytest.fixture
def trained(train, tmp_path):
    train("--max_iters=20", "--attention=laser", "--heads=SSSL", "--window=4")
    return f"--out_dir={tmp_path / 'out'}", "--device=cpu"


def test_sample(run, trained, tmp_path):
    code, out, _ = run("sample.py", *trained, "--start=the lord", "--num_samples=3", "--max_new_tokens=40")
    samples = out.split("\n---------------\n")[:-1]
    assert code == 0 and len(samples) == 3 and len(set(samples)) == 3
    assert all(len(s.split("\n", 1)[-1] if i == 0 else s) == 48 for i, s in enumerate(samples))
    assert out == run("sample.py", *trained, "--start=the lord", "--num_samples=3", "--max_new_tokens=40")[1]
    greedy = [
        run("sample.py", *trained, "--start=t", "--temperature=0", "--num_samples=1", f"--seed={s}")[1] for s in (1, 2)
    ]
    assert greedy[0] == greedy[1]
    (tmp_path / "prompt.txt").write_text("noble and citizens, of all the lord speaks: " * 3)
    code, out, _ = run("sample.py", *trained, f"--start=FILE:{tmp_path / 'prompt.txt'}", "--num_samples=1")
    assert code == 0 and "the model sees the last 32" in out
    code, out, _ = run("sample.py", *trained, "--start=the", "--stop= ", "--num_samples=1", "--max_new_tokens=200")
    assert code == 0 and " " not in out.splitlines()[1]
    code, _, err = run("sample.py", *trained, "--start==1+1=", "--num_samples=1")
    assert code == 2 and "'+', '1', '='" in err  # unknown to this vocabulary, but it arrives whole


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--start=été"], "'é'"),
        (["--start="], "prompt is empty"),
        (["--start=FILE:/nowhere.txt"], "No such file"),
        (["--temperature=-1"], "temperature >= 0"),
        (["--temperature=nan"], "needs a number"),
        ([f"--start=FILE:{os.path.abspath(__file__)}c"], "No such file"),
        ([f"--start=FILE:{sys.executable}"], "not UTF-8"),
        (["--top_k=0"], "top_k >= 1"),
        (["--out_dir=/nowhere"], "no checkpoint /nowhere/ckpt.pt"),
        (["--init_from=resum"], "'resum' is not one of gpt2"),
        (["--which=last"], "one of best, latest"),
        (["--max_new_tokens=-1"], "at least 1"),
        (["--num_sample=1"], "did you mean `num_samples`"),
    ],
)
def test_sample_mistakes(run, trained, flags, says):
    code, _, err = run("sample.py", *trained, *flags)
    assert code == 2 and says in err and "Traceback" not in err


def test_streamed_text_holds_back_halves():
    """Half a UTF-8 character and half a stop text are not shown; the pieces add up to the text."""
    text_of = runpy.run_path(os.path.join(ROOT, "sample.py"))["text_of"]

    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode(errors="replace")

    def pieces(text: str, stop: str | None = None) -> list[str]:
        return list(text_of(map(torch.tensor, text.encode()), Bytes(), stop, [*b"the prompt END"]))

    assert "".join(pieces("aé€😀b")) == "aé€😀b" and "\ufffd" not in "".join(pieces("aé€😀b"))
    assert "".join(pieces("one END two", "END")) == "one "
    assert "".join(pieces("one EN two", "END")) == "one EN two"
    assert all("E" not in piece for piece in pieces("one END two", "END"))
    long = "aé€😀b c" * 40  # of a long text only the last tokens are decoded again, for each token
    for n in range(len(long) - 8, len(long)):
        assert "".join(pieces(long[:n])) == long[:n]
    for n in range(100, 160):
        assert "".join(pieces("é" + n * "x" + "END more", "END")) == "é" + n * "x"
        assert "".join(pieces("é" + n * "x" + "EN" + n * "y", "END")) == "é" + n * "x" + "EN" + n * "y"


def test_streamed_text_of_a_tokenizer_that_drops_a_texts_first_space():
    """As SentencePiece does. A long text's last tokens lose no space where they are decoded apart from the others."""
    sample = runpy.run_path(os.path.join(ROOT, "sample.py"))
    words = [f" w{i}" for i in range(1000)]
    lengths = []

    class Words:
        def decode(self, ids: list[int]) -> str:
            lengths.append(len(ids))
            return "".join(words[i] for i in ids)[1:]

    ids = list(range(400))
    pieces = sample["text_of"](map(torch.tensor, ids), Words(), None, [500, 501])
    assert "".join(pieces) == "".join(words[:400])
    assert max(lengths) <= 2 * sample["TAIL"] + 1


# -----------------------------------------------------------------------------
# bench.py


TINY = ("--n_head=2", "--head_dim=8", "--heads=SL", "--batch_size=1", "--repeats=2", "--device=cpu", "--quick")


@pytest.fixture
def small_models(monkeypatch):
    """bench.py's models, less wide and with fewer layers."""
    monkeypatch.setattr(timing, "LS_MODEL", timing.LS_MODEL | {"n_layer": 2, "n_embd": 48, "vocab_size": 99})
    monkeypatch.setattr(timing, "GPT_10M", timing.GPT_10M | {"n_layer": 2, "n_embd": 48})


def test_bench_attention(run, tmp_path, monkeypatch):
    out_file = tmp_path / "b.json"
    small = (*TINY, "--what=attention", "--lengths=16,400", f"--out={out_file}")
    code, out, _ = run("bench.py", *small, "--plot")
    assert code == 0 and "WRONG" not in out and "skipped" not in out
    results = json.loads(out_file.read_text())
    names, kinds = ["sdpa"], ("", " SL", " differential", " decay")
    names += [
        core + kind for core in ATTENTION for kind in kinds if kind != " decay" or forms.takes(ATTENTION[core], "decay")
    ]
    got = [
        (row["subject"], row["n"])
        for row in results["attention"]
        if row["subject"] not in ("x-transformers", "fla beta")
    ]
    assert got == [(name, n) for n in (16, 400) for name in names]
    assert all(row["peak_bytes"] > 4 * 2 * 8 * row["n"] and row["ms"]["both"] > 0 for row in results["attention"])
    assert results["attention"][0]["ratio"] == {"forward": 1, "backward": 1, "both": 1}
    assert (tmp_path / "b.png").stat().st_size > 10000
    code, out, _ = run("bench.py", *small, "--only=sdpa,softmax", "--patience=1e-9")
    assert code == 0 and "n = 400: softmax skipped, would take" in out and "laser" not in out


def test_bench_times_a_new_attention(run, tmp_path, monkeypatch, small_models):
    """It is compared with its own definition, and a bug in it prints its traceback."""

    def broken(q, k, v, *, window=None, scale=None, bias=None):
        raise ValueError("a bug of mine")

    def doubled(definition):
        return lambda q, k, v, **settings: 2 * definition(q, k, v, **settings)

    monkeypatch.setitem(ATTENTION, "mine", lambda q, k, v, **settings: ATTENTION["beta"](q, k, v, **settings))
    monkeypatch.setitem(ATTENTION, "wrong", ATTENTION["beta"])
    monkeypatch.setitem(forms.FAST, "wrong", doubled)
    monkeypatch.setattr(forms, "unchanged", lambda name, definition: True)
    monkeypatch.setitem(ATTENTION, "broken", broken)
    small = (*TINY, "--window=5", f"--out={tmp_path / 'b.json'}")
    flags = ("--what=attention", "--lengths=16", "--only=sdpa,mine,mine SL,broken,wrong,wrong SL")
    code, out, err = run("bench.py", *small, *flags)
    timed = [row["subject"] for row in json.loads((tmp_path / "b.json").read_text())["attention"]]
    assert code == 0 and timed == ["sdpa", "mine", "mine SL"]
    assert out.count("WRONG") == 2 and "wrong SL is WRONG: it differs from the definition by y 1, dq 1, " in out
    assert "broken left out (ValueError: a bug of mine)" in out
    assert err.count("Traceback (most recent call last)") == 1 and "in broken\n" in err
    code, out, err = run("bench.py", *small, "--what=model,decode", "--model_lengths=16", "--decode_length=4")
    assert code == 0 and "broken L left out" in out and "mine SL   " in out and "ValueError: a bug of mine" in err


def test_bench_measures_an_edited_definition(run, tmp_path, monkeypatch):
    """A model runs the edited definition instead of the fast form, and so does bench.py."""
    monkeypatch.setitem(ATTENTION, "beta", lambda q, k, v, **settings: 2 * ATTENTION["softmax"](q, k, v, **settings))
    small = (*TINY, "--what=attention", "--lengths=16", "--only=sdpa,beta,beta SL", f"--out={tmp_path / 'b.json'}")
    code, out, err = run("bench.py", *small)
    assert code == 0 and "WRONG" not in out and "attention='beta': its definition was edited" in err
    assert len(json.loads((tmp_path / "b.json").read_text())["attention"]) == 3


def test_triton_needs_cuda(train):
    code, _, err = train("--triton", "--max_iters=1")
    assert code == 2 and "for CUDA, in bfloat16 and float32, and this runs on cpu in float32: leave --triton out" in err


def test_bench_for_a_gpu(run, tmp_path):
    """--suite=gpu with sizes for a CPU; times between a GPU's events and its kernels are not seen here."""
    names = ["sdpa", "sdpa flash", "softmax", "softmax SSL", "laser", "beta", "beta differential"]
    out_file = tmp_path / "b.json"
    args = ("--suite=gpu", "--what=attention", "--heads=SSL", "--n_head=4", "--head_dim=16,8", "--lengths=16,64")
    args += ("--tokens=128", "--device=cpu", "--dtype=float32", "--repeats=2", f"--out={out_file}")
    args += (f"--only={','.join(names)}",)
    code, out, _ = run("bench.py", *args)
    assert code == 0 and "WRONG" not in out and "out of time" not in out
    results = json.loads(out_file.read_text())
    assert min(results["ceilings"].values()) > 1e8
    rows = {(row["subject"], row["d"], row["n"]): row for row in results["attention"]}
    assert list(rows) == [(name, d, n) for d in (16, 8) for n in (16, 64) for name in names]
    row = rows["softmax", 16, 64]
    assert row["batch"] == 2 and row["error"] < 1e-5 and set(row["against"]) == {"sdpa flash"}
    # causal: 4 D products per pair of tokens, and both ceilings are known, so the share is the time's
    flops = 2 * 4 * (4 * 16) * 64 * 65 / 2
    least = max(flops / results["ceilings"]["flops"], 2 * 4 * 64 * 16 * 4 * 4 / results["ceilings"]["bytes_per_s"])
    assert row["share"]["forward"] == pytest.approx(1e3 * least / row["ms"]["forward"])
    assert "how many times as fast as sdpa flash" in out
    code, out, _ = run("bench.py", *args, "--budget=1e-9")
    assert code == 0 and out.count("out of time (--budget)") == 2


def test_bench_counts_the_work_of_what_is_computed(run):
    """There are as many products as a mask has ones."""
    bench = runpy.run_path(os.path.join(ROOT, "bench.py"))
    bench["work"].__globals__.update(n_head=3, window=5)
    for n in (4, 30):
        tokens = torch.zeros(n, 1)
        seen = {"S": visible(tokens, tokens, 5).sum(), "L": n * (n + 1) / 2}
        for pattern in ("L", "S", "SSL"):
            subject = bench["Subject"](pattern=pattern)
            pairs = sum(seen[letter] for letter in (pattern * 3)[:3]) / 3
            assert bench["work"](subject, n, 8)[0] == pytest.approx(float(4 * 8 * pairs))


def test_bench_goes_on_without_what_fails(capsys):
    left = [1, 0]
    tasks = {"works": lambda: {"ms": 1.0}, "fails later": lambda: {"ms": 1 / left.pop(0)}}
    assert list(timing.interleaved(tasks, "cpu", 2)) == ["works"]
    out, err = capsys.readouterr()
    assert "fails later left out (ZeroDivisionError: " in out and "Traceback" in err


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: an assert")])
def test_bench_says_in_a_line_what_is_no_bug(error, capsys):
    def f():
        raise error

    assert timing.tried("much", f, "cpu") is None
    out, err = capsys.readouterr()
    assert out.startswith("much left out (") and not err


def test_training_on_a_gpu(run, tmp_path):
    """Other ways to compute the loss give the same loss."""
    small = ("--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=24", "--vocab_size=97", "--batch_size=2")
    same = "plain,no wait,flash,triton,logits in bfloat16,chunks"
    args = (
        "--device=cpu",
        "--dtype=float32",
        "--no-compile",
        "--steps=6",
        "--chunks=3",
        f"--out={tmp_path / 't.json'}",
    )
    code, out, err = run("lab/experiments/gpu_training.py", *small, *args, f"--only={same},beta")
    assert code == 0, err
    results = json.loads((tmp_path / "t.json").read_text())
    losses = [results[name]["loss"] for name in same.split(",")]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=1e-5) and 3 < losses[0] < 5
    assert abs(results["beta"]["loss"] - losses[0]) > 1e-6 and results["plain"]["tokens_per_s"] > 0
    code, _, err = run("lab/experiments/gpu_training.py", *small, *args, "--only=plan")
    assert code == 2 and "'plan' is not one of plain" in err


def test_bench_models_steps_and_decoding(run, tmp_path, small_models):
    sizes = ("--model_lengths=16,160", "--step_length=16", "--decode_length=8", f"--out={tmp_path / 'b.json'}")
    code, out, _ = run("bench.py", *TINY, "--what=model,step,decode", *sizes)
    assert code == 0
    results = json.loads((tmp_path / "b.json").read_text())
    names = [f"{core} {pattern}" for core in ATTENTION for pattern in ("L", "SL")]
    names += [f"softmax/{core} conv SL" for core in forms.SUMS]
    assert [(row["subject"], row["n"]) for row in results["model"]] == [(name, n) for n in (16, 160) for name in names]
    assert [row["subject"] for row in results["step"]] == names
    speeds = [row for row in results["decode"] if "tokens_per_s" in row]
    assert [row["subject"] for row in speeds] == [
        *names, "softmax L, GQA 2", "softmax L, MQA", "softmax L, no cache"
    ]  # fmt: skip
    assert speeds[0]["ratio"] == 1 and all(row["ratio"] > 0 for row in speeds[:-1])
    size = {(row["subject"], row["n"]): row["cache_bytes"] for row in results["decode"] if "cache_bytes" in row}
    assert size["softmax L", 8192] == 8 * size["softmax L", 1024] == 2 * 2 * 48 * 8192 * 4
    assert size["beta L", 8192] == size["beta L", 1024]
    assert size["softmax L", 1024] == 3 * size["softmax L, GQA 2", 1024] == 6 * size["softmax L, MQA", 1024]


def test_bench_has_nanogpts_model():
    """Its Shakespeare model, in the bytes of its cache."""
    at = timing.Setting("cpu", contextlib.nullcontext(), "SL", 1, 1)
    assert timing.cache_bytes(at, GPT(GPTConfig(1024, **timing.GPT_10M))) == 6 * 2 * 384 * 1024 * 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("--lengths=a,b", "--lengths must be positive integers"),
        ("--head_dim=8,0", "--head_dim must be positive integers"),
        ("--tokens=-1", "must not be negative"),
        ("--suite=big", "all, quick, gpu"),
        ("--lengths=", "positive integers"),
        ("--repeats=0", "must be positive"),
        ("--what=attn", "not one of attention, model, step, decode"),
        ("--only=sdap", "not one of sdpa"),
        ("--heads=S/L", "the pattern of one layer"),
        ("--heads=SX", "made of S (short) and L (long)"),
        ("--window=-1", "0 (a token sees itself alone) or more"),
        ("--out=/nonexistent/bench.json", "no file can be written there"),
    ],
)
def test_bench_refuses(run, wrong, says):
    code, _, err = run("bench.py", *TINY, wrong)
    assert code == 2 and says in err


# -----------------------------------------------------------------------------
# all of them


SCRIPTS = ["tests/faults.py"] + ["tests/resources.py"] * bool(importlib.util.find_spec("triton"))
for pattern in ("*.py", "data/*/*.py", "scripts/*.py"):
    paths = sorted(path for path in pathlib.Path(ROOT).glob(pattern) if path.name != "configurator.py")
    SCRIPTS += [
        str(p.relative_to(ROOT)) for p in paths if re.search(r"^ *config, .*= configure\(", p.read_text(), re.M)
    ]


def help_of(run, script: str) -> dict[str, list[str]]:
    """What --help says: for each heading, the text of each flag below it."""
    code, out, _ = run(script, "--help")
    assert code == 0 and "usage: python" in out and all(len(line) <= 100 for line in out.splitlines())
    flags = out[out.index("usage: python") :].split("\n\n")[2:]
    return {group.split("\n")[0]: group.split("\n  --")[1:] for group in flags}


def names(group: list[str]) -> list[str]:
    return [flag.split("=")[0] for flag in group]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_flag(run, script):
    groups = help_of(run, script)
    flags = [flag for group in groups.values() for flag in group]
    assert flags and len(set(names(flags))) == len(flags)
    for flag in flags:
        default, text = re.split(r"\s{2,}", flag, maxsplit=1)
        assert "=" in default and text.strip() and "a name in" not in text, flag


def test_help_of_train_has_each_flag_in_one_group_and_names_what_is_in_a_table(run, monkeypatch):
    monkeypatch.setitem(ATTENTION, "my_own", ATTENTION["softmax"])
    groups = help_of(run, "train.py")
    monkeypatch.undo()
    assert all(heading.endswith("?") for heading in groups) and 8 <= len(groups) <= 15
    where = {name: heading for heading, group in groups.items() for name in names(group)}
    source = open(os.path.join(ROOT, "train.py"), encoding="utf-8").read()
    own = re.findall(r"^([a-z]\w*)(?:: .*)? = .*  # ", source[: source.index("configure(globals()")], re.M)
    assert set(where) == {*own, *GPTConfig.__dataclass_fields__} and len(own) > 40
    assert where["attention"] == where["heads"] == "Which attention?" and where["vocab_size"] == where["n_layer"]
    tables = {"attention": [*ATTENTION, "my_own"], "position": POSITION, "norm": NORM, "qk_norm": QK_NORM}
    for name, table in (tables | {"where": WHERE, "mlp": ACTIVATION}).items():
        text = next(flag for group in groups.values() for flag in group if flag.startswith(f"{name}="))
        assert ", ".join(table) in " ".join(text.split()), text


def test_from_another_working_directory(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("train.py", "config/train_shakespeare_char_cpu.py", f"--dataset={data}", "--max_iters=2",
                         "--eval_iters=1", "--device=cpu", "--sample_tokens=20", "--out_dir=mine")  # fmt: skip
    assert code == 0 and "a sample" in out and sorted(os.listdir("mine")) == ["best.pt", "ckpt.pt", "log.jsonl"]
    assert run("sample.py", "--out_dir=mine", "--num_samples=1", "--max_new_tokens=5", "--start= ")[0] == 0
