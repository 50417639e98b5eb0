"""Tools around a run: eval.py, --dry_run, the configs, wandb."""

import glob
import math
import os
import re
import runpy
import shlex
import sys
from unittest import mock

import pytest
import torch
from harness import ROOT, done, log_of, parametrize, refused, state_of, write, written

from model import GPT, GPTConfig
from text import dataset, tokenizers
from text.dataset import Tokens
from training import checkpoint, estimate
from training.pretrained import SOURCES

# -----------------------------------------------------------------------------
# eval.py


@parametrize("T, stride", [(8, 1), (16, 5), (837, 837)])
def test_strided_windows_have_every_token_once(data, T, stride):
    tokens = Tokens(data, "val", T)
    targets = []
    counts = []
    for x, y in tokens.strided(stride, 3):
        assert len(x) <= 3
        targets += y[y >= 0].tolist()
        counts += (y >= 0).sum(1).tolist()
    assert targets == tokens.ids[1:].tolist()
    assert counts[0] == T
    assert all(0 < count <= stride for count in counts[1:])  # context of at least T - stride


def measures(out):
    """The numbers that eval.py has printed: loss, perplexity token, perplexity word, bits."""
    pattern = r"^(loss|perplexity|bits per byte) +([\d.]+)(?: per (token|word))?"
    found = re.findall(pattern, out, re.M)
    return {f"{name} {unit}".strip(): float(value) for name, value, unit in found}


def test_eval_is_the_mean_over_all_tokens(train, run, data, tmp_path):
    """With stride 1, each token's -log p is given the T tokens before it, more than in training."""
    T = 48
    train("--position=rope --max_iters=6")
    flags = (
        f"eval.py --which=latest --block_size={T} --stride=1 --device=cpu --batch_size=50".split()
    )
    flags.append(f"--out_dir={tmp_path / 'out'}")
    printed, rounded = (
        measures(done(run(*flags, f"--dtype={dtype}"))) for dtype in ("float32", "bfloat16")
    )
    assert 0 < abs(rounded["loss"] - printed["loss"]) < 0.02

    gpt = checkpoint.model_of(state_of(tmp_path))
    gpt.crop_block_size(T)
    ids = torch.from_numpy(Tokens(data, "val", 32).ids.astype(int))
    total = 0.0
    with torch.no_grad():
        for i in range(1, len(ids)):
            logits, _ = gpt.eval()(ids[None, max(0, i - T) : i])
            total -= logits[0, -1].log_softmax(-1)[ids[i]].item()
    mean = total / (len(ids) - 1)
    entry = dataset.read_meta(data)["files"]["val.bin"]
    assert printed["loss"] == pytest.approx(mean, abs=1e-4)
    assert printed["perplexity token"] == pytest.approx(math.exp(mean), abs=1e-2)
    assert printed["perplexity word"] == pytest.approx(math.exp(total / entry["words"]), rel=1e-3)
    assert printed["bits per byte"] == pytest.approx(total / math.log(2) / entry["bytes"], abs=1e-4)


def test_a_text_without_a_line_end_or_a_space(train, run, tmp_path):
    """Samples begin with the first token of the vocabulary, and say so."""
    out_dir = tmp_path / "out dir"
    tok = tokenizers.CharTokenizer("ACGT")
    write(tmp_path / "dna", tok, {"train": "GATTACA" * 900, "val": "TAGA" * 500}, {})
    flags = f"--dataset={tmp_path / 'dna'} '--out_dir={out_dir}' --sample_tokens=9 --max_iters=1"
    says = "the vocabulary has no line end: the prompt is 'A'"
    out = done(train(flags), says)
    command = re.search(r"a sample \(more of them: python (.*)\):\nA[ACGT]{9}\n", out)[1]
    assert shlex.split(command) == ["sample.py", f"--out_dir={out_dir}"]

    (tmp_path / "dna").rename(tmp_path / "elsewhere")
    sample = ["sample.py", f"--out_dir={out_dir}", "--max_new_tokens=5", "--num_samples=1"]
    out = done(run(*sample, "--device=cpu"), says)
    assert re.search("\nA[ACGT]{5}\n", out)

    out = run("eval.py", f"--out_dir={out_dir}", f"--dataset={tmp_path / 'elsewhere'}")
    done(out, "inf per word (1 words between whitespace)", "bits per byte ")


