"""The table of docs/choices.md: one row per choice on Tiny Shakespeare, three seeds, loss and milliseconds per step.

    python -m lab.experiments.choices --only=rope,swiglu  # these rows, and the default model
    python -m lab.experiments.choices                     # all rows
    python -m lab.experiments.choices --what=time         # only the times
    python -m lab.experiments.choices --what=links        # write into docs/choices.md where the code is
    python -m lab.experiments.choices --table=speedrun    # the choices of the speedrun (RESULTS.md)
    python -m lab.experiments.choices --table=warmup      # pre-norm and post-norm (RESULTS.md)

It runs train.py with the table's config for each row and seed. Runs that finished with the same command and config are
skipped, so you can stop the script and start it again. The times are those of training steps in one process, in rounds:
each row takes one step per round.
"""

import os
import re
import statistics
from dataclasses import dataclass
from typing import Literal

import torch

from configurator import at_least_one, configure, names, user_errors
from errors import UserError
from lab.experiments.results import save, saved, spread
from lab.experiments.runs import as_flags, last, logs
from lab.experiments.times import step_times
from text.dataset import ROOT
from text.files import sha256

# What is measured?
what = "train,time"  # the parts to run, separated by commas: train, time, links
table: Literal["choices", "speedrun", "warmup"] = "choices"  # choices: of docs/choices.md; the others: of RESULTS.md
only = ""  # the rows to run, separated by commas; empty: all
config_file: str | None = None  # the config file of every run; None: the table's
seeds = 3  # runs per row, with the seeds 1, 2, ...
extra = ""  # more flags of train.py for every run (not for the times), separated by spaces
jobs = 1  # runs at the same time; they share the cores of the CPU
repeats = 40  # number of timed steps per row
out_dir: str | None = None  # the folder for the runs, each in a folder of its own; None: out-choices and so on


@dataclass
class Row:
    flags: dict  # of train.py
    place: str = ""  # the file and the name in it that make the choice: "choices.py RoPE"
    paper: str = ""


