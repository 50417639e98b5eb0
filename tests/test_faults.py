"""Runs that are disturbed: what they lose, what they print, and where the next run goes on."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from harness import (
    QUICK,
    ROOT,
    SMALL,
    done,
    log_of,
    parametrize,
    refused,
    same,
    slow,
    state_of,
    weights_of,
    write,
    written,
)

from model import GPT
from text import dataset, tokenizers
from training import checkpoint, distributed


def files(tmp_path) -> list[str]:
    """But for the file that says who writes into the folder."""
    return sorted({*os.listdir(tmp_path / "out")} - {"lock", "lock.txt"})


def checkpoints(tmp_path) -> dict[str, bytes]:
    """The content of each checkpoint of the run."""
    return {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.pt")}


@pytest.fixture
def limit():
    """limit(n): no file may become larger than n bytes. limit(): as before."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(n=soft):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))

    yield limit
    limit()


# -----------------------------------------------------------------------------
# checkpoints


def test_the_last_ones_are_kept(train, tmp_path):
    train("--save_interval=2 --keep_checkpoints=3")
    older = ["ckpt-00000006.pt", "ckpt-00000008.pt"]
    assert files(tmp_path) == ["best.pt", *older, "ckpt.pt", "log.jsonl"]
    assert [state_of(tmp_path, name)["iter_num"] for name in [*older, "ckpt.pt"]] == [6, 8, 10]
    train("--init_from=resume --max_iters=14 --keep_checkpoints=1 --save_interval=0")
    assert files(tmp_path) == ["best.pt", "ckpt.pt", "log.jsonl"]
    train("--init_from=resume --max_iters=16 --keep_checkpoints=2")
    assert files(tmp_path) == ["best.pt", "ckpt-00000015.pt", "ckpt.pt", "log.jsonl"]
    train("--max_iters=5")
    assert "ckpt-00000015.pt" in os.listdir(tmp_path / "out" / "previous")


def test_copies_of_the_users_own_stay(train, tmp_path):
    train("--max_iters=5")
    own = {"ckpt-good.pt", "ckpt-finetune.pt", "best_weights.pt"}
    for name in own:
        (tmp_path / "out" / name).write_text("not ours")
    done(train("--init_from=resume --max_iters=12 --save_interval=2 --keep_checkpoints=2"))
    assert {*files(tmp_path)} == own | {"best.pt", "ckpt-00000010.pt", "ckpt.pt", "log.jsonl"}


def test_resume_from_a_damaged_checkpoint_names_it(train, tmp_path):
    """Without it, the run goes on from the one before."""
    train("--save_interval=3 --dropout=0.1 --max_iters=9 --eval_interval=100")
    straight = weights_of(tmp_path)
    damaged = tmp_path / "out" / "ckpt.pt"
    os.truncate(damaged, 1000)
    os.remove(tmp_path / "out" / "best.pt")
    again = "--init_from=resume --max_iters=9 --save_interval=3"
    refused(train(again), f"{damaged} is damaged", "If you delete it")
    os.remove(damaged)
    done(train(again), "going on from", "ckpt-00000006.pt")
    assert same(weights_of(tmp_path), straight)


def test_resume_from_the_best_if_it_is_newer(train, tmp_path):
    """As after a kill with always_save_checkpoint=False, which writes best.pt alone."""
    train("--dropout=0.1 --max_iters=10")
    straight = weights_of(tmp_path)
    train("--dropout=0.1 --max_iters=4 --eval_interval=4")
    os.replace(tmp_path / "out" / "ckpt.pt", tmp_path / "old.pt")
    train("--init_from=resume --max_iters=6 --eval_interval=6")
    os.replace(tmp_path / "old.pt", tmp_path / "out" / "ckpt.pt")
    done(train("--init_from=resume --max_iters=10"), "best.pt, step 6")
    assert same(weights_of(tmp_path), straight)
    assert checkpoint.load(tmp_path / "out" / "ckpt-00000004.pt")["iter_num"] == 4


@parametrize("flags, is_same", [("--eval_iters=3", False), ("--dataset=COPY", True)])
def test_the_best_checkpoint_survives_another_evaluation(
    train, data, tmp_path, monkeypatch, flags, is_same
):
    """The old best.pt is kept if its loss and the new ones are of other windows."""
    monkeypatch.setattr(dataset, "DATA", tmp_path / "data")
    shutil.copytree(data, tmp_path / "data" / "COPY")
    train()
    best = checkpoints(tmp_path)["best.pt"]
    worse = "--init_from=resume --learning_rate=1 --decay_lr=False --max_iters=15"
    assert ("starts anew" in done(train(worse, flags))) != is_same
    assert (checkpoints(tmp_path).get("best-00000010.pt") == best) != is_same
    train("--max_iters=1")  # a new run
    assert "best-00000010.pt" not in files(tmp_path)


