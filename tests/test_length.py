"""experiments/length.py at a tiny scale, and what it is about: a text that goes on as one longer text would."""

import concurrent.futures
import json
import os
import random
import runpy

import pytest
import torch
from conftest import ROOT
from test_scripts import quick  # noqa: F401
from torch.nn import functional as F

from model import GPT, GPTConfig
from text.tokenizers import ByteTokenizer

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 11, "block_size": 16}
MIXED = {"heads": "SSSL", "window": 4, "attention": "beta2", "short_attention": "softmax", "conv": 4}


@pytest.fixture
def length(run, data, tmp_path, monkeypatch):
    """length("--what=steps") -> (exit code, stdout, stderr) of the script, which then starts threads, not processes."""
    threads = lambda n, mp_context: concurrent.futures.ThreadPoolExecutor(n)  # noqa: E731
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", threads)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(
        "n_layer = 1\nn_head = 4\nn_embd = 32\nbatch_size = 4\ngradient_accumulation_steps = 1\neval_iters = 1\n"
        "warmup_iters = 1\nlearning_rate = 1e-2\ndevice = 'cpu'\n"
    )
    flags = [f"--dataset={data}", f"--config_file={tmp_path / 'small.py'}", f"--out_dir={tmp_path / 'runs'}"]
    flags += [f"--out={tmp_path / 'length.json'}", f"--picture={tmp_path / 'length.png'}"]
    flags += ["--lengths=64,128", "--double=64,128", "--repeats=1", "--steps=3", "--blocks=32"]
    return lambda *args: run("experiments/length.py", *flags, *args)


def test_the_length_experiment(length, quick, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    only = "--only=softmax;beta, decay;beta, alibi"
    more = "--tokens=100", "--slide=20", "--far=128"
    code, out, err = length(only, *more)
    assert code == 0, err
    results = json.loads((tmp_path / "length.json").read_text())
    assert {part: [*rows] for part, rows in results.items()} == {
        "steps": ["softmax", "beta, decay"], "double": ["softmax", "beta, decay"],
        "decode": ["beta, alibi"], "far": ["beta, alibi"],
    }  # fmt: skip
    assert [*results["steps"]["softmax"]] == ["64", "128"] and os.path.getsize(tmp_path / "length.png") > 10_000
    wrote = results["decode"]["beta, alibi"]["32"]["endless"]
    assert wrote["first"]["cache_bytes"] == wrote["last"]["cache_bytes"] > 0
    read = results["far"]["beta, alibi"]["32"]["pieces"]
    assert [*read["sums"]] == [*read["slides"]] == ["0-64", "64-128"]
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert sum("beta, alibi" in line for line in tables) == 2 + 1 + 1 and "| softmax |" in "".join(tables)

    again = length(only, *more)[1]
    assert tables == [line for line in again.splitlines() if line.startswith("|")] and "steps, " not in again
    out = length("--what=steps", "--only=softmax", "--lengths=64,128,256", "--patience=0")[1]
    assert "steps, softmax: no 128 tokens (--patience" in out
    for wrong, says in (("--what=stepps", "not one of"), ("--only=x", "not one of"), ("--lengths=0", "positive")):
        code, _, err = length("--what=steps", wrong)
        assert code == 2 and says in err


def test_losses_by_position():
    """Through a cache as without one; and in windows each loss is that of a window that ends at most a hop later."""
    module = runpy.run_path(os.path.join(ROOT, "experiments", "length.py"))
    gpt = GPT(GPTConfig(**SMALL | MIXED, position="rope")).eval()
    x = torch.randint(11, (2, 71))
    found = module["in_windows"](gpt, x)  # a hop of 1
    for t in range(70):
        at = max(0, t + 1 - 16)
        logits = gpt(x[:, at : t + 1])[0][:, 0]
        torch.testing.assert_close(found[:, t], F.cross_entropy(logits, x[:, t + 1], reduction="none"))
    whole = GPT(GPTConfig(**SMALL | MIXED | {"block_size": 70}, position="rope")).eval()
    whole.load_state_dict(gpt.state_dict())
    logits = whole(x[:, :-1], x[:, 1:])[0]
    want = F.cross_entropy(logits.mT, x[:, 1:], reduction="none")
    torch.testing.assert_close(module["through_a_cache"](gpt, x, piece=13), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[:, :16], want[:, :16], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "choices",
    [
        MIXED | {"position": "rope"},
        MIXED | {"position": "alibi"},
        {"attention": "beta", "position": "alibi"},
        {"attention": "beta", "position": "none", "conv": 4},
    ],
    ids=str,
)
def test_endless_decoding_is_that_of_a_longer_context(choices):
    """Tokens past block_size are those of a model with a larger block_size; the cache keeps its size."""
    gpt = GPT(GPTConfig(**SMALL | choices)).eval()
    with torch.no_grad():
        for p in gpt.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.2)
    longer = GPT(GPTConfig(**SMALL | choices | {"block_size": 200})).eval()
    longer.load_state_dict(gpt.state_dict())
    start = torch.randint(11, (1, 20))
    caches, new_cache = [], gpt.new_cache
    gpt.new_cache = lambda *args: caches.append(new_cache(*args)) or caches[-1]
    sizes = []
    tokens = []
    for token in gpt.stream(start, 120, temperature=1.0, seed=3, endless=True):
        tokens.append(token)
        sizes.append(caches[-1].nbytes)
    assert len({*sizes}) == 1
    assert torch.equal(torch.cat(tokens, dim=1), longer.generate(start, 120, temperature=1.0, seed=3)[:, 20:])


