"""Runs that are disturbed: what they lose, what they print, and where the next run goes on."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
from harness import ROOT, SMALL, write

from model import GPT, GPTConfig
from text import dataset, tokenizers
from training import checkpoint
from training.sharded import save_sharded
from training.state import snapshot, tensors


def state(tmp_path, name=checkpoint.LATEST) -> dict:
    return checkpoint.load(str(tmp_path / "out" / name))


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def files(tmp_path) -> list[str]:
    return sorted(os.listdir(tmp_path / "out"))


# -----------------------------------------------------------------------------
# checkpoints


def test_the_last_ones_are_kept(train, tmp_path):
    train("--save_interval=2", "--keep_checkpoints=3")
    assert files(tmp_path) == ["best.pt", "ckpt-00000006.pt", "ckpt-00000008.pt", "ckpt.pt", "log.jsonl"]
    assert [state(tmp_path, name)["iter_num"] for name in files(tmp_path)[1:4]] == [6, 8, 10]
    train("--init_from=resume", "--max_iters=14", "--keep_checkpoints=1", "--save_interval=0")
    assert files(tmp_path) == ["best.pt", "ckpt.pt", "log.jsonl"]
    train("--init_from=resume", "--max_iters=16", "--keep_checkpoints=2")
    assert files(tmp_path) == ["best.pt", "ckpt-00000015.pt", "ckpt.pt", "log.jsonl"]
    train("--max_iters=5")
    assert "ckpt-00000015.pt" in os.listdir(tmp_path / "out" / "previous")


def flipped(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


def flip_the_pickle(path) -> None:
    """Damages the file so that unpickling it raises a KeyError."""
    content = path.read_bytes()
    at = next(i for i in range(content.index(b"data.pkl"), len(content)) if breaks(path, content, i))
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def breaks(path, content: bytes, at: int) -> bool:
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    try:
        torch.load(path, weights_only=True)
    except KeyError:
        return True
    except Exception:
        return False
    return False


def of_another_version(path: str) -> None:
    content = snapshot(checkpoint.load(path))
    torch.save(content | {"version": 99}, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: os.truncate(path, os.path.getsize(path) // 2), "is damaged or no checkpoint"),
        (lambda path: os.truncate(path, 0), "is damaged or no checkpoint"),
        (lambda path: path.write_bytes(flipped(path.read_bytes())), "is damaged: its record"),
        (flip_the_pickle, "is damaged"),
        (lambda path: torch.save({"a": 1}, path), "is not a checkpoint of train.py"),
        (lambda path: path.write_text("hello"), "is damaged or no checkpoint"),
        (of_another_version, "has version 99 of the format"),
    ],
)
def test_resume_goes_on_from_the_newest_intact_one(train, tmp_path, damage, says):
    train("--save_interval=3", "--dropout=0.1", "--max_iters=9")
    straight = state(tmp_path)["model"] | {}
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    damage(tmp_path / "out" / checkpoint.LATEST)
    code, out, err = train("--init_from=resume", "--max_iters=9", "--save_interval=3")
    assert code == 0 and f"skipping a checkpoint: {tmp_path / 'out' / 'ckpt.pt'} {says}" in out, err
    assert "going on from" in out and "ckpt-00000006.pt" in out
    assert same(state(tmp_path)["model"], straight) and files(tmp_path) == sorted(os.listdir(tmp_path / "copy"))
    for path in tmp_path.glob("out/*.pt"):
        os.truncate(path, 100)
    code, _, err = train("--init_from=resume", "--max_iters=9")
    assert code == 2 and "holds no intact checkpoint" in err and err.count("is damaged") == 3


def test_a_damaged_sharded_checkpoint(tmp_path):
    """The shards are checked as well. Here one process writes all of them."""
    gpt = GPT(GPTConfig(block_size=8, vocab_size=5, n_layer=1, n_head=2, n_embd=8))
    kept = {"model_args": {}, "iter_num": 3, "best_val_loss": 1.0, "config": {}, "tokenizer": {}, "optimizer": []}
    path = tmp_path / "ckpt"
    with pytest.warns(UserWarning, match="in a single process"):
        save_sharded(str(path), {"model": gpt.state_dict(), **kept})
    assert same(checkpoint.load(str(path))["model"], gpt.state_dict())
    assert checkpoint.newest(str(tmp_path)) == (str(path), [], [])
    (shard,) = path.glob("shard*")
    content = shard.read_bytes()
    for damaged, says in ((flipped(content), "does not match its checksum"), (content[:-1], "is missing or not")):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"{shard.name} {says}"):
            checkpoint.load(str(path))
    shard.unlink()
    with pytest.raises(ValueError, match="is missing"):
        checkpoint.newest(str(tmp_path))
    gpt.lm_head.weight.data[2, 3] = math.nan
    with pytest.raises(ValueError, match=r"wte.weight holds values that are not finite; .* was not written"):
        save_sharded(str(path), {"model": gpt.state_dict(), **kept})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_resume_is_exact_in_half_precision(train, tmp_path, dtype):
    """With float16's loss scale, which counts the steps since it changed."""
    flags = (f"--dtype={dtype}", "--dropout=0.1", "--attention=laser")
    train(*flags)
    straight = state(tmp_path)
    train(*flags, "--max_iters=6")
    assert train("--init_from=resume", "--max_iters=10")[0] == 0
    assert same(state(tmp_path)["model"], straight["model"]) and state(tmp_path)["scaler"] == straight["scaler"]
    assert straight["scaler"].get("_growth_tracker", 10) == 10
    code, _, err = train("--init_from=resume", "--max_iters=12", "--dtype=float32")
    assert code == 0 and train("--init_from=resume", "--max_iters=14", "--dtype=float16")[0] == 0, err


