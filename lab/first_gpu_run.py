"""The first half hour on a new GPU: is everything right there, how fast is it, does it train?

    python -m lab.first_gpu_run                        # all parts, about 40 minutes
    python -m lab.first_gpu_run --parts=right,speed    # some of them
    python -m lab.first_gpu_run --tiny                 # a rehearsal on a CPU

There are five parts, the most useful one first:

    right       the tests of the Triton kernels on the GPU; bench.py compares each attention with its definition
    speed       bench.py, all of its tables
    training    steps of GPT-2 (124M) and of a small model, by lab/experiments/gpu_training.py
    learning    nanoGPT's Shakespeare model; the beta post's run; long texts, LS and long heads
    faults      the tests of disturbed runs, on the GPU; float16; a run that is stopped and goes on

A part takes at most nine minutes. `timeout` (of the GNU tools) stops a command at its own limit by SIGTERM and kills it
20 seconds later. The folder --out gets two files for each part: PART.log, in which every line begins with the seconds
since its command was started, and PART.json: the result of each command, with all losses of its evaluations. No network
is needed if data/shakespeare_char has its input.txt.
"""

import concurrent.futures
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple, TextIO

import torch

from configurator import names
from errors import UserError
from lab.experiments.results import check_writable, save, start

parts = ""  # the parts to run, separated by commas; empty: all
texts = "shakespeare_char"  # the data of the runs on long texts: the name of a folder in data/, or the path of a folder
out = "gpu-run"  # the folder for results
out_dir = "out-gpu-run"  # the folder for the runs' checkpoints
tiny = False  # the smallest sizes, on the CPU: a rehearsal of all commands

PATIENCE = 20.0  # seconds between SIGTERM and SIGKILL
SHAKESPEARE = "config/train_shakespeare_char.py"
TINY_MODEL = "--n_layer=1 --n_head=6 --n_embd=24 --block_size=16".split()
TINY_BENCH = "--only=sdpa,softmax --heads=SL --n_head=2 --head_dim=8 --lengths=16 --tokens=32 --device=cpu".split()
TINY_RUN = "--batch_size=2 --max_iters=4 --eval_interval=2 --eval_iters=1 --sample_tokens=9 --device=cpu".split()


class Command(NamedTuple):
    argv: list[str]  # of python
    seconds: float  # its limit