SHORT = {"heads": "S/S/L", "window": 16, "position": "rope"}
ROWS = {
    "GPT-2": Row({}, "model.py GPT", "Radford et al. 2019"),
    # positions
    "none": Row({"position": "none"}, "choices.py POSITION", "Kazemnejad et al. 2023"),
    "sinusoidal": Row({"position": "sinusoidal"}, "choices.py Sinusoids", "Vaswani et al. 2017"),
    "relative": Row({"position": "relative"}, "choices.py Relative", "Shaw et al. 2018"),
    "t5": Row({"position": "t5"}, "choices.py T5", "Raffel et al. 2019"),
    "alibi": Row({"position": "alibi"}, "choices.py ALiBi", "Press et al. 2021"),
    "rope": Row({"position": "rope"}, "choices.py RoPE", "Su et al. 2021"),
    "rope S/S/L": Row(SHORT, "attention/heads.py groups_of", "Su et al. 2021"),
    "rope S/S/L nope_long": Row(SHORT | {"nope_long": True}, "model.py CausalSelfAttention", "Command A (2025)"),
    "decay alibi": Row({"decay": "alibi"}, "choices.py DECAY", "Press et al. 2021"),
    "decay learned": Row({"decay": "learned"}, "choices.py DECAY", ""),
    "conv 4": Row({"conv": 4}, "choices.py ShortConv", "So et al. 2021"),
    # norms
    "bias": Row({"bias": True}, "model.py MLP", "Radford et al. 2019"),
    "rmsnorm": Row({"norm": "rmsnorm"}, "choices.py RMSNorm", "Zhang and Sennrich 2019"),
    "rmsnorm with bias": Row({"norm": "rmsnorm", "norm_bias": True}, "choices.py RMSNorm", "Zhang and Sennrich 2019"),
    "post": Row({"where": "post"}, "choices.py WHERE", "Vaswani et al. 2017"),
    "sandwich": Row({"where": "sandwich"}, "choices.py WHERE", "Gemma 2 (2024)"),
    "olmo2": Row({"where": "olmo2"}, "choices.py WHERE", "OLMo 2 (2024)"),
    # blocks
    "parallel": Row({"block": "parallel"}, "model.py Block", "PaLM (Chowdhery et al. 2022)"),
    "gelu_exact": Row({"mlp": "gelu_exact"}, "choices.py ACTIVATION", "Hendrycks and Gimpel 2016"),
    "relu": Row({"mlp": "relu"}, "choices.py ACTIVATION", "Vaswani et al. 2017"),
    "relu2": Row({"mlp": "relu2"}, "choices.py ACTIVATION", "So et al. 2021"),
    "swish": Row({"mlp": "swish"}, "choices.py ACTIVATION", "Ramachandran et al. 2017"),
    "elu": Row({"mlp": "elu"}, "choices.py ACTIVATION", "Clevert et al. 2015"),
    "selu": Row({"mlp": "selu"}, "choices.py ACTIVATION", "Klambauer et al. 2017"),
    "sigmoid": Row({"mlp": "sigmoid"}, "choices.py ACTIVATION", "Narang et al. 2021"),
    "softplus": Row({"mlp": "softplus"}, "choices.py ACTIVATION", "Narang et al. 2021"),
    "glu": Row({"mlp": "glu"}, "choices.py ACTIVATION", "Dauphin et al. 2016"),
    "reglu": Row({"mlp": "reglu"}, "choices.py ACTIVATION", "Shazeer 2020"),
    "geglu": Row({"mlp": "geglu"}, "choices.py ACTIVATION", "Shazeer 2020"),
    "swiglu": Row({"mlp": "swiglu"}, "choices.py ACTIVATION", "Shazeer 2020"),
    "liglu": Row({"mlp": "liglu"}, "choices.py ACTIVATION", "Shazeer 2020"),
    # depth and width, with as many weights
    "1 x 164": Row({"n_layer": 1, "n_embd": 164, "n_head": 4}, "model.py GPT", "Kaplan et al. 2020"),
    "6 x 68": Row({"n_layer": 6, "n_embd": 68, "n_head": 4}, "model.py GPT", "Kaplan et al. 2020"),
    "12 x 48": Row({"n_layer": 12, "n_embd": 48, "n_head": 4}, "model.py GPT", "Kaplan et al. 2020"),
    # heads
    "GQA 2": Row({"n_kv_head": 2}, "attention/heads.py per_head", "Ainslie et al. 2023"),
    "MQA": Row({"n_kv_head": 1}, "attention/heads.py per_head", "Shazeer 2019"),
    "head_dim 32": Row({"head_dim": 32}, "rules.py with_defaults", "Vaswani et al. 2017, table 3"),
    "dropout": Row({"dropout": 0.1}, "model.py CausalSelfAttention", "Srivastava et al. 2014"),
    "dropout of weights alone": Row({"attn_dropout": 0.1}, "model.py softmax_attention", "Vaswani et al. 2017's code"),
    # stability
    "qk_norm layernorm": Row({"qk_norm": "layernorm"}, "choices.py QK_NORM", "Dehghani et al. 2023"),
    "qk_norm rmsnorm": Row({"qk_norm": "rmsnorm"}, "choices.py QK_NORM", "OLMo 2 (2024), Qwen 3 (2025)"),
    "qk_norm l2": Row({"qk_norm": "l2"}, "choices.py QK_NORM", "Henry et al. 2020"),
    "softcap": Row({"attention": "softcap"}, "attention/more.py softcap_attention", "Gemma 2 (2024)"),
    "logit_softcap 15": Row({"logit_softcap": 15}, "model.py GPT", "Gemma 2 (2024)"),
    "z_loss": Row({"z_loss": 1e-4}, "model.py GPT", "PaLM (Chowdhery et al. 2022)"),
    "zero_init": Row({"zero_init": True}, "model.py GPT", "Goyal et al. 2017; Yang et al. 2022"),
    "untied": Row({"tied": False}, "model.py GPT", "Press and Wolf 2016"),
    # training
    "muon": Row({"optimizer": "muon"}, "training/optimizers.py Muon", "Jordan et al. 2024"),
    "lamb": Row({"optimizer": "lamb", "learning_rate": 1e-2}, "training/optimizers.py Lamb", "You et al. 2019"),
    "nadamw": Row({"optimizer": "nadamw"}, "training/optimizers.py nadamw", "Dozat 2016"),
    "adam_eps 1e-24": Row({"adam_eps": 1e-24}, "training/optimizers.py adamw", "LASER, table 9"),
    "weight_decay 0": Row({"weight_decay": 0.0}, "training/optimizers.py by_decay", "D'Angelo et al. 2024"),
    "label_smoothing 0.1": Row({"label_smoothing": 0.1}, "model.py GPT", "Szegedy et al. 2016"),
    "wsd": Row({"schedule": "wsd"}, "train.py get_lr", "MiniCPM (Hu et al. 2024)"),
    "constant": Row({"schedule": "constant"}, "train.py get_lr", ""),
}
SPEEDRUN = {  # one choice of the config changed in each row
    "speedrun": Row({}),
    "learned positions": Row({"position": "learned", "rope_base": None}),
    "rope_base 10000": Row({"rope_base": 10000.0}),
    "no QK-norm": Row({"qk_norm": "none"}),
    "qk_norm rmsnorm": Row({"qk_norm": "rmsnorm"}),
    "3 layers": Row({"n_layer": 3}),
    "4 layers": Row({"n_layer": 4}),
    "96 wide": Row({"n_embd": 96, "n_hidden": 288}),
    "tied": Row({"tied": True}),
    "muon_beta 0.95": Row({"muon_beta": 0.95}),
    "AdamW": Row({"optimizer": "adamw", "learning_rate": 6e-3}),
}
PRE_OR_POST = [("pre", 6e-3, 100), ("pre", 6e-3, 0), ("post", 6e-3, 500), ("pre", 1e-3, 100), ("pre", 1e-3, 0)]
PRE_OR_POST += [("post", 1e-3, 100), ("post", 1e-3, 0), ("post", 1e-3, 500)]  # post-norm, 6e-3, 100 is in ROWS
WARMUP = {
    f"{where} {rate:g} warm-up {n}": Row({"where": where, "learning_rate": rate, "warmup_iters": n})
    for where, rate, n in PRE_OR_POST
}
TABLES = {
    "choices": (ROWS, "config/train_shakespeare_char_cpu.py"),
    "speedrun": (SPEEDRUN, "config/speedrun_shakespeare_char_cpu.py"),
    "warmup": (WARMUP, "config/train_shakespeare_char_cpu.py"),
}