def test_sample_goes_on(run, train, tmp_path):
    assert train("--attention=beta", "--position=none", "--decay=learned", "--conv=4", "--max_iters=3")[0] == 0
    flags = f"--out_dir={tmp_path / 'out'}", "--num_samples=1", "--start= ", "--device=cpu", "--top_k=None"
    code, out, err = run("sample.py", *flags, "--endless", "--max_new_tokens=300")
    assert code == 0 and len(out.split("\n", 1)[1]) == 1 + 300 + len("\n---------------\n"), err
    slides = run("sample.py", *flags, "--max_new_tokens=300")[1]
    assert out != slides and out[: out.index("\n") + 32] == slides[: out.index("\n") + 32]
    code, out, err = run("sample.py", *flags, "--endless", "--no-use_cache")
    assert code == 2 and "it needs use_cache" in err


@pytest.mark.parametrize("nope_long", [False, True])
def test_sample_notes_that_long_heads_with_rope_get_worse(run, train, tmp_path, nope_long):
    mixed = ["--heads=SSSL", "--window=8", "--short_attention=softmax", "--attention=beta", "--position=rope"]
    assert train(*mixed, *["--nope_long"] * nope_long, "--max_iters=1")[0] == 0
    flags = f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--num_samples=1", "--start= ", "--max_new_tokens=40"
    assert "may get worse" not in run("sample.py", *flags)[2]
    assert ("may get worse" in run("sample.py", *flags, "--endless")[2]) != nope_long


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        (["--attention=softmax", "--position=rope"], "long heads of attention='softmax' keep all keys and values"),
        (["--attention=beta"], "position='learned' knows no later positions"),
    ],
)
def test_sample_says_why_it_cannot_go_on(run, train, tmp_path, choice, why):
    assert train(*choice, "--max_iters=1")[0] == 0
    code, out, err = run("sample.py", f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--start= ", "--endless")
    assert code == 2 and f"--endless: this model cannot go on past its block_size=32: {why}" in err


@pytest.mark.parametrize("seed", range(5))
def test_a_long_text_is_shown_as_it_is_decoded_whole(seed):
    """sample.py decodes the last tokens only, which may begin within a character."""
    text_of = runpy.run_path(os.path.join(ROOT, "sample.py"))["text_of"]
    tok, draw = ByteTokenizer(), random.Random(seed)
    some = "".join(draw.choices("aé漢🙂 ", k=150)).encode()
    ids = [*some, *draw.choices([0xE6, 0xBC, 0xA2, 0xF0, 65], k=300), *some, *b"the end"]
    prompt = [*"漢".encode()[:2]]
    want = tok.decode(prompt + ids)[len(tok.decode(prompt)) :]
    assert "".join(text_of(map(torch.tensor, ids), tok, None, prompt)) == want
    assert "".join(text_of(map(torch.tensor, ids), tok, "the end", prompt)) == want.removesuffix("the end")
