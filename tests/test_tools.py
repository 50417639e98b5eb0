"""The tools around a run: eval.py, --dry_run, the configs, scripts/plot.py, wandb and TensorBoard."""

import glob
import itertools
import json
import math
import os
import re
import runpy
import struct
import sys
import unittest.mock

import pytest
import torch
from harness import ROOT, state_of, write

from model import GPT, GPTConfig
from text import dataset, tokenizers
from text.dataset import Tokens
from training import checkpoint, estimate

# -----------------------------------------------------------------------------
# eval.py


@pytest.mark.parametrize(("T", "stride"), [(8, 8), (8, 1), (16, 5), (836, 10), (837, 837)])
def test_strided_windows_have_every_token_once(data, T, stride):
    tokens = Tokens(data, "val", T)
    n, seen, all_x = len(tokens), [], []
    for x, y in tokens.strided(stride, 3):
        all_x += x.tolist()
        seen += [[t if t >= 0 else None for t in row] for row in y.tolist()]
        assert len(x) <= 3
    targets = [t for row in seen for t in row if t is not None]
    assert targets == tokens.ids[1:].tolist() and len(targets) == n - 1
    counts = [sum(t is not None for t in row) for row in seen]
    assert counts[0] == T and all(0 < count <= stride for count in counts[1:])  # context of T - stride, at the least
    ranks = [[row for x, _ in tokens.strided(stride, 3, rank=r, world=3) for row in x.tolist()] for r in range(3)]
    assert [ranks[i % 3][i // 3] for i in range(len(all_x))] == all_x


def measures(out: str) -> dict[str, float]:
    """The numbers that eval.py has printed: loss, perplexity token, perplexity word, bits."""
    found = re.findall(r"^(loss|perplexity|bits per byte) +([\d.]+)(?: per (token|word))?", out, re.M)
    return {f"{name} {of}".strip(): float(value) for name, value, of in found}


def test_eval_is_the_mean_over_all_tokens(train, run, data, tmp_path):
    """With stride 1 every measure comes from each token's -log p given the block_size tokens before it."""
    assert train("--max_iters=10")[0] == 0
    code, out, _ = run("eval.py", f"--out_dir={tmp_path / 'out'}", "--stride=1", "--batch_size=64", "--device=cpu")
    gpt = checkpoint.model_of(state_of(tmp_path, checkpoint.BEST)).eval()
    ids, T = torch.from_numpy(Tokens(data, "val", 32).ids.astype(int)), 32
    losses = []
    with torch.no_grad():
        for i in range(1, len(ids)):
            x = ids[max(0, i - T) : i]
            losses.append(-gpt(x[None])[0][0, -1].log_softmax(-1)[ids[i]].item())
    total, got = sum(losses), measures(out)
    entry = dataset.read_meta(data)["files"]["val.bin"]
    assert code == 0 and got["loss"] == pytest.approx(total / (len(ids) - 1), abs=1e-4)
    assert got["perplexity token"] == pytest.approx(math.exp(total / (len(ids) - 1)), abs=1e-2)
    assert got["perplexity word"] == pytest.approx(math.exp(total / entry["words"]), rel=1e-3)
    assert got["bits per byte"] == pytest.approx(total / math.log(2) / entry["bytes"], abs=1e-4)


def test_eval_on_longer_windows_than_in_training(train, run, data, tmp_path):
    assert train("--position=sinusoidal", "--max_iters=5")[0] == 0
    flags = f"--out_dir={tmp_path / 'out'}", "--which=latest", "--device=cpu", "--block_size=128", "--stride=128"
    code, out, err = run("eval.py", *flags)
    state, tokens = state_of(tmp_path), Tokens(data, "val", 128)
    gpt = checkpoint.model_of(state, block_size=128).eval()
    with torch.no_grad():
        total = sum(gpt(x, y)[1].item() * (y >= 0).sum().item() for x, y in tokens.strided(128, 4))
    assert code == 0 and measures(out)["loss"] == pytest.approx(total / (len(tokens) - 1), abs=1e-4), err


def test_eval_says_what_does_not_fit(train, run, tmp_path, text):
    train("--max_iters=2")
    tok = tokenizers.CharTokenizer("".join(sorted(set(text + "XYZ"))))
    write(tmp_path / "other", tok, {"train": text, "val": text}, {})
    out = f"--out_dir={tmp_path / 'out'}"
    for flags, says in (
        ((f"--out_dir={tmp_path / 'none'}",), "there is no checkpoint"),
        ((out, "--stride=0"), "stride=0 must be between 1 and block_size=32"),
        ((out, "--block_size=64"), "if positions are learned, above 32"),
        ((out, "--batch_size=0"), "must be at least 1"),
        ((out, "--split=test"), "has no split 'test', but train, val"),
        ((out, f"--dataset={tmp_path / 'other'}"), "this model has another one (char, "),
        ((out, "--dataset=nowhere"), "there is no data set"),
    ):
        code, _, err = run("eval.py", "--device=cpu", *flags)
        assert code == 2 and says in err and "Traceback" not in err, err


def test_eval_of_gpt2s_weights(run, tmp_path, bpe):
    """Out of a local folder, on data in GPT-2's tokens."""
    transformers = pytest.importorskip("transformers")
    bpe(*(b"<%d>" % i for i in range(50000)))
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16))
    theirs.save_pretrained(tmp_path / "gpt2")
    text = "a rose is a rose is a rose. " * 20
    write(tmp_path / "rose", tokenizers.GPT2Tokenizer(), {"train": text, "val": text}, {})
    flags = (f"--init_from={tmp_path / 'gpt2'}", f"--dataset={tmp_path / 'rose'}", "--device=cpu")
    code, out, err = run("eval.py", *flags, "--stride=16")
    assert code == 0 and measures(out)["loss"] == pytest.approx(math.log(50257), rel=0.02), err
    assert run("eval.py", flags[0], "--device=cpu")[0] == 2


