"""train.py as a user runs it, on a small model, and the checkpoints that it writes."""

import itertools
import json
import math
import os
import shutil

import pytest
import torch
from harness import same, state_of
from torch.nn import functional as F

from model import ATTENTION, GPT, MLP, GPTConfig
from text import dataset
from training import checkpoint


def rows(tmp_path, key="loss") -> list:
    with open(tmp_path / "out" / "log.jsonl") as f:
        return [(row["iter"], row[key]) for row in map(json.loads, f) if key in row]


@pytest.mark.parametrize(("core", "heads"), [*zip(ATTENTION, itertools.cycle(([], ["--heads=SSSL"])), strict=False)])
def test_every_attention_learns(train, tmp_path, core, heads):
    code, out, _ = train(f"--attention={core}", *heads, "--max_iters=20", "--dropout=0.1", "--sample_tokens=30")
    assert code == 0 and f"{core} attention" in out and "a sample" in out
    losses = rows(tmp_path)
    assert [it for it, _ in losses] == list(range(20))
    assert losses[-1][1] < losses[0][1] - 0.5
    assert [it for it, _ in rows(tmp_path, "val_loss")] == [0, 5, 10, 15, 20]
    saved = state_of(tmp_path)
    assert saved["iter_num"] == 20 and saved["model_args"]["attention"] == core
    assert saved["best_val_loss"] == min(loss for it, loss in rows(tmp_path, "val_loss") if it)


def test_log_lines(train):
    _, out, _ = train("--max_iters=4", "--log_interval=2")
    lines = out.splitlines()
    assert any(line.startswith("step 0: train loss ") and ", val loss " in line for line in lines)
    iters = [line for line in lines if line.startswith("iter ")]
    assert [line.split(":")[0] for line in iters] == ["iter 0", "iter 2"]
    assert all(word in iters[0] for word in ("loss ", "time ", "tok/s", "norm ")) and "mfu" not in iters[0]
    assert "\r" not in out and "\x1b" not in out  # plain where it is no terminal


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "unlike GPT-2: bias=False\nsoftmax attention in 8 long heads\nadamw: learning_rate=0.01, warmup_iters=2, "
         "schedule=cosine, lr_decay_iters=20, min_lr=6e-05; the run ends before that, at max_iters=0\n"),
        (("--heads=S/L", "--window=0", "--short_attention=laser"),
         "\nlaser attention in 4 short heads (window=0) and softmax attention in 4 long heads\n"),
        (("--attention=beta", "--block_size=256", "--dropout=0.1", "--batch_size=1"),
         "\nbeta attention in 8 long heads, dropout 0.1 on its weights, which makes it quadratic in time\n"),
        (("--differential", "--plain"),
         "differential=True, bias=False\nsoftmax attention in 8 long heads, by its definition\n"),
        (("--position=rope", "--schedule=constant"),
         "position=rope, bias=False\nsoftmax attention in 8 long heads\n"
         "adamw: learning_rate=0.01, warmup_iters=2, schedule=constant\n"
         "0 steps, each of 8 sequences x 32 = 256 tokens, in micro-batches of 4; 1 process, cpu, float32\n"
         "look at: val loss every 5 steps (python scripts/plot.py"),
        (("--optimizer=muon", "--muon_lr=0.1", "--decay_lr=0"), "\nmuon: learning_rate=0.01, muon_lr=0.1\n"),
        (("--eval_only",), "look at: the losses below; nothing is trained or written\n"),
    ],
)  # fmt: skip
def test_the_first_six_lines_say_what_is_trained(train, flags, says):
    code, out, err = train("--max_iters=0", *flags)
    assert code == 0 and says in out, err
    assert out.index("\nstep 0: train loss") == len("\n".join(out.splitlines()[:6]))


def test_the_logged_loss_is_the_mean_over_micro_batches(train, tmp_path):
    """8 sequences as 2 x 4, 1 x 8 or 4 x 2 micro-batches are the same step."""
    runs = []
    for batch, accumulation in ((4, 2), (8, 1), (2, 4)):
        train(f"--batch_size={batch}", f"--gradient_accumulation_steps={accumulation}", "--max_iters=5")
        runs.append([loss for _, loss in rows(tmp_path)])
    assert runs[0] == pytest.approx(runs[1], abs=1e-5) and runs[0] == pytest.approx(runs[2], abs=1e-5)