def test_eval_says_what_does_not_fit(train, run, tmp_path, text):
    train("--max_iters=2")
    tok = tokenizers.CharTokenizer("".join(sorted(set(text + "XYZ"))))
    write(tmp_path / "other", tok, {"train": text, "val": text}, {})
    out = f"--out_dir={tmp_path / 'out'}"
    for flag, says in (
        (f"--out_dir={tmp_path / 'none'}", "there is no checkpoint"),
        ("--batch_size=0", "--batch_size=0 must be at least 1"),
        ("--stride=33", "stride=33 must be between 1 and block_size=32"),
        ("--block_size=64", "block_size=64 is above 32, and positions are learned"),
        ("--split=test", "has no split 'test', but train.bin, val.bin"),
        (f"--dataset={tmp_path / 'other'}", "another tokenizer than this model"),
        ("--dataset=nowhere", "there is no data set"),
    ):
        refused(run("eval.py", "--device=cpu", out, flag), says)


def test_eval_of_gpt2s_weights(run, tmp_path, bpe, monkeypatch):
    """Out of a local folder, on data in GPT-2's tokens."""
    monkeypatch.setitem(SOURCES, "other", None)  # so that the import's entry leaves the table
    monkeypatch.delitem(sys.modules, "lab.hub.gpt2", raising=False)  # it is imported anew
    transformers = pytest.importorskip("transformers")
    bpe(*(b"<%d>" % i for i in range(50000)))
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    text = "a rose is a rose is a rose. " * 20
    write(tmp_path / "rose", tokenizers.GPT2Tokenizer(), {"train": text, "val": text}, {})
    flags = (
        "--device=cpu",
        "--import=lab.hub.gpt2",
        f"--init_from={tmp_path / 'gpt2'}",
        "--stride=16",
    )
    out = done(run("eval.py", *flags, f"--dataset={tmp_path / 'rose'}"))
    assert measures(out)["loss"] == pytest.approx(math.log(50257), rel=0.02)
    refused(run("eval.py", *flags), "names no data set")


@parametrize("kind", tokenizers.TOKENIZER)
def test_train_sample_and_eval_with_every_tokenizer(kind, run, train, tmp_path, text, bpe):
    """From text files to text. The boundary of documents is typed as it is printed."""
    bpe()
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(20):
        (texts / f"{i:02d}.txt").write_text(text[i * 400 : i * 400 + 400] + "\n")
    docs = tmp_path / "docs"
    flags = f"--source={texts} --tokenizer={kind} --vocab_size=290 --out_dir={docs}"
    done(run("data/text/prepare.py", *flags.split()))
    done(train(f"--dataset={docs} --max_iters=5 --sample_tokens=20"), "a sample")

    flags = (f"--out_dir={tmp_path / 'out'}", "--device=cpu")
    for start in ("\n", f"the lord{tokenizers.END}of all"):
        sample = ("--num_samples=1", "--max_new_tokens=20", f"--start={start}")
        out = done(run("sample.py", *flags, *sample), start.strip())
        assert out.splitlines()[1:2] != []
    assert 0.5 < measures(done(run("eval.py", *flags)))["bits per byte"] < 10


# -----------------------------------------------------------------------------
# --dry_run


def dry(run, *flags):
    return done(run("train.py", "--dry_run", "--device=cpu", *flags))


@parametrize("flag, bytes_per_parameter", [("--parallel=ddp", 18), ("--parallel=fsdp", 9)])
def test_the_numbers_of_a_dry_run(run, tmp_path, monkeypatch, flag, bytes_per_parameter):
    monkeypatch.chdir(tmp_path)
    out = dry(run, "--dataset=nowhere", "--max_iters=1000", "--gpus=2 x H100", flag)
    assert os.listdir(tmp_path) == []
    with torch.device("meta"):
        gpt = GPT(GPTConfig(bias=False, vocab_size=50257))
    n = estimate.num_params(gpt, non_embedding=False)
    # FLOPs per token, tokens per step and steps, at 0.4 of two GPUs' peak rate, in minutes
    minutes = estimate.flops(gpt) * 480 * 1024 * 1000 / (0.4 * 2 * 989e12) / 60
    for says in (
        f"parameters: {n:,}, {estimate.num_params(gpt):,} without",
        f"FLOPs: {estimate.flops(gpt):,} per token",
        "491,520,000 in 1,000 steps of 480 x 1024",
        f"{minutes:.1f} min on 2 x H100",
    ):
        assert says in out
    gib = float(re.search(r"memory of a process: (\S+) GiB for weights", out)[1])
    assert gib == pytest.approx(bytes_per_parameter * n / 2**30, abs=0.006)