@pytest.mark.parametrize("kind", tokenizers.TOKENIZER)
def test_train_sample_and_eval_with_every_tokenizer(kind, run, train, tmp_path, text, bpe):
    """From text files to text, by its own commands; the boundary of documents is typed as it is printed."""
    bpe()
    os.makedirs(tmp_path / "texts")
    for i in range(20):
        (tmp_path / "texts" / f"{i:02d}.txt").write_text(text[i * 400 : i * 400 + 400] + "\n")
    flags = (f"--source={tmp_path / 'texts'}", f"--out_dir={tmp_path / 'docs'}", f"--tokenizer={kind}")
    code, out, err = run("data/text/prepare.py", *flags, "--vocab_size=290")
    assert code == 0 and "train has" in out, err
    code, out, err = train(f"--dataset={tmp_path / 'docs'}", "--max_iters=5", "--sample_tokens=20")
    assert code == 0 and "a sample" in out, err
    sample = ("sample.py", f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--num_samples=1", "--max_new_tokens=20")
    for start in ("\n", tokenizers.END, "the lord", f"the lord{tokenizers.END}of all"):
        code, out, err = run(*sample, f"--start={start}")
        assert code == 0 and out.splitlines()[1:2] != [] and start.strip() in out, err
    code, out, err = run("eval.py", f"--out_dir={tmp_path / 'out'}", "--device=cpu")
    assert code == 0 and 0.5 < measures(out)["bits per byte"] < 10, err


# -----------------------------------------------------------------------------
# --dry_run


def dry(run, *flags: str) -> str:
    code, out, err = run("train.py", "--dry_run", "--device=cpu", *flags)
    assert code == 0, err
    return out


def test_a_dry_run_touches_nothing(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = dry(run, "--dataset=openwebtext", f"--out_dir={tmp_path / 'out'}", "--n_layer=2", "--n_embd=64", "--n_head=2")
    assert os.listdir(tmp_path) == [] and not os.path.exists(os.path.join(ROOT, "data", "openwebtext", "meta.json"))
    gpt = GPT(GPTConfig(n_layer=2, n_embd=64, n_head=2, bias=False, vocab_size=50257))
    assert f"parameters: {estimate.num_params(gpt, non_embedding=False):,}, {estimate.num_params(gpt):,} without" in out
    assert f"FLOPs: {estimate.flops(gpt):,} per token" in out and "491,520 per step (480 x 1024)" in out
    assert "its vocabulary is unknown: assuming 50,257" in out and "not prepared" in out
    assert " GiB for weights" in out and " on 1 x A100, " in out


def test_a_dry_run_knows_the_data_and_resumed_runs(run, train, data, tmp_path, text):
    train("--max_iters=2")
    times = lambda: {name: os.stat(tmp_path / "out" / name).st_mtime_ns for name in os.listdir(tmp_path / "out")}  # noqa: E731
    before = times()
    out = dry(run, "--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--max_iters=100")
    assert "tokens: 256 per step (8 x 32), 25,600 in 100 steps, 3.40 epochs of 7,536" in out
    assert before == times()


def test_a_dry_run_of_what_is_not_there(run, tmp_path):
    """Data: the vocabulary that they will have. Pretrained weights: their sizes, and flags that do not fit."""
    out = dry(run, "config/train_pg19_ls.py", "--block_size=16", f"--dataset={tmp_path / 'none'}")
    assert "there is no data set" in out and "its vocabulary is unknown: assuming 50,257" in out
    code, _, err = run("train.py", "--dry_run", "--init_from=gpt2", "--n_layer=3")
    assert code == 2 and "--n_layer=3 does not fit gpt2, which has n_layer=12" in err
    flags = ["--init_from=gpt2", "--attention=laser", "--block_size=16", "--dataset=openwebtext"]
    out = dry(run, *flags)
    assert "assuming" not in out and "parameters: 123,665,664," in out


def test_the_numbers_of_a_dry_run(monkeypatch):
    """AdamW needs 16 bytes a parameter, copies in half precision 2; FSDP shares them out; time is FLOPs by rate."""
    config = GPTConfig(n_layer=12, n_embd=768, n_head=12, block_size=1024)
    with torch.device("meta"):
        gpt = GPT(config)
    n, matrices = estimate.num_params(gpt, non_embedding=False), 12 * 12 * 768 * 768
    settings = {"batch_size": 4, "gradient_accumulation_steps": 10, "max_iters": 1000, "parallel": "ddp"}
    for change, dtype, world, held in (
        ({}, "float32", 1, 16 * n),
        ({}, "bfloat16", 2, 18 * n),
        ({"parallel": "fsdp"}, "bfloat16", 2, 9 * n),
        ({"optimizer": "muon"}, "float32", 20, 16 * n - 4 * matrices),
    ):
        run = {"optimizer": "adamw"} | settings | change
        out = estimate.report(config, run | {"gpus": None}, None, "cpu", dtype, world)
        gib = float(re.search(r"memory of a process: (\S+) GiB for weights", out)[1])
        assert gib == pytest.approx(held / 2**30, abs=0.006)
        seconds = estimate.flops(gpt) * 40 * 1024 * 1000 / 0.4 / world
        assert f"{estimate.duration(max(seconds / 989e12, 10))} on {world} x H100" in out  # 10 ms a step, or more
    times = {0.4: "0 s", 119: "119 s", 150: "2.5 min", 9000: "2.5 hours", 950400: "11.0 days"}
    assert [estimate.duration(x) for x in times] == [*times.values()]


def test_a_dry_run_for_gpus(run):
    """Their number divides the batch; what does not fit is said; activations are what autograd keeps, roughly."""
    flags = ("config/train_gpt2.py", "--gpus=8 x A100")
    out = dry(run, *flags)
    assert "2.08 GiB for weights" in out and " of 40 GiB\n" in out and out.rstrip().endswith("days on 8 x A100")
    assert ": too much. Try a smaller --batch_size" in dry(
        run, *flags, "--batch_size=60", "--gradient_accumulation_steps=8"
    )
    for more, says in ((["--gpus=8 A100"], "known GPUs are A100"), (["--gpus=7xA100"], "among 7 processes"),
                       (["--dry_run=0"], "--gpus has no effect")):  # fmt: skip
        code, _, err = run("train.py", *flags, "--dry_run", *more)
        assert code == 2 and says in err
    kept = {}
    for dtype, n_layer in itertools.product(("float32", "bfloat16"), (1, 3)):
        gpt, x = GPT(GPTConfig(32, 16, n_layer, 4, 128)), torch.zeros(64, 32, dtype=torch.long)
        found = {}
        keep = lambda t, found=found: found.setdefault(t.untyped_storage().data_ptr(), t)  # noqa: E731
        amp = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")
        with amp, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            gpt(x, x)
        weights = {p.untyped_storage().data_ptr() for p in gpt.parameters()}
        kept[dtype, n_layer] = sum(t.untyped_storage().nbytes() for at, t in found.items() if at not in weights)
    for dtype in ("float32", "bfloat16"):
        of_layer = (kept[dtype, 3] - kept[dtype, 1]) / 2 / (64 * 32 * 128)
        of_channel, of_hidden = estimate.ACTIVATIONS[dtype]  # an MLP is 4 times as wide
        assert of_layer == pytest.approx(of_channel + 4 * of_hidden, rel=0.2)


CONFIGS = sorted(os.path.basename(path) for path in glob.glob(os.path.join(ROOT, "config", "*.py")))
TINY = ("--n_layer=1", "--n_embd=16", "--n_head=2", "--head_dim=8", "--n_hidden=16", "--heads=L", "--block_size=16")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_one(name, run, monkeypatch):
    pretrained = runpy.run_path(os.path.join(ROOT, "config", name)).get("init_from")
    flags = ["--block_size=16"] if pretrained else TINY
    code, out, err = run("train.py", f"config/{name}", "--dry_run", "--device=cpu", *flags)
    assert code == 0 and "FLOPs: " in out, err
    if pretrained:  # https://huggingface.co/docs/transformers: 124M, 355M, 774M, 1558M; positions cut to 16
        n = {"gpt2": 124439808, "gpt2-medium": 354823168, "gpt2-large": 774030080, "gpt2-xl": 1557611200}[pretrained]
        width = {"gpt2": 768, "gpt2-medium": 1024, "gpt2-large": 1280, "gpt2-xl": 1600}[pretrained]
        assert f"parameters: {n - (1024 - 16) * width:,}," in out


@pytest.mark.parametrize(
    ("name", "vocab_size", "millions"),
    [
        ("train_gpt2", 50304, 124),
        ("train_shakespeare_char", 65, 10.65),
        ("train_pg19_ls", 10000, 6.5),
        ("train_laser_301m", 32000, 301),
        ("train_laser_1_1b", 32000, 1140),
        ("train_laser_2_2b", 32000, 2210),
        ("train_laser_7_7b", 32000, 7730),
    ],
)
def test_the_configs_have_the_papers_sizes(name, vocab_size, millions):
    names = GPTConfig.__dataclass_fields__
    settings = {k: v for k, v in runpy.run_path(os.path.join(ROOT, "config", f"{name}.py")).items() if k in names}
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**{"bias": False, "vocab_size": vocab_size} | settings))
    total = estimate.num_params(gpt, non_embedding=False) - gpt.transformer.wpe.weight.numel()
    assert total / 1e6 == pytest.approx(millions, rel=0.005)