def test_evaluation_leaves_training_alone(train, tmp_path):
    """Other evaluation settings, the same training, with dropout on; and eval_only writes nothing."""
    train("--dropout=0.2", "--eval_iters=1")
    first, before = rows(tmp_path), state_of(tmp_path)["model"]
    train("--dropout=0.2", "--eval_iters=7", "--eval_interval=3")
    assert rows(tmp_path) == first and same(state_of(tmp_path)["model"], before)
    files = {f: os.stat(tmp_path / "out" / f).st_mtime_ns for f in os.listdir(tmp_path / "out")}
    for init in ("resume", "scratch"):
        code, out, _ = train("--eval_only=True", f"--init_from={init}")
        assert code == 0 and out.count("\nstep ") == 1 and "\niter " not in out
        assert files == {f: os.stat(tmp_path / "out" / f).st_mtime_ns for f in os.listdir(tmp_path / "out")}


@pytest.mark.parametrize("core", ATTENTION)
def test_resume_is_exact(train, tmp_path, core):
    """6 + 4 steps are 10 steps, bit for bit, dropout included."""
    flags = (f"--attention={core}", "--dropout=0.1", "--heads=SL", "--window=5")
    train(*flags)
    straight, log = state_of(tmp_path)["model"], rows(tmp_path)
    train(*flags, "--max_iters=6")
    code, out, _ = train("--init_from=resume", "--max_iters=10")
    assert code == 0 and "resume: max_iters was 6, now 10" in out
    assert same(state_of(tmp_path)["model"], straight) and rows(tmp_path) == log


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("muon", ("--schedule=wsd", "--decay_share=0.9")),
        ("lamb", ("--schedule=constant", "--adam_eps=1e-3")),
        ("nadamw", ("--label_smoothing=0.1", "--adam_eps=1e-6")),
    ],
)
def test_resume_is_exact_with_another_optimizer_and_schedule(train, tmp_path, optimizer, schedule):
    flags = (f"--optimizer={optimizer}", *schedule, "--position=t5")
    train(*flags)
    straight, log = state_of(tmp_path)["model"], rows(tmp_path)
    train(*flags, "--max_iters=6")
    assert train("--init_from=resume", "--max_iters=10")[0] == 0
    assert same(state_of(tmp_path)["model"], straight) and rows(tmp_path) == log
    code, _, err = train("--init_from=resume", "--max_iters=11", "--optimizer=adamw")
    assert code == 2 and "cannot go on: the saved run used --optimizer=" in err


def test_schedules(train, tmp_path):
    """The learning rate of each step; Muon's is in proportion."""

    def lrs(*flags: str) -> list[float]:
        assert train("--learning_rate=1.0", "--lr_decay_iters=8", "--grad_clip=1e-9", *flags)[0] == 0
        with open(tmp_path / "out" / "log.jsonl") as f:
            return [row["lr"] for row in map(json.loads, f) if "lr" in row]

    warm = [1 / 3, 2 / 3]
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    low = "--min_lr=0.1"
    assert lrs(low) == pytest.approx([*warm, *cosine, 0.1, 0.1])
    assert lrs("--schedule=constant") == pytest.approx([*warm, *[1.0] * 8])
    assert lrs(low, "--schedule=wsd", "--decay_share=0.5") == pytest.approx(
        [*warm, 1, 1, 1, 0.775, 0.55, 0.325, 0.1, 0.1]
    )
    assert lrs(low, "--schedule=wsd", "--decay_share=1") == pytest.approx(
        [*warm, *(1 - 0.15 * i for i in range(6)), 0.1, 0.1]
    )
    assert lrs(low, "--schedule=wsd", "--decay_share=1e-20") == pytest.approx([*warm, *[1.0] * 7, 0.1])
    assert lrs("--decay_lr=False") == [1.0] * 10
    lrs(low, "--optimizer=muon", "--muon_lr=0.02", "--max_iters=7")
    saved = state_of(tmp_path)["optimizer"]
    muon, adamw = (state["param_groups"][0]["lr"] for state in saved)
    assert muon == pytest.approx(0.02 * adamw) and adamw == pytest.approx(cosine[4])


def test_resume_restores_the_config_and_flags_win(train, tmp_path):
    train("--weight_decay=0.3", "--max_iters=4", "--save_interval=2")
    config = tmp_path / "my.py"
    config.write_text("weight_decay = 0.7\n")
    code, out, _ = train(str(config), "--init_from=resume", "--beta2=0.9", "--max_iters=5")
    assert code == 0 and "resume: keeping weight_decay=0.3" in out and "resume: beta2 was 0.95, now 0.9" in out
    saved = state_of(tmp_path)
    assert saved["config"]["weight_decay"] == 0.3
    groups = saved["optimizer"][0]["param_groups"]
    assert [g["weight_decay"] for g in groups] == [0.3, 0.0] and groups[0]["betas"] == (0.9, 0.9)