def test_weights_that_are_not_finite_are_not_saved(train, tmp_path, monkeypatch):
    """The NaN is in the row of a token that does not occur, so the loss does not show it."""
    train("--tied=False", "--vocab_size=100", "--max_iters=4", "--save_interval=2")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path) if name.endswith(".pt")}
    forward = GPT.forward

    def planted(self, idx, *args, **kwargs):
        self.transformer.wte.weight.data[99] = math.nan
        return forward(self, idx, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", planted)
    for background in ("", "--save_in_background"):
        code, _, err = train("--init_from=resume", "--max_iters=20", "--save_interval=2", *background.split())
        assert code == 2 and "model/transformer.wte.weight holds values that are not finite" in err
        assert before == {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path) if ".pt" in name}


def test_saving_in_the_background_saves_the_same(train, tmp_path):
    flags = ("--dropout=0.1", "--save_interval=3", "--optimizer=muon")
    train(*flags)
    straight = snapshot({name: state(tmp_path, name) for name in files(tmp_path) if ".pt" in name})
    train(*flags, "--save_in_background")
    assert files(tmp_path) == sorted([*straight, "log.jsonl", "previous"])
    for name, saved in straight.items():
        again = state(tmp_path, name)
        assert same(saved["model"], again["model"]) and saved["iter_num"] == again["iter_num"]
        assert len(tensors(saved)[0]) == len(tensors(again)[0])  # tied weights are one tensor
        sizes = [os.path.getsize(tmp_path / folder / name) for folder in ("out", "out/previous")]
        assert sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_training_does_not_change_what_is_being_saved(train, tmp_path, monkeypatch):
    """In the background a snapshot is written, however long the writing takes."""
    train("--max_iters=5")
    straight, save = state(tmp_path)["model"], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args: time.sleep(1.0) or save(*args))
    code, _, _ = train("--max_iters=9", "--save_in_background", "--lr_decay_iters=20")
    assert code == 0 and state(tmp_path)["iter_num"] == 9
    assert same(state(tmp_path, "ckpt-00000005.pt")["model"], straight)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_status_that_is_read_a_step_later(train, run, data, tmp_path, monkeypatch, optimizer):
    """As on CUDA, where the host reads it a step later; here on the CPU. The results are the same."""
    source = open(os.path.join(ROOT, "train.py")).read()
    now = 'lag = int(run.device_type == "cuda" and'
    assert source.count(now) == 1
    (tmp_path / "later.py").write_text(source.replace(now, "lag = int("))
    event = types.SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    flags = (f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, "--dropout=0.1", "--max_iters=12")
    flags += ("--gradient_accumulation_steps=2", f"--optimizer={optimizer}")
    flags += ("--eval_interval=5", "--eval_iters=1", "--sample_tokens=0", "--warmup_iters=2", "--lr_decay_iters=12")
    results = []
    for script in ("train.py", str(tmp_path / "later.py")):
        assert run(script, *flags)[0] == 0
        with open(tmp_path / "out" / "log.jsonl") as f:
            log = [{key: row[key] for key in row if key not in ("ms", "tokens_per_s")} for row in map(json.loads, f)]
        results.append((log, state(tmp_path)))
    assert results[0][0] == results[1][0] and same(results[0][1]["model"], results[1][1]["model"])
    before = state(tmp_path)["model"]
    again = (str(tmp_path / "later.py"), "--init_from=resume", *flags[:2], "--max_iters=30")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    assert run(*again, "--max_iters=15")[0] == 0
    whole = tensors({name: state(tmp_path)[name] for name in ("model", "optimizer")})[0]
    for interval in (4, 5):  # the failure is read before the evaluation after step 15, and during step 16
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "copy", tmp_path / "out")
        with monkeypatch.context() as patch:
            meanwhile(patch, 15, lambda patch=patch: patch.setattr(dataset, "version", lambda file: None))
            code, _, err = run(*again, f"--eval_interval={interval}")
        assert code == 2 and "step 15: " in err and state(tmp_path)["iter_num"] == 15
        assert same(tensors({name: state(tmp_path)[name] for name in ("model", "optimizer")})[0], whole)
    clip, steps = torch.nn.utils.clip_grad_norm_, []

    def planted(parameters, largest):
        parameters = list(parameters)
        steps.append(1)
        if len(steps) == 4:
            parameters[0].grad[0, 0] = math.nan
        return clip(parameters, largest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", planted)
    code, _, err = run(*again)
    assert code == 1 and "step 18: the loss is" in err and not same(before, state(tmp_path)["model"])


@pytest.mark.parametrize("background", [[], ["--save_in_background"]])
def test_a_disk_that_is_full(train, tmp_path, background):
    resource = pytest.importorskip("resource")
    train("--max_iters=4")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path) if ".pt" in name}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, out, err = train("--init_from=resume", "--max_iters=20", *background)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and f"cannot write {tmp_path / 'out' / 'ckpt.pt'}" in err and "MiB are free" in err
    assert "Training goes on, and the next save tries again" in out and "iter 19" in out
    assert before == {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path) if "log" not in name}
    needed = float(err.split("checkpoint needs ")[1].split(" MiB")[0])
    assert needed == pytest.approx(len(before["ckpt.pt"]) / 2**20, rel=0.2)
    assert train("--init_from=resume", "--max_iters=10")[0] == 0 and state(tmp_path)["iter_num"] == 10


