"""train.py as a user runs it, on a small model, and the checkpoints that it writes."""

import itertools
import math
import os
import re
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import done, log_of, parametrize, refusal, refused, same, state_of, write, written
from reference import FUNCTIONS

import training.log
from model import ATTENTION, GPT, MLP, GPTConfig
from text import dataset
from text.tokenizers import CharTokenizer
from training import checkpoint
from training.log import Log


def rows(tmp_path, key="loss") -> list:
    return [(row["iter"], row[key]) for row in log_of(tmp_path) if key in row]


@parametrize("core", ATTENTION)
def test_every_attention_learns(train, tmp_path, core):
    flags = f"--attention={core} --max_iters=20 --dropout=0.1 --sample_tokens=30"
    out = done(train(flags), core)
    assert re.search(r"(?s)\na sample [^\n]+:\n\n.{30}\n\Z", out)
    losses = dict(rows(tmp_path))
    assert losses[19] < losses[0] - 0.5
    saved = state_of(tmp_path)
    assert saved["iter_num"] == 20 and saved["model_args"]["attention"] == core
    assert saved["best_val_loss"] == min(loss for it, loss in rows(tmp_path, "val_loss") if it)


def test_gradients_are_clipped(train, tmp_path):
    losses = []
    for clip in ("0.0", "1e9", "1e-2"):  # 0.0 clips nothing
        done(train(f"--grad_clip={clip} --adam_eps=1.0 --max_iters=3"))
        losses.append(rows(tmp_path))
    assert losses[0] == losses[1] != losses[2]


def test_the_times_of_steps(tmp_path, monkeypatch):
    """A step takes 2 s; an evaluation is in none. MFU: 15 x 1.2 of 180 FLOPs a second."""
    clock = [0.0]
    monkeypatch.setattr(training.log, "perf_counter", lambda: clock[0])
    sizes = {"batch_size": 2, "gradient_accumulation_steps": 3, "block_size": 5, "max_iters": 31}
    c = SimpleNamespace(out_dir=str(tmp_path), init_from="scratch", eval_only=True, **sizes)
    log = Log(c, start=4, origin={}, mfu=1.2 / 180)
    lines = []
    monkeypatch.setattr(log, "write", lambda row, line: lines.append(line))
    for step in (6, 24):  # two steps after an evaluation
        clock[0] += 100
        log.restart(step - 1)
        clock[0] += 2 * 2
        log.step(step, loss=1.0, norm=1.0, lr=1.0, scaled=False)
    speed = "time 2000.00ms, 15 tok/s, norm 1.000"
    assert lines[0].endswith(f"{speed}, mfu 10.00%")
    assert lines[1].endswith(f"{speed}, 12 s left, mfu 10.00%")


@parametrize(
    "flags, says",
    [
        (
            "--position=rope --plain",
            r"n_embd=32, position=rope, bias=False; for the rest GPT-2's\n"
            r"softmax attention in 8 long heads: its definition, on all tokens at once\n",
        ),
        (
            "--heads=S/L --window=0 --short_attention=laser",
            r"\nlaser attention in 4 short heads \(window=0\): .+"
            r"\nsoftmax attention in 4 long heads: .+"
            r"\n0 steps of 8 x 32 = 256 tokens, from the 7,536 of .+; 1 process, cpu, float32"
            r"\nthe model sees no later tokens: .+\nstep 0: train loss",
        ),
    ],
)
def test_the_first_lines_say_what_is_trained(train, flags, says):
    assert re.search(says, done(train("--max_iters=0", flags)))


@parametrize("source", ["folder", "resume"])
def test_the_globals_of_the_loop_are_the_models(train, run, tmp_path, data, monkeypatch, source):
    """Who edits the loop uses nanoGPT's names, also after --init_from=FOLDER and after resume."""
    trained = tmp_path / "out"
    heads = "--heads=SL --window=5"
    train("--max_iters=2", heads)
    flags = f"--init_from=resume --out_dir={trained}"
    block_size = 32
    if source == "folder":  # the heads of the weights are free to change
        flags = f"--init_from={trained} --out_dir={tmp_path / 'new'} --block_size=16 {heads}"
        block_size = 16
        assert GPT.from_pretrained(str(trained), {"heads": "L"}).config.window is None
    flags += f" --dataset={data} --max_iters=3 --eval_iters=1 --sample_tokens=0 --device=cpu"
    flags += " --batch_size=4 --gradient_accumulation_steps=1"
    seen = {}
    monkeypatch.setattr(Log, "close", lambda _: seen.update(sys._getframe(1).f_globals))
    done(run("train.py", *flags.split()))
    assert seen == seen | vars(seen["raw_model"].config)
    sizes = {"block_size": block_size, "window": 5, "n_embd": 32, "n_head": 4, "vocab_size": 24}
    others = {"compile": False, "device": "cpu", "dtype": "float32"}
    assert seen == seen | sizes | others