def test_weights_that_are_not_finite_are_not_saved(train, tmp_path, monkeypatch):
    """The NaN is in the row of a token that does not occur, so the loss does not show it."""
    train("--tied=False --vocab_size=100 --max_iters=4 --save_interval=2")
    before = checkpoints(tmp_path)
    forward = GPT.forward

    def planted(self, idx, *args, **kwargs):
        self.transformer.wte.weight.data[99] = math.nan
        return forward(self, idx, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", planted)
    flags = "--max_iters=20 --save_interval=2 --log_interval=9"
    code, _, err = train("--init_from=resume", flags)
    says = "step 5: transformer.wte.weight holds values that are not finite: the training has"
    assert code == 1 and says in err
    assert checkpoints(tmp_path) == before


def test_a_disk_that_is_full(train, tmp_path, limit):
    """Training goes on, and the next save tries again."""
    train("--max_iters=4")
    before = checkpoints(tmp_path)
    limit(100_000)
    result = train("--init_from=resume --max_iters=20")
    limit()
    assert "iter 19" in result[1]
    unchanged = "An older file of this name is unchanged"
    err = refused(result, f"cannot write {tmp_path / 'out'}", unchanged)
    assert err.count("Is the disk full?") == 8  # of best.pt and of ckpt.pt
    assert checkpoints(tmp_path) == before and files(tmp_path) == [*sorted(before), "log.jsonl"]
    done(train("--init_from=resume --max_iters=10"))
    assert state_of(tmp_path)["iter_num"] == 10


def test_a_log_that_cannot_be_written_ends_no_run(train, tmp_path, monkeypatch, limit):
    train("--max_iters=4 --eval_interval=100")
    (tmp_path / "out" / "log.jsonl").write_text('{"iter": 0}\n' * 20_000)
    save = checkpoint.save

    def unlimited(*args):
        limit()
        save(*args)

    monkeypatch.setattr(checkpoint, "save", unlimited)
    meanwhile(monkeypatch, 6, lambda: limit(240_100))
    result = train("--init_from=resume --max_iters=9 --eval_interval=100")
    done(result)
    assert state_of(tmp_path)["iter_num"] == 9


@parametrize("damaged", [True, False])
def test_a_save_needs_nothing_of_the_older_files(train, tmp_path, monkeypatch, damaged):
    """ckpt.pt is damaged, or the name for it is taken by a folder: all is saved."""
    train("--dropout=0.1")
    straight = weights_of(tmp_path)
    out_dir = tmp_path / "out"
    disturb = (out_dir / "ckpt-00000004.pt").mkdir
    if damaged:
        disturb = partial(os.truncate, out_dir / "ckpt.pt", 100)
    meanwhile(monkeypatch, 5, disturb)
    code, _, err = train("--dropout=0.1 --save_interval=2 --keep_checkpoints=9")
    assert code == 0 and same(weights_of(tmp_path), straight), err
    assert state_of(tmp_path, "ckpt-00000008.pt")["iter_num"] == 8


def test_a_best_loss_counts_when_it_is_written(train, tmp_path, monkeypatch):
    """Step 20 is worse than step 10, whose best.pt could not be written. ckpt.pt was saved."""
    save = checkpoint.save

    def fails(path, *args):
        if path.endswith("best.pt"):
            raise OSError("the disk is full")
        return save(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", fails)
        refused(train(), "the disk is full")
    before = losses_of(tmp_path)
    worse = "--learning_rate=1 --decay_lr=False --eval_interval=20"
    done(train("--init_from=resume --max_iters=20", worse))
    after = losses_of(tmp_path)
    losses = {step: loss for step, key, loss in before + after if key == "val_loss"}
    assert losses[20] > losses[10]
    for name in ("best.pt", "ckpt.pt"):
        state = state_of(tmp_path, name)
        assert (state["iter_num"], state["best_val_loss"]) == (20, losses[20])


def test_a_start_deletes_no_longer_run(train, tmp_path):
    """The first run has 6 steps, then 2 and 1; the last one takes the place of that with 2."""
    for steps in (6, 2, 1, 2):
        done(train(f"--max_iters={steps} --no-always_save_checkpoint"))
    for folder, steps in ("previous", 6), ("previous-2", 2), ("previous-3", 1):
        assert state_of(tmp_path, f"{folder}/ckpt.pt")["iter_num"] == steps
    out = done(train("--max_iters=1"), "held a run: moved ckpt.pt, best.pt, log.jsonl to")
    assert "/previous-2\n" in out


class Killed(BaseException):
    """As a kill: nothing is saved."""


def killed():
    raise Killed


def stopped():
    os.kill(os.getpid(), signal.SIGTERM)


@parametrize(
    "steps, end",
    [
        (8, None),
        (20, stopped),
        (20, killed),
    ],
)
@parametrize("save_interval", [0, 3])
def test_a_resumed_log_has_each_row_once(train, tmp_path, monkeypatch, steps, end, save_interval):
    flags = f"--eval_interval=4 --save_interval={save_interval} --dropout=0.1"
    train(flags, "--max_iters=14")
    straight = losses_of(tmp_path)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        if end:
            meanwhile(patch, 9, end)
        train(flags, f"--max_iters={steps}")
    with open(tmp_path / "out" / "log.jsonl", "a") as f:
        f.write('{"iter": 4, "lo')  # as a kill can leave a line
    done(train(flags, "--init_from=resume --max_iters=14"))
    rows = losses_of(tmp_path)
    assert sorted(rows) == sorted(straight)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


def losses_of(tmp_path) -> list[tuple]:
    """(step, "loss" or "val_loss", its value) of each row of log.jsonl."""
    keys = ("loss", "val_loss")
    rows = log_of(tmp_path)
    return [(row["iter"], key, row[key]) for row in rows for key in keys if key in row]


# -----------------------------------------------------------------------------
# data


def meanwhile(monkeypatch, step, do):
    """Calls do() when that step's batch is read."""
    batch = dataset.Tokens.batch

    def and_do(self, at, *args, **kwargs):
        if at == step:
            do()
        return batch(self, at, *args, **kwargs)

    monkeypatch.setattr(dataset.Tokens, "batch", and_do)


def test_data_replaced_under_a_run(train, tmp_path, text, monkeypatch):
    """The run keeps the file that it has opened. A resumed run refuses the new file."""
    own = tmp_path / "own"
    tok = tokenizers.CharTokenizer("".join(sorted(set(text))))
    val = text[-2000:]
    write(own, tok, {"train": text, "val": val}, {})
    train(f"--dataset={own}")
    straight = weights_of(tmp_path)
    changed = {"train": text[::-1], "val": val[::-1]}
    meanwhile(monkeypatch, 7, lambda: write(own, tok, changed, {}))
    done(train(f"--dataset={own}"))
    assert same(weights_of(tmp_path), straight)
    monkeypatch.undo()
    again = f"--init_from=resume --dataset={own} --max_iters=12"
    refused(train(again), "have changed", "--allow_other_data")
    assert state_of(tmp_path)["iter_num"] == 10
    done(train(again, "--allow_other_data"), "the best validation loss starts anew")
    done(train(again, "--max_iters=13"))  # the run now has these data


# -----------------------------------------------------------------------------
# signals and restarts


def test_a_signal_saves_and_resume_goes_on(train, tmp_path, monkeypatch):
    """Three, as from a scheduler, a terminal and torchrun."""
    train("--dropout=0.1")
    straight = weights_of(tmp_path)

    def stop():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        meanwhile(patch, 5, stop)
        code, out, _ = train("--dropout=0.1")
    assert code == 128 + signal.SIGUSR1 and "step 5: train" not in out  # it could take long
    assert "stopped by signal after 5 steps and saved: --init_from=resume" in out
    done(train("--init_from=resume"))
    assert same(weights_of(tmp_path), straight)


def test_nohup_keeps_its_run(train, tmp_path, monkeypatch):
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    meanwhile(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGHUP))
    done(train("--eval_interval=99"))
    signal.signal(signal.SIGHUP, hangup)
    assert state_of(tmp_path)["iter_num"] == 10


def test_a_line_that_cannot_be_printed_is_lost_alone(train, tmp_path, monkeypatch):
    """As in a closed terminal, or on a full disk."""

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("builtins.print", full)
    done(train("--eval_interval=99"))
    assert state_of(tmp_path)["iter_num"] == 10
    assert sum(key == "loss" for _, key, _ in losses_of(tmp_path)) == 10


def by_torchrun(monkeypatch, attempt, call="none_a"):
    """What torchrun tells a process: `call` is the folder that this call of torchrun has made."""
    path = f"/tmp/torchelastic_x/{call}/attempt_{attempt}/0/error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)


def test_torchrun_restarts_go_on_by_themselves(train, tmp_path, monkeypatch):
    train("--dropout=0.1")
    straight = weights_of(tmp_path)
    by_torchrun(monkeypatch, 0)
    train("--dropout=0.1 --max_iters=6")
    by_torchrun(monkeypatch, 1)
    says = "started again by torchrun: going on from"
    assert "iter 5:" not in done(train("--dropout=0.1"), says)  # the same command as at first
    assert same(weights_of(tmp_path), straight)
    by_torchrun(monkeypatch, 0, "none_b")  # a new run of the same command
    _, out, _ = train("--dropout=0.1 --max_iters=2")
    assert "held a run" in out and "iter 0:" in out
    again = "--init_from=resume --dropout=0.1"
    by_torchrun(monkeypatch, 0, "none_c")  # and one that is told to resume, twice
    done(train(again, "--max_iters=4"), "iter 2:")
    by_torchrun(monkeypatch, 1, "none_c")
    _, out, _ = train(again)
    assert "iter 3:" not in out and same(weights_of(tmp_path), straight)


@parametrize(
    "owner, name, damaged",
    [(distributed.dist, "init_process_group", False), (dataset.Tokens, "batch", True)],
)
def test_a_restart_leaves_an_older_run_alone(train, tmp_path, monkeypatch, owner, name, damaged):
    """A new run that dies before its first checkpoint begins anew, whatever lies in out_dir."""
    train("--seed=2")
    older = tmp_path / "out" / "ckpt.pt"
    if damaged:
        os.truncate(older, 1000)
    old = older.read_bytes()
    by_torchrun(monkeypatch, 0)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *_, **__: {}["died"])
        if name == "init_process_group":
            patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(KeyError, match="died"):
            train()
    by_torchrun(monkeypatch, 1)
    assert "started again" not in done(train(), "iter 0:")
    assert (tmp_path / "out" / "previous" / "ckpt.pt").read_bytes() == old
    assert state_of(tmp_path)["config"]["seed"] == 1337