def test_what_a_killed_run_left_half_written_is_deleted(train, tmp_path):
    train("--max_iters=2")
    before = files(tmp_path)
    for name in ("ckpt.pt.tmp", "best.pt.tmp", "ckpt-00000002.pt.tmp"):
        (tmp_path / "out" / name).write_bytes(b"half")
    for name in ("ckpt.tmp", "best.old"):
        (tmp_path / "out" / name).mkdir()
    (tmp_path / "out" / "mine.tmp").write_bytes(b"not the run's")
    assert train("--init_from=resume", "--max_iters=2")[0] == 0 and files(tmp_path) == sorted([*before, "mine.tmp"])


def test_a_log_that_cannot_be_written_ends_no_run(train, tmp_path, monkeypatch):
    resource = pytest.importorskip("resource")
    train("--max_iters=4", "--eval_interval=100")
    (tmp_path / "out" / "log.jsonl").write_text('{"iter": 0}\n' * 20_000)
    save = checkpoint.save
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def unlimited(*args: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        save(*args)

    monkeypatch.setattr(checkpoint, "save", unlimited)
    meanwhile(monkeypatch, 6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (240_100, limits[1])))
    try:
        code, out, _ = train("--init_from=resume", "--max_iters=9", "--eval_interval=100")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 0 and "log.jsonl" in out and "training continues without this line of the log" in out
    assert state(tmp_path)["iter_num"] == 9