def evaluated(state, data, n) -> float:
    """The mean loss of a checkpoint on n windows of the validation split, evenly spaced."""
    ids = torch.from_numpy(dataset.Tokens(data, "val", 32).ids.astype(int))
    places = np.linspace(0, len(ids) - 33, n).astype(int)
    x = torch.stack([ids[i : i + 33] for i in places])
    return checkpoint.model_of(state).eval()(x[:, :-1], x[:, 1:])[1].item()


def test_evaluation_leaves_training_alone(train, tmp_path, data):
    """Other evaluation settings, the same training, with dropout; eval_only writes nothing."""
    curves = []
    for eval_iters, windows in ((1, 4), (7, len(dataset.Tokens(data, "val", 32)) // 32)):
        flags = f"--eval_iters={eval_iters} --eval_interval={4 + eval_iters}"
        train("--dropout=0.2 --attn_dropout=0.3", flags)
        state = state_of(tmp_path)
        curves.append((rows(tmp_path), state["model"]))
        loss = dict(rows(tmp_path, "val_loss"))[10]
        assert loss == pytest.approx(evaluated(state, data, windows), abs=1e-5)
    assert curves[0][0] == curves[1][0] and same(curves[0][1], curves[1][1])
    times = written(tmp_path)
    for init in ("resume", "scratch"):
        out = done(train(f"--eval_only=True --init_from={init}"))
        assert out.count("\nstep ") == 1 and "\niter " not in out
        assert written(tmp_path) == times


def test_the_seed_decides_weights_and_batches(train, tmp_path):
    """The first evaluation shows the weights. The weights do not change: the rate is tiny."""
    trained = tmp_path / "trained"
    train(f"--max_iters=1 --out_dir={trained}")

    def curves(key, *flags):
        """Of two steps with each of two seeds."""
        values = []
        for seed in (1, 2):
            still = f"--learning_rate=1e-20 --schedule=constant --seed={seed}"
            train("--max_iters=2 --eval_interval=9", still, *flags)
            values += [value for _, value in rows(tmp_path, key)]
        return len({*values})

    assert curves("val_loss") == 2
    weights = f"--init_from={trained}"
    assert curves("val_loss", weights) == 1
    assert curves("loss", weights) == 4


RESUMED = {
    core: f"--attention={core}" + " --heads=SL --window=5" * (core in FUNCTIONS)
    for core in ATTENTION
} | {
    "muon": "--optimizer=muon --schedule=wsd --decay_share=0.9 --decay=alibi --position=none",
    "constant": "--schedule=constant --adam_eps=1e-3",
    "bfloat16": "--dtype=bfloat16 --attention=laser",
    "float16": "--dtype=float16 --attention=laser",
}


@parametrize("flags", RESUMED.values(), ids=RESUMED)
def test_resume_is_exact(train, tmp_path, flags):
    """6 + 4 steps are 10 steps, bit for bit, dropout and float16's loss scale included."""
    flags += " --dropout=0.1 --label_smoothing=0.1"
    done(train(flags))
    straight = state_of(tmp_path)
    log = rows(tmp_path)
    train(flags, "--max_iters=6")
    result = train("--init_from=resume --max_iters=10")
    done(result, "the saved run: max_iters was 6, now 10")
    resumed = state_of(tmp_path)
    assert same(resumed["model"], straight["model"]) and resumed["scaler"] == straight["scaler"]
    assert rows(tmp_path) == log
    scaled_steps = 10 if "--dtype=float16" in flags else None
    assert straight["scaler"].get("_growth_tracker") == scaled_steps


def test_resume_in_another_dtype(train, tmp_path):
    """float32's checkpoint has no loss scale. The losses are nearly the same."""
    curves = []
    for dtype in ("float16", "bfloat16", "float32"):
        train(f"--max_iters=2 --eval_interval=2 --dtype={dtype}")
        curves.append([value for key in ("loss", "val_loss") for _, value in rows(tmp_path, key)])
    for curve in curves[:2]:
        assert curve == pytest.approx(curves[2], rel=0.02) and curve != curves[2]
    for dtype, steps in (("float16", 4), ("float32", 6)):
        done(train(f"--init_from=resume --max_iters={steps} --dtype={dtype}"))


@parametrize(
    "flag, says",
    [
        ("--optimizer=muon", "does not fit the saved run, which has optimizer=adamw"),
        ("--block_size=16", "does not fit the saved run, which has block_size=32"),
        ("--dataset={other}", "another vocabulary"),
    ],
)
def test_what_a_resumed_run_refuses(train, tmp_path, text, flag, says):
    train("--max_iters=3")
    times = written(tmp_path)
    other = tmp_path / "other"
    tok = CharTokenizer("".join(sorted(set(text), reverse=True)))
    write(other, tok, {"train": text, "val": text}, {})
    refused(train("--init_from=resume --max_iters=5", flag.format(other=other)), says)
    assert written(tmp_path) == times


WARM = [1 / 3, 2 / 3]
COSINE = [0.1 + 0.45 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
WSD = "--schedule=wsd --min_lr=0.1 --decay_share="


@parametrize(
    "flags, lrs",
    [
        ("--min_lr=0.1", [*WARM, *COSINE, 0.1, 0.1]),
        ("--schedule=constant", [*WARM, *[1.0] * 8]),
        (WSD + "0.5", [*WARM, 1, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        (WSD + "1e-20", [*WARM, *[1.0] * 7, 0.1]),
        ("--decay_lr=False", [1.0] * 10),
    ],
)
def test_schedules(train, tmp_path, flags, lrs):
    train("--learning_rate=1.0 --lr_decay_iters=8 --grad_clip=1e-9", flags)
    assert [lr for _, lr in rows(tmp_path, "lr")] == pytest.approx(lrs)


def test_each_optimizer_has_its_flags(train, tmp_path):
    """At the end of the schedule all rates are a tenth of the highest."""
    train(
        "--learning_rate=0.05 --min_lr=0.005 --lr_decay_iters=3 --max_iters=4",
        "--optimizer=muon --muon_lr=0.07 --muon_beta=0.8 --weight_decay=0.3",
        "--beta1=0.7 --beta2=0.6 --adam_eps=1e-3",
    )
    groups = [group for o in state_of(tmp_path)["optimizer"] for group in o["param_groups"]]
    assert [group["lr"] for group in groups] == pytest.approx([0.007, 0.005, 0.005])
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0.0]
    assert groups[0]["momentum"] == 0.8
    assert groups[1]["betas"] == (0.7, 0.6) and groups[1]["eps"] == 1e-3


def test_resume_restores_the_config_and_flags_win(train, tmp_path):
    train("--weight_decay=0.3 --max_iters=4 --plain")
    config = tmp_path / "my.py"
    config.write_text("weight_decay = 0.7\n")
    done(
        train(config, "--init_from=resume --beta2=0.9 --max_iters=5"),
        "the saved run: keeping weight_decay=0.3",
        "the saved run: beta2 was 0.95, now 0.9",
        "fused attention",
    )
    saved = state_of(tmp_path)
    assert saved["config"]["weight_decay"] == 0.3
    groups = saved["optimizer"][0]["param_groups"]
    assert groups[0]["weight_decay"] == 0.3 and groups[0]["betas"] == (0.9, 0.9)
    for flag in ("--eval_iters=1", "--batch_size=3"):
        done(train("--init_from=resume", flag), "best validation loss starts anew")


def test_train_short_test_long(train):
    """A position without weights for each place takes another context; learned ones do not."""
    train("--max_iters=3 --position=alibi")
    done(
        train("--init_from=resume --max_iters=3 --block_size=64"),
        "block_size was 32, now 64",
        "step 3: ",
        "best validation loss starts anew",
    )


DIVERGING = "--grad_clip=0.0 --warmup_iters=0 --learning_rate=1e30 --eval_interval=100"


def test_a_run_that_diverges(train, tmp_path):
    """A line says so. If it has no checkpoint, it does not push out the last good run."""
    train("--max_iters=5")
    old = state_of(tmp_path)["model"]
    code, out, err = train(DIVERGING)
    assert code == 1 and out.count("held a run: moved ckpt.pt, best.pt, log.jsonl") == 1
    says = "step 1: the loss is nan and the gradient norm nan: the training has diverged"
    assert says in err and "a range above 80: --plain takes" in err
    assert [it for it, _ in rows(tmp_path)] == [0]
    code, out, _ = train(DIVERGING, "--save_interval=1")
    assert code == 1 and "held a run" not in out
    assert state_of(tmp_path)["iter_num"] == 1
    assert same(state_of(tmp_path, f"previous/{checkpoint.LATEST}")["model"], old)


@parametrize(
    "flags, saves", [("", 2), ("--save_interval=2", 5), ("--no-always_save_checkpoint", 1)]
)
def test_when_ckpt_is_saved(train, monkeypatch, flags, saves):
    """best.pt, after each evaluation but the first, which is of untrained weights."""
    names = []
    monkeypatch.setattr(checkpoint, "save", lambda path, *_: names.append(os.path.basename(path)))
    train(flags)
    assert names.count("ckpt.pt") == saves and names.count("best.pt") == 2


def test_latest_and_best_are_apart(train, run, tmp_path):
    train("--max_iters=10")
    val = dict(rows(tmp_path, "val_loss"))
    train("--init_from=resume --max_iters=20 --learning_rate=1 --decay_lr=False --eval_interval=20")
    val |= rows(tmp_path, "val_loss")
    best = state_of(tmp_path, checkpoint.BEST)
    latest = state_of(tmp_path)
    assert val[20] > val[10] and best["iter_num"] == 10 and latest["iter_num"] == 20
    assert best["best_val_loss"] == latest["best_val_loss"] == val[10]
    for which, about in (("best", "best.pt: step 10,"), ("latest", "ckpt.pt: step 20,")):
        flags = (f"--which={which}", f"--out_dir={tmp_path / 'out'}", "--device=cpu")
        for script in (["sample.py", "--num_samples=1", "--max_new_tokens=1"], ["eval.py"]):
            done(run(*script, *flags), about)


@parametrize(
    "definition, says",
    [
        (
            lambda s, seen, v: (s * math.nan).where(seen, 0.0) @ v,
            r"the losses of the evaluation are {.train.: nan[^$]+docs/training.md",
        ),
        (
            lambda s, seen, v: (s * 0).sqrt().where(seen, 0.0) @ v,
            r"step 0: the loss is 3\..+ and the gradient norm nan",
        ),
    ],
)
def test_a_wrong_attention(train, tmp_path, monkeypatch, definition, says):
    """A NaN in its output or gradient ends the run."""
    monkeypatch.setitem(ATTENTION, "mine", definition)
    code, _, err = train("--attention=mine")
    assert code == 1 and re.search(says, err), err
    assert rows(tmp_path) == []


@parametrize(
    "flags, says",
    [
        ("--attention=lazer", "'lazer' is not one of softmax, laser, beta"),
        ("--device=gpu", "--device=gpu: Expected one of cpu, cuda"),
        ("--device=cuda:99", "--device=cpu works"),
        ("--dataset=shakespeer", "shakespeare_char"),
        ("--block_size=100000", "--block_size="),
        ("--lr_decay_iters=2", "greater than warmup_iters=2"),
        ("--min_lr=1", "min_lr=1.0 is above learning_rate=0.01"),
        ("--grad_clip=-1", "grad_clip=-1.0 and seed=1337 must be at least 0"),
        ("--no-decay_lr --learning_rate=0", "learning_rate=0.0 above 0"),
        ("--vocab_size=5", "less than the"),
        ("--batch_size=0", "at least 1"),
        ("--init_from=resume", "no checkpoint"),
    ],
)
def test_mistakes(train, tmp_path, flags, says):
    refused(train(flags), says)
    assert not (tmp_path / "out").exists()


@parametrize(
    "owner, name",
    [(MLP, "forward"), (dataset.Tokens, "_windows"), (checkpoint, "save")],
)
def test_a_bug_keeps_its_traceback(train, monkeypatch, owner, name):
    """In the model, where data are read, where a checkpoint is written: it is no user's mistake."""
    monkeypatch.setattr(owner, name, lambda *_: {}["typo"])
    with pytest.raises(KeyError, match="typo"):
        train("--max_iters=5")


def test_a_batch_for_other_numbers_of_processes(train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused(train(), "among 3 processes: make --gradient_accumulation_steps a multiple of 3")


# -----------------------------------------------------------------------------
# checkpoint.py


def test_damaged_and_foreign_checkpoints_are_explained(tmp_path):
    path = tmp_path / "ckpt.pt"
    good = {"tokenizer": {}, "model_args": {}, "x": torch.arange(1000)}

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save(good, path)
    content = path.read_bytes()
    for damaged in (content[:-50], b"", b"hello"):
        path.write_bytes(damaged)
        with refusal("damaged or no checkpoint"):
            checkpoint.load(str(path))
    for foreign in ({"model": {}}, [1]):
        torch.save(foreign, path)
        with refusal("damaged or no checkpoint"):
            checkpoint.load(str(path))
    for value, says in (
        (tmp_path, r"is whole, but \['config'\] is a pathlib.PosixPath. Only"),
        ({"lr": [0.1, np.float64(0.1)]}, r"is whole, but \['config'\]\['lr'\]\[1\] is a numpy\."),
        (defaultdict(list, lr=[]), "is whole, but it has a collections.defaultdict"),
        (Evil(), "is whole, but it has a .*mkdir"),
    ):
        torch.save(good | {"config": value}, path)
        with refusal(says):
            checkpoint.load(str(path))
    torch.save(good | {"version": 99}, path)
    with refusal("has version 99 of checkpoints; this code reads 3"):
        checkpoint.load(str(path))
    assert not (tmp_path / "executed").exists()
    with refusal("there is no checkpoint .*best.pt; train first"):
        checkpoint.load(str(tmp_path / "best.pt"))


def test_nanogpts_checkpoint(train, run, tmp_path, data):
    """The file of nanoGPT's train.py: compiled names, mask buffers, a tensor as loss."""
    meta = dataset.read_meta(data)
    V = meta["vocab_size"]
    args = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 32,
        "block_size": 32,
        "vocab_size": V,
        "bias": False,
        "dropout": 0.0,
    }
    gpt = GPT(GPTConfig(**args, mlp="gelu_exact"))
    x = torch.randint(V, (1, 32))
    params = list(gpt.parameters())
    groups = [{"params": [p for p in params if p.dim() == d]} for d in (2, 1)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    gpt(x, x)[1].backward()
    optimizer.step()
    around = itertools.cycle(["_orig_mod.", "module.", "_orig_mod.module."])
    weights = {next(around) + key: value for key, value in gpt.state_dict().items()}
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1)
    theirs = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "model_args": args,
        "iter_num": 7,
        "best_val_loss": torch.tensor(3.5),
        "config": {"dataset": data, "max_iters": 7, "device": "cpu", "backend": "nccl"},
    }
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    torch.save(theirs, out_dir / "ckpt.pt")

    loaded = state_of(tmp_path)
    ours = checkpoint.model_of(loaded).eval()
    assert loaded["best_val_loss"] == 3.5 and ours.config.mlp == "gelu_exact"
    assert torch.equal(ours(x)[0], gpt.eval()(x)[0])

    sample = ("sample.py", "--start=the", "--num_samples=1", "--device=cpu", f"--out_dir={out_dir}")
    done(run(*sample), "step 7, best validation loss 3.5", "\nthe")
    done(train("--init_from=resume --max_iters=12"), "the saved run: max_iters was 7, now 12")

    assert checkpoint.tokenizer_of({"model_args": {"vocab_size": 50257}}).n_vocab == 50257
    del theirs["optimizer"]
    theirs["iter_num"] = 99
    torch.save(theirs, out_dir / "ckpt.pt")
    refused(train("--init_from=resume"), "has no optimizer state")

    # only the model of it, as somebody may publish one
    model = {"model": gpt.state_dict(), "model_args": args}
    torch.save(model, out_dir / "best.pt")
    refused(run(*sample), "there is no data set ''")
    torch.save(model, tmp_path / "ckpt.pt")
    assert not checkpoint.steps_in(tmp_path) >= 0  # so no new run deletes it
    torch.save(model | {"tokenizer": meta["tokenizer"]}, out_dir / "best.pt")
    done(run(*sample), "step 0, ", "\nthe")