# -----------------------------------------------------------------------------
# scripts/plot.py, wandb


def test_plot(run, train, tmp_path):
    pytest.importorskip("matplotlib")
    train("--log_logits")
    train(f"--out_dir={tmp_path / 'b'}", "--max_iters=20")
    runs, sizes = f"--runs={tmp_path / 'out'},{tmp_path / 'b'}/", []
    for flags in (("--x=tokens",), ("--x=time", "--y=loss")):
        code, out, err = run("scripts/plot.py", runs, f"--out={tmp_path / 'c.png'}", *flags)
        assert code == 0 and (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG", err
        assert "b: 20 steps, 5,120 tokens, best validation loss" in out
        sizes.append(struct.unpack(">II", (tmp_path / "c.png").read_bytes()[16:24]))
    assert sizes[0][0] == 4 * sizes[1][0]  # four curves, and one
    code, out, _ = run("scripts/plot.py", f"--runs={tmp_path / 'b'}", "--y=loss,logit", f"--out={tmp_path / 'd.png'}")
    assert code == 0 and "no run has logged logit" in out
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "log.jsonl").write_text("{1")
    for flags, says in (
        ((f"--runs={tmp_path / 'none'}",), "there is no"),
        ((f"--runs={tmp_path / 'bad'}",), "is empty"),
        ((runs, "--y=los"), "is not one of loss, norm"),
        ((f"--runs={tmp_path / 'b'}", "--y=logit"), "none of these runs has logged logit"),
        (("--runs=,",), "none of these runs has logged"),
    ):
        code, _, err = run("scripts/plot.py", *flags, f"--out={tmp_path / 'e.png'}")
        assert code == 2 and says in err and not os.path.exists(tmp_path / "e.png"), err