def run(name: str, command: Command, log: TextIO, running: list[subprocess.Popen]) -> dict:
    """Runs a command. Its output goes to the log and to the terminal, line by line. Returns what is known of it then.

    running: gets the process.
    """
    env = os.environ | {"PYTHONUNBUFFERED": "1", "WANDB_MODE": "disabled", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    env |= {"TRITON_INTERPRET": str(int(tiny)), "TEST_DEVICE": "cpu" if tiny else "cuda"}
    began, lines, losses, wrong = time.monotonic(), [], [], []
    argv = ["timeout", f"--kill-after={PATIENCE}", str(command.seconds), sys.executable, *command.argv]
    process = subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    running.append(process)
    for line in process.stdout:
        at = round(time.monotonic() - began, 1)
        for file in (log, sys.stdout):
            file.write(f"{name} {at:6.1f}  {line}")
            file.flush()
        lines = [*lines, line.rstrip()][-5:]
        wrong += re.findall(r".* is WRONG: .*", line)  # bench.py goes on without the row
        if found := re.match(r"step (\d+): train loss (\S+), val loss (\S+)", line):
            losses.append({"s": at, "iter": int(found[1]), "train": float(found[2]), "val": float(found[3])})
    code, seconds = process.wait(), round(time.monotonic() - began, 1)
    known = {"command": " ".join(command.argv), "code": code, "seconds": seconds, "wrong": wrong}
    return known | {"stopped": seconds >= command.seconds, "last lines": lines, "losses": losses}


def train(name: str, config: str, *flags: str) -> list[str]:
    """A run of train.py into a folder of its own."""
    few = [*TINY_RUN, *TINY_MODEL] if tiny else []
    return ["train.py", config, *few, *flags, f"--out_dir={os.path.join(out_dir, name)}"]


def tests(*files: str, names: str) -> list[str]:
    """The tests in these files whose names fit (pytest -k)."""
    return ["-m", "pytest", "-q", "-n", "0" if tiny else "6", *files, "-k", names]


def out_flag(name: str) -> str:
    """The flag for a file of results."""
    return f"--out={os.path.join(out, name)}.json"


def bench(name: str, *flags: str) -> Command:
    """A run of bench.py, which first compares each attention with its definition."""
    few = [*TINY_BENCH, "--repeats=1"] if tiny else ["--device=cuda"]
    return Command(["bench.py", *flags, *few, out_flag(name)], 510)


def right() -> Iterator[dict[str, Command]]:
    commands = {"kernels": Command(tests("tests/test_kernels.py", names="without_positions" if tiny else ""), 510)}
    for dtype in ("float32", "bfloat16"):
        flags = ("--what=attention", "--quick", "--head_dim=64", "--lengths=512", f"--dtype={dtype}")
        commands[dtype] = bench(f"right-{dtype}", *flags)
    yield commands


def speed() -> Iterator[dict[str, Command]]:
    flags = "--what=model,step,decode,attention --dtype=bfloat16 --head_dim=64,128,32 --tokens=32768"
    flags += " --lengths=2048,8192,32768 --decode_length=512 --repeats=7"
    yield {"bench": bench("bench-gpu", *("--what=attention --dtype=float32" if tiny else flags).split())}


def training() -> Iterator[dict[str, Command]]:
    small = "--only=plain --size=tiny --steps=6 --no-compile --device=cpu --dtype=float32".split()
    rows = "--only=plain,no wait,triton,beta,beta triton,reduce-overhead"
    commands = {
        "gpt2": (["--profile", "--budget=340"], 400),
        "shakespeare": (["--profile", "--size=shakespeare", "--budget=60", rows], 100),
    }
    for name, (flags, seconds) in commands.items():
        argv = ["-m", "lab.experiments.gpu_training", out_flag(name), *(small if tiny else flags)]
        yield {name: Command(argv, seconds)}


def learning() -> Iterator[dict[str, Command]]:
    yield {"shakespeare": Command(train("shakespeare", SHAKESPEARE), 150)}
    long = [f"--dataset={texts}", "--wandb_log=False"]
    if not tiny:
        long += ["--gradient_accumulation_steps=1", "--max_iters=2000", "--lr_decay_iters=2000", "--warmup_iters=100"]
        long += ["--learning_rate=2e-3", "--min_lr=2e-4", "--eval_interval=250", "--eval_iters=20"]
    steps = [] if tiny else ["--max_iters=10000"]
    yield {
        "softmax": Command(train("softmax", SHAKESPEARE, *steps), 340),
        "beta": Command(train("beta", SHAKESPEARE, "--attention=beta", *steps), 340),
        "LS": Command(train("LS", "config/train_pg19_ls.py", *long), 340),
        "long": Command(train("long", "config/train_pg19_ls.py", "--heads=L", *long), 340),
    }


def faults() -> Iterator[dict[str, Command]]:
    often = [] if tiny else ["--eval_interval=100", "--eval_iters=20"]
    endless = train("stopped", SHAKESPEARE, "--save_interval=50", *often)
    endless = [*(flag for flag in endless if "max_iters" not in flag), "--max_iters=1000000"]
    which = "resume or saved or restarts or alone or wait"
    half = ["--dtype=float16", *often, *([] if tiny else ["--max_iters=300"])]
    yield {
        "tests": Command(tests("tests/test_gpu.py", "tests/test_faults.py", names="alone" if tiny else which), 300),
        "float16": Command(train("float16", SHAKESPEARE, *half), 300),
        "stopped": Command(endless, 20 if tiny else 90),
    }
    yield {"resumed": Command([*endless, "--init_from=resume"], 20 if tiny else 90)}


PARTS = {"right": right, "speed": speed, "training": training, "learning": learning, "faults": faults}


def run_part(part: str) -> dict[str, dict]:
    """Runs a part; returns {command's name: its result}, which are also in PART.json, as far as it has come."""
    results, running = {}, []
    with (
        open(os.path.join(out, f"{part}.log"), "w", encoding="utf-8") as log,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        for together in PARTS[part]():
            found = {name: pool.submit(run, name, command, log, running) for name, command in together.items()}
            try:
                results |= {name: future.result() for name, future in found.items()}
            except KeyboardInterrupt:  # the commands do not get Ctrl-C, and would run on
                for process in running:
                    process.terminate()
                raise
            save(os.path.join(out, f"{part}.json"), results)
    return results


def in_words(result: dict) -> str:
    """How a command ended."""
    if result["stopped"]:
        return f"stopped at its limit, {result['seconds']:.0f} s"
    return f"{'FAILED' if result['code'] or result['wrong'] else 'done'} after {result['seconds']:.0f} s"


def main() -> None:
    chosen = names(parts, PARTS)
    if not tiny and not torch.cuda.is_available():
        raise UserError("there is no CUDA GPU here (or this PyTorch is built without CUDA): --tiny is a rehearsal")
    os.makedirs(out, exist_ok=True)
    check_writable(*(os.path.join(out, f"{part}.log") for part in chosen))
    found = {part: run_part(part) for part in chosen}
    for part, results in found.items():
        print(f"\n{part}")
        for name, result in results.items():
            least = min((row["val"] for row in result["losses"]), default=None)
            lowest = "" if least is None else f"; lowest validation loss {least:.4f}"
            print(f"  {name:24}{in_words(result)}{lowest}")
            said = [*result["wrong"], *result["last lines"]] if "FAILED" in in_words(result) else []
            print("".join(f"      {line}\n" for line in said), end="")
    if any("FAILED" in in_words(result) for results in found.values() for result in results.values()):
        raise UserError(f"not everything worked: the logs are in {out}")


if __name__ == "__main__":
    start(globals())
