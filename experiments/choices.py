"""The README's table of choices: one row per knob on Tiny Shakespeare, three seeds, loss and ms per step.

    python experiments/choices.py --only=rope,swiglu     # these rows, and the default that they are held against
    python experiments/choices.py                        # all of them
    python experiments/choices.py --what=time            # milliseconds alone
    python experiments/choices.py --what=links           # points the README's rows at today's lines of code

Runs train.py with the CPU config for each row and seed; a run that is there already, of the same command and
config, is not repeated, so that it can be stopped and goes on. Times are of training steps of all rows in one
process, interleaved: each row takes a step before any takes another.
"""

import concurrent.futures
import json
import os
import re
import statistics
import sys
import threading
import time
from dataclasses import dataclass, fields

import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import UserError, configure, constants, user_errors
from experiments.runs import finished
from model import GPT, GPTConfig
from text.dataset import ROOT
from text.files import sha256
from training.optimizers import OPTIMIZER, Settings

what = "train,time"  # the parts to run: train, time, links
only = ""  # rows, separated by commas; empty: all
config_file = "config/train_shakespeare_char_cpu.py"  # of every run
seeds = 3  # runs per row, with the seeds 1, 2, ...
extra = ""  # more flags of train.py for every run (not for the times), separated by spaces
jobs = 1  # runs at a time, which share the CPU's cores
repeats = 40  # steps of each row that are timed
out_dir = "out-choices"  # a folder per run goes there


@dataclass
class Row:
    flags: dict  # of train.py
    line: str  # what to look for in model.py, or in another file: "optimizers.py: class Lamb"
    paper: str