def test_resume_on_another_vocabulary_is_refused(train, tmp_path, data):
    other = shutil.copytree(data, tmp_path / "other")
    train(f"--dataset={other}", "--max_iters=3")
    with open(other / "meta.json", encoding="utf-8") as f:
        meta = json.load(f)
    meta["tokenizer"]["vocab"] = meta["tokenizer"]["vocab"][::-1]
    (other / "meta.json").write_text(json.dumps(meta))
    code, _, err = train(f"--dataset={other}", "--init_from=resume", "--max_iters=5")
    assert code == 2 and "another vocabulary" in err


def test_the_best_loss_is_of_the_same_windows(train, tmp_path):
    train("--max_iters=5")
    _, out, _ = train("--init_from=resume", "--max_iters=5", "--eval_iters=9")
    assert "best validation loss starts anew" in out and "the run is at step 5 already" in out


def test_resume_with_other_sizes_touches_nothing(train, tmp_path):
    train("--max_iters=3")
    before = (tmp_path / "out" / checkpoint.LATEST).read_bytes()
    code, _, err = train("--init_from=resume", "--block_size=16")
    assert code == 2 and "does not fit the saved model, which has block_size=32" in err
    assert (tmp_path / "out" / checkpoint.LATEST).read_bytes() == before


def test_train_short_test_long(train, tmp_path):
    """A position that has no weights for each place takes another context; learned ones do not (above)."""
    train("--max_iters=3", "--position=alibi")
    code, out, _ = train("--init_from=resume", "--eval_only", "--block_size=64")
    assert code == 0 and "resume: block_size was 32, now 64" in out and "step 3: " in out
    assert "best validation loss starts anew" in out


def test_a_fresh_run_moves_the_old_one_aside(train, tmp_path):
    train("--max_iters=5")
    old = state_of(tmp_path)["model"]
    code, out, _ = train("--max_iters=5", "--seed=2")
    assert code == 0 and out.count("held a run: moved ckpt.pt, best.pt, log.jsonl") == 1
    assert same(state_of(tmp_path, f"previous/{checkpoint.LATEST}")["model"], old)
    assert not same(state_of(tmp_path)["model"], old)


def test_a_run_that_died_early_does_not_push_out_the_last_good_one(train, tmp_path):
    train("--max_iters=5")
    old = state_of(tmp_path)["model"]
    dying = ("--grad_clip=0.0", "--warmup_iters=0", "--learning_rate=1e30", "--eval_interval=100")
    assert train(*dying)[0] == 1 and train(*dying)[0] == 1
    code, out, _ = train("--max_iters=5")
    assert code == 0 and "held a run" not in out
    assert same(state_of(tmp_path, f"previous/{checkpoint.LATEST}")["model"], old)


@pytest.mark.parametrize(("flags", "saves"), [([], 2), (["--save_interval=2"], 5), (["--always_save_checkpoint=0"], 1)])
def test_when_ckpt_is_saved(train, tmp_path, monkeypatch, flags, saves):
    saved, save = [], torch.save
    monkeypatch.setattr(torch, "save", lambda state, f: saved.append(f.name) or save(state, f))
    train("--max_iters=10", "--eval_interval=5", *flags)
    assert sum(path.endswith(checkpoint.LATEST + ".tmp") for path in saved) == saves


def test_latest_and_best_are_apart(train, tmp_path):
    train("--max_iters=10")
    train("--init_from=resume", "--max_iters=20", "--learning_rate=1", "--decay_lr=False")  # which makes it worse
    val = dict(rows(tmp_path, "val_loss"))
    best = state_of(tmp_path, checkpoint.BEST)
    latest = state_of(tmp_path)
    assert val[20] > val[10] and best["iter_num"] == 10 and latest["iter_num"] == 20
    assert best["best_val_loss"] == latest["best_val_loss"] == val[10]
    train("--max_iters=10", "--always_save_checkpoint=False")
    assert state_of(tmp_path)["iter_num"] == 10  # at the end all the same