def test_two_runs_cannot_share_a_folder(train, tmp_path):
    pytest.importorskip("fcntl")
    train("--max_iters=2")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path)}
    lock = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", lock, str(tmp_path / "out" / "log.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        for init in ("resume", "scratch"):
            code, _, err = train(f"--init_from={init}", "--max_iters=9")
            assert code == 2 and f"another process is training into {tmp_path / 'out'}" in err
        assert before == {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path)}
        other.communicate(b"\n")
    assert train("--init_from=resume", "--max_iters=9")[0] == 0


# -----------------------------------------------------------------------------
# data


@pytest.fixture
def own(data, tmp_path):
    """A copy of the data, to be changed."""
    return shutil.copytree(data, tmp_path / "own")


def meanwhile(monkeypatch, step: int, do) -> None:
    """Calls do() when that step's batch is read."""
    batch = dataset.Tokens.batch

    def and_do(self, at, *args, **kwargs):
        if at == step:
            do()
        return batch(self, at, *args, **kwargs)

    monkeypatch.setattr(dataset.Tokens, "batch", and_do)


def test_data_truncated_under_a_run(train, tmp_path, own, monkeypatch):
    """The run stops and saves; when the data are back, it goes on as if nothing had happened."""
    train(f"--dataset={own}", "--dropout=0.1")
    straight = state(tmp_path)["model"] | {}
    content = (own / "train.bin").read_bytes()
    meanwhile(monkeypatch, 7, lambda: os.truncate(own / "train.bin", 100))
    code, _, err = train(f"--dataset={own}", "--dropout=0.1")
    again = ("--init_from=resume", f"--dataset={own}")
    assert code == 2 and "step 7: " in err and f"{own}/train.bin has been changed while it was in use" in err
    assert state(tmp_path)["iter_num"] == 7 and "train.bin has 100 bytes" in train(*again)[2]
    monkeypatch.undo()
    (own / "train.bin").write_bytes(content)
    assert train(*again)[0] == 0 and same(state(tmp_path)["model"], straight)


def test_evaluation_data_truncated_under_a_run(train, tmp_path, own, monkeypatch):
    meanwhile(monkeypatch, 7, lambda: os.truncate(own / "val.bin", 100))
    code, _, err = train(f"--dataset={own}")
    assert code == 2 and "step 10: " in err and "val.bin has been changed" in err and state(tmp_path)["iter_num"] == 10