def test_the_axes_of_a_plot(tmp_path):
    """Tokens and hours are sums over the steps, which need not be logged each."""
    module = runpy.run_path(os.path.join(ROOT, "scripts", "plot.py"))
    rows = [{"iter": i, "loss": 1.0, "ms": 1000.0 * (i + 1), "tokens_per_s": 100.0 / (i + 1)} for i in (0, 10, 20)]
    rows += [{"iter": i, "val_loss": 2.0} for i in (0, 6, 20, 31)]  # before their steps
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    got = module["read"](str(tmp_path))
    assert [row["steps"] for row in got] == [1, 11, 21, 0, 6, 20, 31]
    assert [row["tokens"] for row in got] == pytest.approx([100, 1100, 2100, 0, 600, 2000, 3100])
    assert [row["time"] * 3600 for row in got] == pytest.approx([1, 111, 321, 0, 1 + 5 * 11, 321 - 21, 321 + 10 * 21])
    mean = module["running_mean"]
    assert mean([math.inf, 4.0, 2.0], [1, 2, 3], 1e9) == pytest.approx([math.nan, 4, 3], nan_ok=True)
    half = 10 / math.log(2)  # ten steps later a value weighs a half, however often a run was logged
    assert mean([4.0, 2.0], [1, 11], half) == pytest.approx([4, (0.5 * 4 + 2) / 1.5])
    assert mean([4.0, 2.0] * 50, range(0, 1000, 10), half)[-1] == pytest.approx(8 / 3)