FAULT = """
import os, runpy, sys
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
process = os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT']
if process == '10':
    raise OSError('no start')
from text import dataset
batch = dataset.Tokens.batch
def failing(self, step, *args, **kwargs):
    if process == '11' and step == 7:
        raise OSError('the disk is gone')
    return batch(self, step, *args, **kwargs)
dataset.Tokens.batch = failing
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@slow
def test_under_torchrun(train, tmp_path, data):
    """In a folder with a longer run, one of two processes dies at once, then at its eighth batch.

    Both begin again, each time. Then a signal, which reaches each process twice.
    """
    train("--max_iters=12 --seed=2")
    fault = tmp_path / "fault.py"
    fault.write_text(FAULT)
    torchrun = "-m torch.distributed.run --standalone --nproc_per_node=2 --max-restarts=2".split()
    flags = [f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, *QUICK]
    run = subprocess.Popen(
        [sys.executable, *torchrun, fault, f"{ROOT}/train.py", *flags, "--max_iters=1000000"],
        stdout=-1,
        stderr=-1,
        text=True,
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        start_new_session=True,
    )
    log = tmp_path / "out" / "log.jsonl"
    try:
        while run.poll() is None and '"iter": 15, "loss"' not in log.read_text():
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGTERM)
        out, err = run.communicate()
    except BaseException:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    steps = state_of(tmp_path)["iter_num"]
    assert "OSError: no start" in err and "OSError: the disk is gone" in err, err
    assert out.count("held a run") == 1 and "step 12" not in out, out
    assert out.count("started again by torchrun: going on from") == 1 and "step 5\n" in out, out
    assert f"stopped by signal after {steps} steps" in out and steps >= 10, err
    assert [it for it, key, _ in losses_of(tmp_path) if key == "loss"] == list(range(steps))


# -----------------------------------------------------------------------------
# two trainings in one folder

HOLDS = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
open(sys.argv[1] + ".txt", "w").write(", process 7")
print("holds it", flush=True)
sys.stdin.read()
"""


def test_a_folder_in_use_is_refused(train, tmp_path):
    """By whom it is used and since when; a process that was killed uses nothing."""
    done(train("--max_iters=3"))
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "out" / "lock")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        other.stdout.readline()
        before = written(tmp_path)
        refused(train("--init_from=resume --max_iters=5"), "by another training, process 7. Take")
        assert written(tmp_path) == before
        other.kill()
    assert (tmp_path / "out" / "lock").exists()
    done(train("--init_from=resume --max_iters=5"))


def test_handlers_are_put_back(train):
    """A notebook, or python -i, goes on after a training, also after one that diverged."""
    before = signal.getsignal(signal.SIGTERM)
    assert train("--learning_rate=1e30 --grad_clip=0.0 --warmup_iters=0")[0] == 1
    assert signal.getsignal(signal.SIGTERM) is before
