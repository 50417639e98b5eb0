"""A fault to be watched by hand: a run that saves often, and is killed (SIGKILL) and resumed at random moments.

python tests/faults.py --times=30
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

from configurator import at_least_one, configure, user_errors  # noqa: E402
from training import checkpoint  # noqa: E402

times = 30  # how often it is killed
dataset = "shakespeare_char"  # a folder of data/ that is prepared
save_interval = 3  # steps between saves
seed = 1  # of the moments

FLAGS = ["--n_layer=2", "--n_head=2", "--n_embd=64", "--block_size=32", "--batch_size=8", "--dropout=0.1"]
FLAGS += ["--gradient_accumulation_steps=2", "--eval_interval=100", "--eval_iters=2", "--log_interval=1"]
FLAGS += ["--device=cpu", "--sample_tokens=0", "--learning_rate=1e-3"]


def command(out: str, *flags: str) -> list[str]:
    script = [os.path.join(ROOT, "train.py"), f"--dataset={dataset}", f"--out_dir={out}"]
    return [sys.executable, *script, *FLAGS, f"--save_interval={save_interval}", *flags]


def steps_of(out: str) -> int:
    """How many steps a run has logged."""
    path = os.path.join(out, checkpoint.LOG)
    lines = open(path).read().splitlines() if os.path.exists(path) else []
    return 1 + max((json.loads(line)["iter"] for line in lines if line.endswith("}") and '"loss"' in line), default=-1)


def same_weights(a: str, b: str) -> bool:
    a, b = (checkpoint.load(os.path.join(out, checkpoint.LATEST))["model"] for out in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def undisturbed(folder: str, steps: int) -> tuple[str, float]:
    """(folder, seconds until the first step) of a run that nobody disturbs."""
    out, began = os.path.join(folder, "undisturbed"), time.perf_counter()
    run = subprocess.Popen(command(out, f"--max_iters={steps}"), stdout=subprocess.DEVNULL)
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


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    random.seed(seed)
    with user_errors(), tempfile.TemporaryDirectory() as folder:
        at_least_one(times=times)
        kill(folder)