def link(row: Row) -> str:
    """[choices.py, `RoPE`](../choices.py), where the row's choice is made. Raises UserError where the name is gone."""
    file, name = row.place.split()
    with open(os.path.join(ROOT, file), encoding="utf-8") as f:
        code = f.read()
    if not re.search(rf"(?m)^(class |def |){name}[(:]", code):
        raise UserError(f"{file} has no {name}")
    return f"[{file}, `{name}`](../{file})"


def relinked(page: str) -> str:
    """docs/choices.md, in whose table each row's last column but one is the row's link."""
    for name, row in ROWS.items():
        cells = rf"(?m)^(\| {re.escape(name)} \|(?:[^|\n]*\|){{5}}) [^|\n]* (\|[^|\n]*\|)$"
        page = re.sub(cells, lambda found, row=row: f"{found[1]} {link(row)} {found[2]}", page)
    return page


def timed(path: str) -> dict[str, tuple[float, float]]:
    """The times of an earlier run with this config."""
    stored = saved(path, {"config": "", "ms": {}})
    return stored["ms"] if stored["config"] == sha256(os.path.join(ROOT, config_file)) else {}


def last_losses(rows: dict[str, Row]) -> dict[str, list[float]]:
    """The last validation loss of each row's runs; seeds in the outer loop."""
    runs = {}
    for seed in range(1, seeds + 1):
        for name, row in rows.items():
            folder = os.path.join(out_dir, f"{re.sub('[^a-z0-9]+', '-', name.lower())}-{seed}")
            command = [config_file, *as_flags(row.flags), f"--seed={seed}", *extra.split()]
            runs[name, seed] = f"{name}, seed {seed}", command, folder
    found = logs(runs, jobs)
    return {name: [last(found[name, seed]) for seed in range(1, seeds + 1)] for name in rows}


def main() -> None:
    os.chdir(ROOT)
    torch.set_flush_denormal(True)  # as train.py
    at_least_one(jobs=jobs, seeds=seeds, repeats=repeats)
    known_rows = TABLES[table][0]
    chosen, parts = names(only, known_rows), names(what, ["train", "time", "links"])
    if "links" in parts:
        text = open("docs/choices.md", encoding="utf-8").read()
        with open("docs/choices.md", "w", encoding="utf-8") as f:
            f.write(relinked(text))
        if parts == ["links"]:
            return
    base = next(iter(known_rows))
    rows = {name: known_rows[name] for name in (base, *chosen)}
    os.makedirs(out_dir, exist_ok=True)
    ms_path = os.path.join(out_dir, "ms.json")
    val = last_losses(rows) if "train" in parts else {}
    ms = timed(ms_path)
    if "time" in parts:
        ms |= step_times(config_file, {name: row.flags for name, row in rows.items()}, 65, repeats)
        save(ms_path, {"config": sha256(os.path.join(ROOT, config_file)), "ms": ms})
    linked = bool(rows[base].place)
    print(f"| | flags | val loss, mean (range) | against {base} | ms per step | |" + " where | paper |" * linked)
    print("|---" * (8 if linked else 6) + "|")
    for name, row in rows.items():
        flags = f"`{' '.join(as_flags(row.flags))}`" if row.flags else ""
        loss = " | "
        if name in val:
            change = statistics.mean(a - b for a, b in zip(val[name], val[base], strict=True))
            loss = f"{spread(val[name])} | {change:+.3f}"
        times = f"{ms[name][0]:.1f} | {ms[name][1]:.2f}x" if name in ms else " | "
        where = f" {link(row)} | {row.paper} |" if linked else ""
        print(f"| {name} | {flags} | {loss} | {times} |{where}")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    config_file = config_file or TABLES[table][1]
    out_dir = out_dir or f"out-{table}"
    with user_errors():
        main()