def test_data_replaced_under_a_run(train, tmp_path, own, data, monkeypatch):
    """A new file under the old name: the run keeps the file that it has opened, a resumed run refuses the new one."""
    train(f"--dataset={own}")
    straight = state(tmp_path)["model"] | {}
    meta = dataset.read_meta(str(own))
    tok = tokenizers.tokenizer(meta["tokenizer"])
    train_text, val = (tok.decode(dataset.Tokens(str(own), split, 8).ids) for split in ("train", "val"))
    meanwhile(monkeypatch, 7, lambda: write(own, tok, {"train": train_text[::-1], "val": val}, {}))
    assert train(f"--dataset={own}")[0] == 0 and same(state(tmp_path)["model"], straight)
    monkeypatch.undo()
    again = ("--init_from=resume", f"--dataset={own}", "--max_iters=12")
    code, _, err = train(*again)
    assert code == 2 and "train.bin of" in err and "--allow_other_data" in err and state(tmp_path)["iter_num"] == 10
    code, out, _ = train(*again, "--allow_other_data")
    assert code == 0 and state(tmp_path)["iter_num"] == 12 and "the best validation loss starts anew" in out
    assert train(*again, "--max_iters=13")[0] == 0  # of which the run now is


def test_an_id_past_the_vocabulary(own, monkeypatch):
    """In a file too large to be read whole when it is opened."""
    monkeypatch.setattr(dataset, "VERIFY_BYTES", 1000)
    tokens = dataset.Tokens(str(own), "train", 16)
    tokens.ids = tokens.ids.copy()
    tokens.ids[len(tokens) // 2] = 200
    with pytest.raises(ValueError, match=r"train.bin holds the id 200 after [\d,]+ tokens, but the vocabulary ends at"):
        for step in range(1000):
            tokens.batch(step, 8)


# -----------------------------------------------------------------------------
# losses


def test_an_evaluation_that_is_not_finite_stops_the_run(train, tmp_path, monkeypatch):
    train("--max_iters=5")
    before = files(tmp_path)
    forward = GPT.forward

    def infinite(self, *args, **kwargs):
        logits, loss = forward(self, *args, **kwargs)
        return logits, loss if self.training else loss * math.inf

    monkeypatch.setattr(GPT, "forward", infinite)
    code, _, err = train("--init_from=resume", "--max_iters=20", "--eval_interval=7")
    assert code == 1 and "step 7: the losses of the evaluation are" in err and files(tmp_path) == before


def test_loss_spikes(train):
    flags = ("--max_iters=110", "--eval_interval=1000", "--log_interval=50", "--batch_size=1", "--block_size=8")
    code, out, _ = train(*flags, "--loss_spike=0.1")
    assert (
        code == 0
        and out.count("4 losses in a row were above 0.1 times the mean of the last 100") == 1
        and "step 103: the loss" in out
    )
    assert "losses in a row" not in train(*flags, "--loss_spike=5.0")[1]


# -----------------------------------------------------------------------------
# signals and restarts


def test_a_signal_that_comes_twice_at_once_is_one(train, tmp_path):
    """As from a terminal and from torchrun; a later one is a second one."""

    def twice() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)

    threading.Timer(2.0, twice).start()
    code, _, _ = train("--max_iters=1000000", "--eval_interval=1000000", "--log_interval=1000")
    assert code == 128 + signal.SIGINT and state(tmp_path)["iter_num"] > 0


def test_a_signal_between_two_batches_of_an_evaluation(train, tmp_path, monkeypatch):
    """The run is saved before the evaluation ends, and goes on as if nothing had happened."""
    train("--dropout=0.1")
    straight = state(tmp_path)["model"] | {}
    evaluation, calls = dataset.Tokens.eval_batches, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        for at, batch in enumerate(evaluation(self, *args, **kwargs)):
            yield batch
            if len(calls) == 4 and at == 0:  # of the validation split, after 5 steps
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(dataset.Tokens, "eval_batches", interrupted)
    code, out, _ = train("--dropout=0.1", "--eval_iters=5")
    assert code == 128 + signal.SIGTERM and "stopped by signal after 5 steps" in out and "step 5: train" not in out
    monkeypatch.undo()
    assert state(tmp_path)["iter_num"] == 5 and train("--init_from=resume", "--eval_iters=2")[0] == 0
    assert same(state(tmp_path)["model"], straight)