SHORT = {"heads": "S/S/L", "window": 16, "position": "rope"}
ROWS = {
    "GPT-2": Row({}, "class GPT(", "Radford et al. 2019"),
    # positions
    "none": Row({"position": "none"}, '"none": (None, None)', "Kazemnejad et al. 2023"),
    "sinusoidal": Row({"position": "sinusoidal"}, "class Sinusoids", "Vaswani et al. 2017"),
    "relative": Row({"position": "relative"}, "class Relative", "Shaw et al. 2018"),
    "t5": Row({"position": "t5"}, "class T5", "Raffel et al. 2019"),
    "alibi": Row({"position": "alibi"}, "class ALiBi", "Press et al. 2021"),
    "rope": Row({"position": "rope"}, "class RoPE", "Su et al. 2021"),
    "rope S/S/L": Row(SHORT, '"rope": (None, RoPE)', "Su et al. 2021"),
    "rope S/S/L nope_long": Row(SHORT | {"nope_long": True}, "self.nope_long and group.window", "Command A (2025)"),
    # norms
    "bias": Row({"bias": True}, "self.c_fc = nn.Linear", "Radford et al. 2019"),
    "rmsnorm": Row({"norm": "rmsnorm"}, "class RMSNorm", "Zhang and Sennrich 2019"),
    "rmsnorm with bias": Row(
        {"norm": "rmsnorm", "norm_bias": True}, "return y if self.bias is None", "Zhang and Sennrich 2019"
    ),
    "post": Row({"where": "post"}, '"post": (', "Vaswani et al. 2017"),
    "sandwich": Row({"where": "sandwich"}, '"sandwich": (', "Gemma 2 (2024)"),
    "olmo2": Row({"where": "olmo2"}, '"olmo2": (', "OLMo 2 (2024)"),
    # blocks
    "parallel": Row({"block": "parallel"}, "if self.parallel:", "PaLM (Chowdhery et al. 2022)"),
    "gelu_exact": Row({"mlp": "gelu_exact"}, '"gelu_exact": (', "Hendrycks and Gimpel 2016"),
    "relu": Row({"mlp": "relu"}, '"relu": (', "Vaswani et al. 2017"),
    "relu2": Row({"mlp": "relu2"}, '"relu2": (', "So et al. 2021"),
    "swish": Row({"mlp": "swish"}, '"swish": (', "Ramachandran et al. 2017"),
    "elu": Row({"mlp": "elu"}, '"elu": (', "Clevert et al. 2015"),
    "selu": Row({"mlp": "selu"}, '"selu": (', "Klambauer et al. 2017"),
    "sigmoid": Row({"mlp": "sigmoid"}, '"sigmoid": (', "Narang et al. 2021"),
    "softplus": Row({"mlp": "softplus"}, '"softplus": (', "Narang et al. 2021"),
    "glu": Row({"mlp": "glu"}, '"glu": (', "Dauphin et al. 2016"),
    "reglu": Row({"mlp": "reglu"}, '"reglu": (', "Shazeer 2020"),
    "geglu": Row({"mlp": "geglu"}, '"geglu": (', "Shazeer 2020"),
    "swiglu": Row({"mlp": "swiglu"}, '"swiglu": (', "Shazeer 2020"),
    "liglu": Row({"mlp": "liglu"}, '"liglu": (', "Shazeer 2020"),
    # heads
    "GQA 2": Row({"n_kv_head": 2}, "def per_head", "Ainslie et al. 2023"),
    "MQA": Row({"n_kv_head": 1}, "def per_head", "Shazeer 2019"),
    "head_dim 32": Row({"head_dim": 32}, "def head_size", "Vaswani et al. 2017, table 3"),
    "dropout": Row({"dropout": 0.1}, "self.resid_dropout = ", "Srivastava et al. 2014"),
    "dropout of weights alone": Row({"attn_dropout": 0.1}, "def weight_dropout", "Vaswani et al. 2017's code"),
    # stability
    "qk_norm layernorm": Row({"qk_norm": "layernorm"}, '"layernorm": lambda c, D', "Dehghani et al. 2023"),
    "qk_norm rmsnorm": Row({"qk_norm": "rmsnorm"}, '"rmsnorm": lambda c, D', "OLMo 2 (2024), Qwen 3 (2025)"),
    "qk_norm l2": Row({"qk_norm": "l2"}, '"l2": lambda c, D', "Henry et al. 2020"),
    "logit_softcap 15": Row({"logit_softcap": 15}, "cap * torch.tanh", "Gemma 2 (2024)"),
    "z_loss": Row({"z_loss": 1e-4}, "self.config.z_loss * (log_z", "PaLM (Chowdhery et al. 2022)"),
    "zero_init": Row({"zero_init": True}, "by_norm = config.zero_init", "Goyal et al. 2017; Yang et al. 2022"),
    "untied": Row({"tied": False}, "if config.tied:", "Press and Wolf 2016"),
    # training
    "muon": Row({"optimizer": "muon"}, "optimizers.py: class Muon", "Jordan et al. 2024"),
    "lamb": Row({"optimizer": "lamb", "learning_rate": 1e-2}, "optimizers.py: class Lamb", "You et al. 2019"),
    "wsd": Row({"schedule": "wsd"}, 'train.py: if schedule == "cosine" else max', "MiniCPM (Hu et al. 2024)"),
    "constant": Row({"schedule": "constant"}, 'train.py: if schedule == "constant":', ""),
}


def as_flags(row: Row) -> list[str]:
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in row.flags.items()]


def link(row: Row) -> str:
    """[model.py:123](model.py#L123), where the row's choice is made."""
    file, _, text = row.line.rpartition(": ") if ".py: " in row.line else ("model.py", "", row.line)
    with open(os.path.join(ROOT, file)) as f:
        at = next((n for n, code in enumerate(f, 1) if text in code), 0)
    if not at:
        raise UserError(f"{file} has no line with {text}")
    return f"[{file}:{at}]({file}#L{at})"


def relinked(readme: str) -> str:
    """The README with each row's link at the line that it means."""
    for name, row in ROWS.items():
        readme = re.sub(rf"(?m)^(\| {re.escape(name)} \|.*\| )\[\S+:\d+\]\(\S+#L\d+\)", rf"\1{link(row)}", readme)
    return readme


def step_times(names: list[str]) -> dict[str, tuple[float, float]]:
    """Of each row: milliseconds of a training step, and their ratio to the default's in the same round."""
    settings = constants("train.py") | constants(config_file)
    model_fields = {field.name for field in fields(GPTConfig)}
    base = {k: v for k, v in settings.items() if k in model_fields} | {"vocab_size": 65}
    x = torch.randint(65, (settings["batch_size"], base["block_size"]))
    runs = {}
    for name in names:
        chosen = ROWS[name].flags
        gpt = GPT(GPTConfig(**base | {k: v for k, v in chosen.items() if k in model_fields})).train()
        lr = Settings(chosen.get("learning_rate", settings["learning_rate"]), (0.9, settings["beta2"]), 0.1)
        runs[name] = gpt, OPTIMIZER[chosen.get("optimizer", "adamw")](gpt, lr)
    times = {name: [] for name in names}
    for round_ in range(repeats + 3):
        for name, (gpt, optimizers) in runs.items():
            begin = time.perf_counter()
            gpt(x, x)[1].backward()
            torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
            for o in optimizers:
                o.step()
            gpt.zero_grad(set_to_none=True)
            if round_ >= 3:
                times[name].append((time.perf_counter() - begin) * 1e3)
    default = times["GPT-2"]
    return {
        name: (statistics.median(ms), statistics.median(a / b for a, b in zip(ms, default, strict=True)))
        for name, ms in times.items()
    }


