"""Runs that are disturbed: what they lose, what they print, and where the next run goes on."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from harness import ROOT, SMALL, same, state_of, write

from model import GPT
from text import dataset, tokenizers
from training import checkpoint


def files(tmp_path) -> list[str]:
    return sorted(os.listdir(tmp_path / "out"))


# -----------------------------------------------------------------------------
# checkpoints


def test_the_last_ones_are_kept(train, tmp_path):
    train("--save_interval=2", "--keep_checkpoints=3")
    assert files(tmp_path) == ["best.pt", "ckpt-00000006.pt", "ckpt-00000008.pt", "ckpt.pt", "log.jsonl"]
    assert [state_of(tmp_path, name)["iter_num"] for name in files(tmp_path)[1:4]] == [6, 8, 10]
    train("--init_from=resume", "--max_iters=14", "--keep_checkpoints=1", "--save_interval=0")
    assert files(tmp_path) == ["best.pt", "ckpt.pt", "log.jsonl"]
    train("--init_from=resume", "--max_iters=16", "--keep_checkpoints=2")
    assert files(tmp_path) == ["best.pt", "ckpt-00000015.pt", "ckpt.pt", "log.jsonl"]
    train("--max_iters=5")
    assert "ckpt-00000015.pt" in os.listdir(tmp_path / "out" / "previous")


def test_resume_from_a_damaged_checkpoint_names_the_one_before(train, tmp_path):
    train("--save_interval=3", "--dropout=0.1", "--max_iters=9", "--eval_interval=100")
    straight = state_of(tmp_path)["model"] | {}
    os.truncate(tmp_path / "out" / "ckpt.pt", 1000)
    os.remove(tmp_path / "out" / "best.pt")
    again = ("--init_from=resume", "--max_iters=9", "--save_interval=3")
    code, _, err = train(*again)
    assert code == 2 and "out/ckpt.pt is damaged" in err and "Delete it to go on" in err and "ckpt-00000006" in err
    os.remove(tmp_path / "out" / "ckpt.pt")
    code, out, err = train(*again)
    assert code == 0 and "going on from" in out and "ckpt-00000006.pt" in out, err
    assert same(state_of(tmp_path)["model"], straight)


def test_resume_from_the_best_if_it_is_newer(train, tmp_path):
    """As after a kill with always_save_checkpoint=False, where best.pt alone is written meanwhile."""
    train("--dropout=0.1", "--max_iters=10")
    straight = state_of(tmp_path)["model"] | {}
    train("--dropout=0.1", "--max_iters=4", "--eval_interval=4")
    os.replace(tmp_path / "out" / "ckpt.pt", tmp_path / "old.pt")
    train("--init_from=resume", "--max_iters=6", "--eval_interval=6")
    os.replace(tmp_path / "old.pt", tmp_path / "out" / "ckpt.pt")
    code, out, _ = train("--init_from=resume", "--max_iters=10")
    assert code == 0 and "best.pt, step 6" in out and same(state_of(tmp_path)["model"], straight)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_resume_is_exact_in_half_precision(train, tmp_path, dtype):
    """With float16's loss scale, which counts the steps since it changed."""
    flags = (f"--dtype={dtype}", "--dropout=0.1", "--attention=laser")
    train(*flags)
    straight = state_of(tmp_path)
    with open(tmp_path / "out" / "log.jsonl") as f:
        losses = [row["loss"] for row in map(json.loads, f) if "loss" in row]
    assert losses[-1] < losses[0] - 0.3
    train(*flags, "--max_iters=6")
    assert train("--init_from=resume", "--max_iters=10")[0] == 0
    assert same(state_of(tmp_path)["model"], straight["model"]) and state_of(tmp_path)["scaler"] == straight["scaler"]
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
    code, _, err = train("--init_from=resume", "--max_iters=20", "--save_interval=2", "--log_interval=9")
    assert code == 1 and "step 5: transformer.wte.weight holds values that are not finite: the training has" in err
    assert before == {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path) if ".pt" in name}


def test_a_disk_that_is_full(train, tmp_path):
    """Training goes on, and the next save tries again."""
    resource = pytest.importorskip("resource")
    train("--max_iters=4")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path) if ".pt" in name}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, out, err = train("--init_from=resume", "--max_iters=20")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2 and "iter 19" in out and f"cannot write {tmp_path / 'out'}" in err
    assert err.count("Is the disk full?") == 4 and "An older file of this name is unchanged" in err
    assert before == {name: (tmp_path / "out" / name).read_bytes() for name in files(tmp_path) if "log" not in name}
    assert train("--init_from=resume", "--max_iters=10")[0] == 0 and state_of(tmp_path)["iter_num"] == 10


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
    assert state_of(tmp_path)["iter_num"] == 9


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