def test_a_loss_that_is_not_finite_ends_the_run(train, tmp_path):
    flags = ("--grad_clip=0.0", "--warmup_iters=0", "--learning_rate=1e30", "--eval_interval=100")
    code, _, err = train(*flags, "--save_interval=1")
    assert code == 1 and "step 1: the loss is nan and the gradient norm nan: the training has diverged" in err
    assert [it for it, _ in rows(tmp_path)] == [0]
    assert state_of(tmp_path)["iter_num"] == 1


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        (lambda s, seen, v: (s * math.nan).where(seen, 0.0) @ v, "the losses of the evaluation are {'train': nan"),
        (lambda s, seen, v: (s * 0).sqrt().where(seen, 0.0) @ v, "step 0: the loss is 3."),
        (lambda s, seen, v: s.softmax(-1) @ v, "if it sees later tokens, the losses above mean nothing"),
    ],
)
def test_a_wrong_attention_is_found(train, tmp_path, monkeypatch, definition, says):
    """It gives a NaN, or its gradient is one: a line says where. It sees later tokens: the last line says it again."""
    monkeypatch.setitem(ATTENTION, "mine", definition)
    code, out, err = train("--attention=mine", "--max_iters=22", "--eval_interval=22", "--sample_tokens=0")
    assert says in (err if code else out)
    if code:
        where = "in what the attention of layer 0 gives" if "{" in says else "in the gradient of transformer.h.1.attn"
        assert f"It begins {where}" in err and rows(tmp_path) == []
    else:
        assert ", 0 s left" in out.splitlines()[-4], out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--attention=lazer"], "'lazer' is not one of softmax, laser, beta"),
        (["--device=gpu"], "not one of auto, cpu, cuda"),
        (["--device=cuda:99"], "sees"),
        (["--dataset=shakespeer"], "shakespeare_char"),
        (["--block_size=100000"], "--block_size="),
        (["--lr_decay_iters=2"], "greater than warmup_iters=2"),
        (["--muon_lr=0.01"], "--muon_lr has no effect with optimizer=adamw"),
        (["--adam_eps=-1e-6", "--optimizer=lamb"], "adam_eps=-1e-06 must not be negative"),
        (["--schedule=wsd", "--decay_lr=False"], "--schedule has no effect with optimizer=adamw, decay_lr=False"),
        (["--schedule=constant", "--min_lr=1e-5"], "--min_lr has no effect with"),
        (["--min_lr=1"], "min_lr=1.0 is above learning_rate=0.01"),
        (["--decay_share=0.5"], "--decay_share has no effect with"),
        (["--decay_share=2", "--schedule=wsd"], "must be above 0 and at most 1"),
        (["--vocab_size=5"], "less than the"),
        (["--batch_size=0"], "at least 1"),
        (["--seed=-1"], "must not be negative"),
        (["--beta1=1.0"], "must be in [0, 1)"),
        (["--learning_rate=-1"], "must be positive"),
        (["--init_from=resume"], "no checkpoint"),
        (["--init_from=gtp2"], "'gtp2' is not one of gpt2, gpt2-medium"),
    ],
)
def test_mistakes(train, tmp_path, flags, says):
    code, _, err = train(*flags)
    assert code == 2 and says in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("owner", "name", "bug", "error", "says"),
    [
        (MLP, "forward", lambda self, x: F.dropout(x, 3.0), ValueError, "dropout probability has to be between"),
        (dataset.Tokens, "_windows", lambda self, offsets: {}["typo"], KeyError, "typo"),
        (checkpoint, "check_finite", lambda state: {}["typo"], KeyError, "typo"),
    ],
)
def test_a_bug_keeps_its_traceback(train, monkeypatch, owner, name, bug, error, says):
    """In the model, where data are read, and where a checkpoint is written: nobody takes it for a user's mistake."""
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(error, match=says):
        train("--max_iters=5")


def test_a_damaged_log_does_not_stop_a_resume(train, tmp_path):
    train("--max_iters=4")
    with open(tmp_path / "out" / "log.jsonl", "a") as f:
        f.write('{"iter": 4, "lo')
    assert train("--init_from=resume", "--max_iters=6")[0] == 0
    assert [it for it, _ in rows(tmp_path)] == list(range(6))