def test_plots_of_runs_that_have_little_or_go_on(run, tmp_path):
    """Evaluations alone, a norm that overflowed, a line that is being written."""
    step = {"loss": 2.0, "norm": 1.0, "ms": 1.0, "tokens_per_s": 1.0}
    rows = [step | {"iter": 0, "norm": math.inf}, *(step | {"iter": i} for i in range(1, 9))]
    for name, log in (("a", rows), ("b", [{"iter": 0, "val_loss": 3.0}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log) + '{"iter": 9, "lo')
    for runs in (f"{tmp_path / 'a'},{tmp_path / 'b'}", f"{tmp_path / 'b'}"):
        code, out, err = run("scripts/plot.py", f"--runs={runs}", f"--out={tmp_path / 'c.png'}")
        assert code == 0 and os.path.exists(tmp_path / "c.png") and "best validation loss 3.0000" in out, err
        os.remove(tmp_path / "c.png")


def test_wandb(train, monkeypatch):
    """Its curves are log.jsonl's, and it gets the run's settings."""
    wandb = unittest.mock.MagicMock()
    wandb.run.id, wandb.Error = "the id", OSError
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    code, out, err = train("--wandb_log", "--wandb_project=p", "--wandb_run_name=n", "--max_iters=5")
    assert code == 0, err
    settings = wandb.init.call_args.kwargs
    assert (settings["project"], settings["name"], settings["config"]["attention"]) == ("p", "n", "softmax")
    logged = {key for call in wandb.mock_calls for arg in call.args if isinstance(arg, dict) for key in arg}
    assert {"loss", "lr", "val_loss"} <= logged


def test_tensorboard(train, tmp_path):
    """Its curves are log.jsonl's, also of a resumed run; a new run does not mix with an older one's."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read() -> object:
        return events.EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()

    flags = ("--tensorboard", "--log_logits")
    for extra in (("--max_iters=10",), ("--init_from=resume", "--max_iters=15"), ("--max_iters=7",)):
        code, _, err = train(*flags, *extra)
        assert code == 0, err
        with open(tmp_path / "out" / "log.jsonl") as f:
            logged = [*map(json.loads, f)]
        found = read()
        for key in ("loss", "norm", "lr", "val_loss"):
            theirs = {event.step: event.value for event in found.Scalars(key)}
            assert theirs == pytest.approx({row["iter"]: row[key] for row in logged if key in row})
        assert "max_logit/1" in found.Tags()["scalars"]
        settings = found.Tensors("settings/text_summary")[-1]
        assert b"attention = 'softmax'" in settings.tensor_proto.string_val[0]