def test_data_replaced_under_a_run(train, tmp_path, own, data, monkeypatch):
    """A new file under the old name: the run keeps the file that it has opened, a resumed run refuses the new one."""
    train(f"--dataset={own}")
    straight = state_of(tmp_path)["model"] | {}
    meta = dataset.read_meta(str(own))
    tok = tokenizers.tokenizer(meta["tokenizer"])
    train_text, val = (tok.decode(dataset.Tokens(str(own), split, 8).ids) for split in ("train", "val"))
    meanwhile(monkeypatch, 7, lambda: write(own, tok, {"train": train_text[::-1], "val": val}, {}))
    assert train(f"--dataset={own}")[0] == 0 and same(state_of(tmp_path)["model"], straight)
    monkeypatch.undo()
    again = ("--init_from=resume", f"--dataset={own}", "--max_iters=12")
    code, _, err = train(*again)
    assert code == 2 and "train.bin of" in err and "--allow_other_data" in err and state_of(tmp_path)["iter_num"] == 10
    code, out, _ = train(*again, "--allow_other_data")
    assert code == 0 and state_of(tmp_path)["iter_num"] == 12 and "the best validation loss starts anew" in out
    assert train(*again, "--max_iters=13")[0] == 0  # of which the run now is


# -----------------------------------------------------------------------------
# signals and restarts


def test_ctrl_c_saves_and_resume_goes_on(train, tmp_path, monkeypatch):
    """Twice at once, as from a terminal and from torchrun; a later one would be a second one."""
    train("--dropout=0.1")
    straight = state_of(tmp_path)["model"] | {}
    with monkeypatch.context() as patch:
        meanwhile(patch, 5, lambda: [os.kill(os.getpid(), n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGINT)])
        code, out, _ = train("--dropout=0.1")
    assert code == 128 + signal.SIGINT and "stopped by signal after 5 steps" in out and "--init_from=resume" in out
    assert "step 5: train" not in out  # an evaluation may take longer than whoever stops the run waits
    assert train("--init_from=resume")[0] == 0 and same(state_of(tmp_path)["model"], straight)


def test_torchrun_restarts_go_on_by_themselves(train, tmp_path, monkeypatch):
    train("--dropout=0.1")
    straight = state_of(tmp_path)["model"] | {}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    train("--dropout=0.1", "--max_iters=6")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code, out, _ = train("--dropout=0.1")  # the same command as at first
    assert "started again by torchrun: going on from" in out
    assert code == 0 and "iter 5:" not in out and "iter 6:" in out and same(state_of(tmp_path)["model"], straight)
    shutil.rmtree(tmp_path / "out")
    assert "iter 0:" in train("--max_iters=1")[1]  # it died before its first checkpoint


@pytest.fixture
def script(data, tmp_path) -> list:
    """train.py and the flags of a small run that does not end."""
    flags = [f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, "--gradient_accumulation_steps=2"]
    flags += ["--warmup_iters=2", "--lr_decay_iters=20", "--max_iters=1000000"]
    return [os.path.join(ROOT, "train.py"), *flags]


@pytest.mark.slow
def test_under_torchrun(tmp_path, script):
    """One of two processes cannot read its data; both begin again. Then Ctrl-C, which reaches each process twice."""
    fault = tmp_path / "fault.py"
    fault.write_text(
        "import os, runpy, sys\n"
        "sys.argv.pop(0)\n"
        "sys.path.insert(0, os.path.dirname(sys.argv[0]))\n"
        "from text import dataset\n"
        "batch = dataset.Tokens.batch\n"
        "def failing(self, step, *args, **kwargs):\n"
        "    if (os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT'], step) == ('1', '0', 7):\n"
        "        raise OSError('the disk is gone')\n"
        "    return batch(self, step, *args, **kwargs)\n"
        "dataset.Tokens.batch = failing\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command += [fault, *script, "--eval_interval=5", "--eval_iters=1"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=env, start_new_session=True)
    path, rows = tmp_path / "out" / "log.jsonl", []
    while run.poll() is None and len(rows) < 20:
        time.sleep(0.05)
        rows = path.read_text().splitlines() if path.exists() else []
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    steps = state_of(tmp_path)["iter_num"]
    assert "OSError: the disk is gone" in err, err
    assert "started again by torchrun: going on from" in out and "step 5\n" in out, out
    assert f"stopped by signal after {steps} steps" in out and steps >= 10, err
    with open(path) as f:
        assert [row["iter"] for row in map(json.loads, f) if "loss" in row] == list(range(steps))