def test_from_a_local_gpt2(train, tmp_path, data):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    V = dataset.read_meta(data)["vocab_size"]
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=V + 3, n_positions=48, **sizes))
    theirs.save_pretrained(tmp_path / "gpt2")
    flags = [f"--init_from={tmp_path / 'gpt2'}", "--attention=laser", "--dropout=0.1"]
    code, out, err = train(*flags, "--block_size=48")
    assert code == 0 and "block_size=48" in out and "laser attention" in out, err
    assert rows(tmp_path)[-1][1] < rows(tmp_path)[0][1]
    assert "block_size=32" in train(*flags)[1]  # cropped
    (tmp_path / "config.py").write_text("mlp = 'relu'\n")  # what a file sets gives way, what a user types does not
    code, out, _ = train(str(tmp_path / "config.py"), *flags)
    assert code == 0 and "mlp is gelu, not relu as in" in out


def test_micro_batches_that_cannot_be_shared(train, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    code, _, err = train()
    assert code == 2 and "cannot be divided among 3 processes: use --gradient_accumulation_steps=3" in err


# -----------------------------------------------------------------------------
# checkpoint.py


def test_damaged_and_foreign_checkpoints_are_explained(tmp_path):
    path = str(tmp_path / "ckpt.pt")
    good = dict.fromkeys(checkpoint.KEYS, 1) | {"tokenizer": {}, "x": torch.arange(1000)}
    checkpoint.save(path, good)
    content = open(path, "rb").read()
    at = content.index(torch.arange(1000).numpy().tobytes()) + 100

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    for damaged, says in (
        (content[:-50], "damaged or no checkpoint"),
        (content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :], "does not match its checksum"),
        (b"", "damaged or no checkpoint"),
        (b"hello", "damaged or no checkpoint"),
    ):
        with open(path, "wb") as f:
            f.write(damaged)
        with pytest.raises(ValueError, match=says):
            checkpoint.load(path)
    torch.save(good | {"version": 99}, path)
    with pytest.raises(ValueError, match="has version 99 of the format"):
        checkpoint.load(path)
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match="not a checkpoint of train.py"):
        checkpoint.load(path)
    torch.save(good | {"config": Evil()}, path)
    with pytest.raises(ValueError, match="damaged or no checkpoint"):
        checkpoint.load(path)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(ValueError, match="there is no checkpoint .*best.pt; train first"):
        checkpoint.load(str(tmp_path / "best.pt"))


def test_nanogpts_checkpoint(train, run, tmp_path, data):
    """The file that nanoGPT's train.py writes: compiled names, mask buffers, a tensor for the loss, no tokenizer."""
    args = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32, "bias": False, "dropout": 0.0}
    args["vocab_size"] = dataset.read_meta(data)["vocab_size"]
    gpt, x = GPT(GPTConfig(**args, mlp="gelu_exact")), torch.randint(args["vocab_size"], (1, 32))
    params = list(gpt.parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in params if p.dim() == d]} for d in (2, 1)], lr=1e-3)
    gpt(x, x)[1].backward()
    optimizer.step()
    state = {f"_orig_mod.{key}": value for key, value in gpt.state_dict().items()}
    state |= {f"_orig_mod.transformer.h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in (0, 1)}
    config = {"dataset": data, "max_iters": 7, "backend": "nccl", "device": "cpu", "dtype": "float32", "compile": False}
    theirs = {"model": state, "optimizer": optimizer.state_dict(), "model_args": args, "iter_num": 7}
    theirs |= {"best_val_loss": torch.tensor(3.5), "config": config}
    os.makedirs(tmp_path / "out")
    path = str(tmp_path / "out" / "ckpt.pt")
    torch.save(theirs, path)
    loaded = checkpoint.load(path)
    ours = checkpoint.model_of(loaded).eval()
    assert loaded["best_val_loss"] == 3.5 and ours.config.mlp == "gelu_exact"
    assert torch.equal(ours(x)[0], gpt.eval()(x)[0])
    sample = ("sample.py", f"--out_dir={tmp_path / 'out'}", "--start=the", "--num_samples=1", "--device=cpu")
    code, out, _ = run(*sample)
    assert code == 0 and "step 7, best validation loss 3.5" in out and "\nthe" in out
    code, out, err = train("--init_from=resume", "--max_iters=12")
    assert code == 0 and "resume: max_iters was 7, now 12" in out, err
    state = checkpoint.load(path)
    del state["optimizer"]
    checkpoint.save(path, state)
    code, _, err = train("--init_from=resume")
    assert code == 2 and "has no optimizer state" in err
    torch.save(theirs | {"config": {"dataset": "elsewhere"}}, tmp_path / "ckpt.pt")
    code, _, err = run(*sample, f"--out_dir={tmp_path}")
    assert code == 2 and "names no tokenizer" in err
