"""Faults to be watched by hand: processes killed at random moments.

python tests/faults.py                                  # all of it, about ten minutes
python tests/faults.py --what=kill --times=30           # SIGKILL while saving often, and resume
python tests/faults.py --what=restart --times=30        # a process of two dies under torchrun --max-restarts, 10 times
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from configurator import configure, names, user_errors  # noqa: E402
from errors import UserError  # noqa: E402
from training import checkpoint  # noqa: E402

what = "kill,restart"  # which of them
times = 30  # how often; a third of it for restart
dataset = "shakespeare_char"  # a folder of data/ that is prepared
save_interval = 3  # steps between saves
seed = 1  # of the moments

FLAGS = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=32", "--batch_size=8", "--dropout=0.1"]
FLAGS += ["--gradient_accumulation_steps=2", "--eval_interval=100", "--eval_iters=2", "--log_interval=1"]
FLAGS += ["--device=cpu", "--sample_tokens=0", "--learning_rate=1e-3"]


def command(out: str, *flags: str, launch: tuple = ()) -> list[str]:
    script = [os.path.join(ROOT, "train.py"), f"--dataset={dataset}", f"--out_dir={out}"]
    return [sys.executable, *launch, *script, *FLAGS, f"--save_interval={save_interval}", *flags]


def steps_of(out: str) -> int:
    """How many steps a run has logged."""
    path = os.path.join(out, checkpoint.LOG)
    lines = open(path).read().splitlines() if os.path.exists(path) else []
    return 1 + max((json.loads(line)["iter"] for line in lines if line.endswith("}") and '"loss"' in line), default=-1)


def same_weights(a: str, b: str) -> bool:
    a, b = (checkpoint.load(os.path.join(out, checkpoint.LATEST))["model"] for out in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def undisturbed(folder: str, steps: int, launch: tuple = ()) -> tuple[str, float]:
    """(folder, seconds until the first step) of a run that nobody disturbs."""
    out, began = os.path.join(folder, "undisturbed"), time.perf_counter()
    run = subprocess.Popen(command(out, f"--max_iters={steps}", launch=launch), stdout=subprocess.DEVNULL)
    while run.poll() is None and not steps_of(out):
        time.sleep(0.02)
    start = time.perf_counter() - began
    if run.wait():
        raise ValueError("the undisturbed run failed, see above")
    return out, start


def kill(folder: str) -> None:
    """Kills a run (SIGKILL) as often as asked. It resumes each time, and ends where the undisturbed run ended."""
    steps = 40 * times
    straight, start = undisturbed(folder, steps)
    out, lost, early, init = os.path.join(folder, "killed"), [], 0, "scratch"
    for _ in range(times):
        before = steps_of(out)
        run = subprocess.Popen(command(out, f"--max_iters={steps}", f"--init_from={init}"), stdout=subprocess.DEVNULL)
        time.sleep(random.uniform(0.5, 1.5) * start)
        run.send_signal(signal.SIGKILL)
        if run.wait() != -signal.SIGKILL and run.returncode:
            raise ValueError(f"a run did not resume: exit code {run.returncode}")
        done = steps_of(out)
        if checkpoint.names(out):
            init = "resume"
            saved = checkpoint.load_newest(out)[1]["iter_num"]
            lost.append(done - saved)
        early += done <= before
    code = subprocess.call(command(out, f"--max_iters={steps}", f"--init_from={init}"), stdout=subprocess.DEVNULL)
    print(
        f"kill: {times} SIGKILLs, {early} of them before the first step of their run; each next run went on; "
        f"steps lost {min(lost, default=0)} to {max(lost, default=0)}, of {save_interval} between saves; exit code "
        f"{code}, weights {'the same as' if same_weights(straight, out) else 'DIFFERENT from'} the undisturbed run's, "
        f"bit for bit"
    )


def restart(folder: str) -> None:
    """One of two processes is killed at a random moment under torchrun, which starts both again."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=1")
    os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    straight, _ = undisturbed(folder, 60, launch)
    good = again = 0
    for i in range(max(1, times // 3)):
        out = os.path.join(folder, f"restarted-{i}")
        run = subprocess.Popen(
            command(out, "--max_iters=60", launch=launch), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        at = random.randrange(save_interval, 40)
        while run.poll() is None and steps_of(out) < at:
            time.sleep(0.005)
        workers = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(random.choice(workers)), signal.SIGKILL)
        again += "started again by torchrun" in run.communicate(timeout=300)[0]
        good += run.returncode == 0 and same_weights(straight, out)
    print(
        f"restart: {max(1, times // 3)} runs of two processes, one killed in each; {again} went on by themselves from "
        f"the last checkpoint, and {good} ended with the weights of the undisturbed run, bit for bit"
    )


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    random.seed(seed)
    with user_errors():
        known = {"kill": kill, "restart": restart}
        if times < 1:
            raise UserError(f"--times={times} must be at least 1")
        for name in names(what, known):
            with tempfile.TemporaryDirectory() as folder:
                known[name](folder)