def timed(path: str) -> dict[str, tuple[float, float]]:
    """The times of an earlier run with this config."""
    if not os.path.exists(path):
        return {}
    try:
        with open(path) as f:
            stored = json.load(f)
        return stored["ms"] if stored["config"] == sha256(os.path.join(ROOT, config_file)) else {}
    except (ValueError, KeyError):
        raise UserError(f"{path} is damaged; without it the times are taken anew") from None


def losses(names: list[str]) -> dict[str, list[float]]:
    """The last validation loss of each row's runs; seeds in the outer loop."""
    threads = None if jobs == 1 else max(1, (os.cpu_count() or 1) // jobs)

    stop = threading.Event()

    def run(seed: int, name: str) -> float | None:
        if stop.is_set():
            return None
        folder = os.path.join(out_dir, f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{seed}")
        command = [config_file, *as_flags(ROWS[name]), f"--seed={seed}", *extra.split()]
        try:
            rows = finished(f"{name}, seed {seed}", command, folder, threads)
        except BaseException:
            stop.set()
            raise
        return [row["val_loss"] for row in rows if "val_loss" in row][-1]

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = {(name, seed): pool.submit(run, seed, name) for seed in range(1, seeds + 1) for name in names}
        try:
            concurrent.futures.wait(futures.values())
        except KeyboardInterrupt:  # which the runs get as well, save and end
            stop.set()
            raise
    return {name: [futures[name, seed].result() for seed in range(1, seeds + 1)] for name in names}


def main() -> None:
    os.chdir(ROOT)
    torch.set_flush_denormal(True)  # as train.py
    if jobs < 1 or seeds < 1 or repeats < 1:
        raise UserError(f"--jobs={jobs}, --seeds={seeds} and --repeats={repeats} must be at least 1")
    parts, names = what.split(","), [name.strip() for name in only.split(",") if name.strip()] or list(ROWS)
    for given, known in ((names, list(ROWS)), (parts, ["train", "time", "links"])):
        if unknown := [name for name in given if name not in known]:
            raise UserError(f"{unknown[0]!r} is none of {', '.join(known)}")
    if "links" in parts:
        text = open("README.md", encoding="utf-8").read()
        with open("README.md", "w", encoding="utf-8") as f:
            f.write(relinked(text))
        if parts == ["links"]:
            return
    names = ["GPT-2", *(name for name in names if name != "GPT-2")]
    os.makedirs(out_dir, exist_ok=True)
    ms_path = os.path.join(out_dir, "ms.json")
    val = losses(names) if "train" in parts else {}
    ms = timed(ms_path)
    if "time" in parts:
        ms |= step_times(names)
        with open(ms_path, "w") as f:
            json.dump({"config": sha256(os.path.join(ROOT, config_file)), "ms": ms}, f)
    print("| | flags | val loss, mean (range) | against GPT-2 | ms per step | | where | paper |")
    print("|---|---|---|---|---|---|---|---|")
    for name in names:
        row, loss = ROWS[name], val.get(name)
        shown, change = "", ""
        if loss:
            shown = f"{statistics.mean(loss):.3f} ({min(loss):.3f} to {max(loss):.3f})"
            change = f"{statistics.mean(a - b for a, b in zip(loss, val['GPT-2'], strict=True)):+.3f}"
        time_, ratio = (f"{ms[name][0]:.1f}", f"{ms[name][1]:.2f}x") if name in ms else ("", "")
        flags = f"`{' '.join(as_flags(row))}`" if row.flags else ""
        print(f"| {name} | {flags} | {shown} | {change} | {time_} | {ratio} | {link(row)} | {row.paper} |")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