def test_a_dry_run_knows_the_data_and_resumed_runs(run, train, tmp_path):
    train("--max_iters=2")
    before = written(tmp_path)
    out = dry(run, "--init_from=resume", f"--out_dir={tmp_path / 'out'}", "--max_iters=100")
    assert "vocab_size=24\n" in out and "tokens: 25,600 in 100 steps of 8 x 32" in out
    assert written(tmp_path) == before


def test_a_dry_run_knows_the_sizes_of_pretrained_weights(run):
    flags = "--init_from=gpt2 --attention=laser --block_size=16 --dataset=openwebtext".split()
    assert "parameters: 123,665,664," in dry(run, *flags)
    result = run("train.py", "--dry_run", *flags, "--n_layer=3")
    refused(result, "--n_layer=3 does not fit gpt2, which has n_layer=12")


NAMES = {  # NVIDIA's names of GPUs, and their peak rates in its data sheets
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA GeForce RTX 4090": None,
}


def test_the_peak_rates_of_gpus(monkeypatch):
    gpt = GPT(GPTConfig(n_layer=1, n_embd=16, n_head=2, vocab_size=9))
    for name, rate in NAMES.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        share = rate and estimate.flops(gpt) / rate
        assert estimate.mfu(gpt, "cuda:0", "bfloat16") == share


@parametrize("gpus", ["8 A100", "0 x A100", "two x A100", "8 x A999"])
def test_unknown_gpus(run, gpus):
    refused(run("train.py", "--dry_run", f"--gpus={gpus}"), "known GPUs are A100")


CONFIGS = sorted(glob.glob("*.py", root_dir=f"{ROOT}/config"))
TINY = "--n_layer=1 --n_embd=16 --n_head=2 --head_dim=8 --n_hidden=16 --heads=L --block_size=16"
# https://huggingface.co/docs/transformers: (parameters, width)
GPT2 = {
    "gpt2": (124439808, 768),
    "gpt2-medium": (354823168, 1024),
    "gpt2-large": (774030080, 1280),
    "gpt2-xl": (1557611200, 1600),
}


@parametrize("name", CONFIGS)
def test_every_config_is_one(name, run):
    pretrained = runpy.run_path(f"{ROOT}/config/{name}").get("init_from")
    flags = ["--block_size=16"] if pretrained else TINY.split()
    out = dry(run, f"config/{name}", *flags)
    assert "FLOPs: " in out
    if pretrained:
        n, width = GPT2[pretrained]
        assert f"parameters: {n - (1024 - 16) * width:,}," in out  # with 16 of 1024 positions


@parametrize(
    "name, vocab_size, millions",
    [
        ("train_gpt2", 50304, 124),
        ("train_shakespeare_char", 65, 10.65),
        ("train_pg19_ls", 10000, 6.5 - 1.92),  # untied: without the embeddings, 10000 x 192
        ("train_laser_301m", 32000, 301),
        ("train_laser_1_1b", 32000, 1140),
        ("train_laser_2_2b", 32000, 2210),
        ("train_laser_7_7b", 32000, 7730),
    ],
)
def test_the_configs_have_the_papers_sizes(run, name, vocab_size, millions):
    out = dry(run, f"config/{name}.py", f"--vocab_size={vocab_size}").replace(",", "")
    n = re.search(r"parameters: \S+ (\S+) without", out)[1]
    assert int(n) / 1e6 == pytest.approx(millions, rel=0.005)


# -----------------------------------------------------------------------------
# wandb


@parametrize("module", ["wandb", "trackio"])
def test_wandb(train, tmp_path, monkeypatch, module):
    """It gets the rows of log.jsonl and the run's settings; a resumed run goes on with its run.

    Trackio, which knows runs by their names, takes the place of a wandb that is not installed.
    """
    tracker = mock.MagicMock()
    run = tracker.init.return_value
    run.id = "the id"
    monkeypatch.setitem(sys.modules, "wandb", sys)  # a folder wandb has no init either
    monkeypatch.setitem(sys.modules, module, tracker)
    names = {"project": "p", "name": "n", "resume": "never"}
    of_run = {"id": None} if module == "wandb" else {}
    for flags in ("--max_iters=5", "--init_from=resume --max_iters=7"):
        run.log.reset_mock()
        train("--wandb_log --wandb_project=p --wandb_run_name=n", flags)
        settings = tracker.init.call_args.kwargs
        assert settings.pop("config")["attention"] == "softmax"
        assert settings == names | of_run
        names["resume"] = "allow"
        of_run = dict.fromkeys(of_run, "the id")
        rows = log_of(tmp_path)[-len(run.log.mock_calls) :]
        for call, row in zip(run.log.mock_calls, rows, strict=True):
            assert call == mock.call(row, step=row["iter"])
    assert rows[0]["iter"] == 5