def test_torchrun_restarts_go_on_by_themselves(train, tmp_path, monkeypatch):
    train("--dropout=0.1")
    straight = state(tmp_path)["model"] | {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    train("--dropout=0.1", "--max_iters=6")
    code, out, _ = train("--dropout=0.1")  # the same command as at first
    assert "started again by torchrun: going on from" in out
    assert code == 0 and "iter 5:" not in out and "iter 6:" in out and same(state(tmp_path)["model"], straight)
    (tmp_path / "out" / "ckpt.pt").write_bytes(b"")  # an older run's, which is none of the new one's business
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    assert "iter 5:" in train("--dropout=0.1")[1] and "ckpt.pt" in os.listdir(tmp_path / "out" / "previous")


def torchrun(*args: object, **kwargs: object) -> subprocess.Popen:
    """train.py under torchrun, as a user starts it."""
    command = [sys.executable, "-m", "torch.distributed.run", *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=env, **kwargs)


@pytest.fixture
def script(data, tmp_path) -> list:
    """train.py and the flags of a small run."""
    flags = [f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, "--gradient_accumulation_steps=2"]
    return [os.path.join(ROOT, "train.py"), *flags, "--warmup_iters=2", "--lr_decay_iters=20", "--sample_tokens=0"]


def wait_for(path, rows: int, process: subprocess.Popen) -> None:
    while process.poll() is None and not (path.exists() and path.read_text().count("\n") >= rows):
        time.sleep(0.05)


@pytest.mark.slow
def test_a_reader_that_goes_away(tmp_path, script):
    """As in `train.py | head`: the run stops, and keeps what it has."""
    command = [sys.executable, *script, "--max_iters=1000000", "--eval_interval=1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        while not run.stdout.readline().startswith("iter 3:"):
            pass
        run.stdout.close()
        assert run.wait(timeout=60) == 143 and "Traceback" not in run.stderr.read()
    assert state(tmp_path)["iter_num"] > 3


@pytest.mark.slow
@pytest.mark.parametrize("stop", [lambda pid: os.killpg(pid, signal.SIGINT), lambda pid: os.kill(pid, signal.SIGTERM)])
def test_ctrl_c_under_torchrun(tmp_path, script, stop):
    """To all of a terminal's processes, as a terminal does, so each worker gets it twice; and to torchrun alone."""
    flags = ("--max_iters=1000000", "--eval_interval=1000000")
    run = torchrun("--standalone", "--nproc_per_node=2", *script, *flags, start_new_session=True)
    wait_for(tmp_path / "out" / "log.jsonl", 20, run)
    stop(run.pid)
    out, err = run.communicate(timeout=60)
    steps = state(tmp_path)["iter_num"]
    assert f"stopped by signal after {steps} steps" in out and steps >= 20, err


@pytest.mark.slow
def test_two_machines(tmp_path, script):
    """Two torchruns, as on two machines; the second one's worker dies, and both go on from the last checkpoint."""
    die = tmp_path / "die.py"
    die.write_text(
        "import os, runpy, sys, torch\n"
        "norm, steps = torch.nn.utils.clip_grad_norm_, [0]\n"
        "def clip(*args):\n"
        "    steps[0] += 1\n"
        "    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], steps[0]) == ('1', '0', 8):\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return norm(*args)\n"
        "torch.nn.utils.clip_grad_norm_ = clip\n"
        "sys.argv.pop(0)\n"
        "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines = ("--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--rdzv_backend=c10d", "--rdzv_id=7")
    machines += (f"--rdzv_endpoint=127.0.0.1:{port}",)
    flags = ("--max_iters=12", "--eval_interval=4", "--eval_iters=1")
    runs = [torchrun(*machines, die, *script, *flags) for _ in range(2)]
    outs = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outs
    assert state(tmp_path)["iter_num"] == 12 and sum("started again by torchrun" in out for out, _ in outs) == 1
    with open(tmp_path / "out" / "log.jsonl") as f:
        assert [row["iter"] for row in map(json.loads, f) if "loss" in row] == list(range(12))
