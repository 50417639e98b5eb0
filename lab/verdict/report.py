"""The report of a verdict, its pictures and its folder; and the card of all verdicts."""

import glob
import json
import os
import re
import shlex
from statistics import mean

import torch

from errors import UserError
from lab.experiments.results import Difference, drawing, short, show_table
from lab.look import maps
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model
from training.distributed import count
from training.estimate import duration

# Where the card looks for verdicts: those of the lab, and those of the folder in which it runs
VERDICTS = ("lab/verdict/results/*.json", "verdict-*/runs.json")
FOLDER = "verdict-"  # and the name of a verdict: the folder of its report
TOKENS = 24  # of the validation text, in a map
WIDTH = 36  # of a column of the report
SETTINGS = "--(both|config_file|dataset|quick|sizes|steps|seeds)"


def lines_of(n: dict) -> list[str]:
    """The lines of a report, from the numbers of a verdict (see __main__.Verdict)."""
    made_by = n["origin"]
    runs, seconds = n["made"]
    code = [f"{name} {code[:8]}" for name, code in made_by["fingerprints"].items()]
    commit = made_by["commit"]
    commit = commit[:8] + (" (edited)" if commit.endswith("-dirty") else "")
    version = made_by["versions"]["torch"]
    lines = [
        f"{n['idea']} against {n['base']}: {count(runs, 'run')} made, {duration(seconds)}",
        f"{', '.join(code)}; commit {commit}, torch {version}",
        f"{n['data']}, context {n['context']}, {n['steps']} steps; losses in nats a token",
        f"checks     {' | '.join(n['checks'])}",
    ]
    sizes = n["sizes"]
    if "layer" in n:
        heads = []
        for size, of in sizes.items():
            base, idea = of["parameters"]
            heads.append(f"{base / 1e6:.2f}M ({size}), idea {idea / base - 1:+.1%}")
        lines.append(row("", heads))
        lines += table_of(n)
        lines += costs_of(n)
    lines.append(f"VERDICT    {n['verdict']}")
    return lines


def row(head: str, cells: list[str]) -> str:
    """A line of the report, with a column for each size."""
    return f"{head:<23}" + "".join(f"{cell:<{WIDTH}}" for cell in cells).rstrip()


def table_of(n: dict) -> list[str]:
    """The lines about losses."""
    sizes = n["sizes"].values()
    lines = [
        row(
            "learning rate",
            [f"{of['rates'][1]:g} ({n['base']} {of['rates'][0]:g})" for of in sizes],
        ),
        row(
            "validation loss",
            [
                f"{mean(of['losses'][1]):.3f} ({n['base']} {mean(of['losses'][0]):.3f})"
                for of in sizes
            ],
        ),
    ]
    for part, title in (("steps", f"equal steps, {n['seeds']} seeds"), ("time", "equal time")):
        found = [Difference(*of[part]) for of in sizes]
        words = [
            "(rate at the edge)" if of[f"{part}_edge"] else x.word or "not seen"
            for of, x in zip(sizes, found, strict=True)
        ]
        lines.append(row(title, [f"{x} {word}" for x, word in zip(found, words, strict=True)]))
        lines.append(row("  could have shown", [f"{x.shown:.3f}" for x in found]))
    lines.append(row("  steps in this time", [f"{of['fit']} of {n['steps']}" for of in sizes]))
    return lines


def costs_of(n: dict) -> list[str]:
    """The lines about speed, recall and longer texts."""
    ratios = ", ".join(f"{of['ratio']:.2f}" for of in n["sizes"].values())
    layer = n["layer"]
    decoding = n["decoding"]
    recall = n["recall"]
    pairs = [f"{k} pairs {x:.2f} ({recall['base'][k]:.2f})" for k, x in recall["idea"].items()]
    longer = n["longer"]
    return [
        f"time, as a multiple of {n['base']}'s, of the code as it is: step {ratios} | attention "
        f"layer, 2048 tokens {layer['ratio']:.2f} ({layer['bytes'] / 2**20:,.0f} MiB) | token in "
        f"decoding {decoding['ratio']:.2f}",
        f"cache      {decoding['cache']:.2f} of {n['base']}'s bytes, at the context of the runs",
        f"bfloat16   error {n['bfloat16']:.1f} times that of {n['base']}",
        f"recall     {', '.join(pairs)}; with a convolution, one seed; guessing gives 1 / pairs",
        f"longer     loss on 4x the context minus loss on it: {longer['idea']:+.2f} ({n['base']} "
        f"{longer['base']:+.2f}); with RoPE or no positions, one seed",
    ]


def write(numbers: dict, folders: list[str]) -> None:
    """Print the report, and write it, the numbers, the code and pictures into verdict-NAME.

    folders: of the trained models, what the idea is compared with first; empty: none were trained.
    """
    folder = FOLDER + re.sub("[^A-Za-z0-9_.]+", "-", numbers["idea"]).strip("-")
    os.makedirs(folder, exist_ok=True)
    text = "\n".join(lines_of(numbers))
    print(f"\n{text}\n")
    pictures = []
    if folders:
        draw_curves(numbers, f"{folder}/curves.png")
        pictures = ["curves.png"]
        if draw_maps(numbers, folders, f"{folder}/maps.png"):
            pictures.append("maps.png")
    for name, source in numbers["origin"].pop("sources").items():
        with open(f"{folder}/{name}.py.txt", "w", encoding="utf-8") as f:
            f.write(source)
    with open(f"{folder}/runs.json", "w", encoding="utf-8") as f:
        json.dump(short(numbers), f)
    with open(f"{folder}/report.md", "w", encoding="utf-8") as f:
        f.write(
            f"```sh\n{numbers['command']}\n```\n\n```\n{text}\n```\n\n"
            "How to read it: docs/verdict.md\n"
        )
        f.writelines(f"\n![{name.removesuffix('.png')}]({name})\n" for name in pictures)
    print(f"wrote {folder}/")


def draw_curves(n: dict, path: str) -> None:
    """Validation losses over steps and over time: the mean of the seeds and their range."""
    with drawing(path, len(n["sizes"]), 2, 11, 4 * len(n["sizes"])) as axes:
        for i, (size, of) in enumerate(n["sizes"].items()):
            names = n["base"], n["idea"]
            for name, curves, ms, color in zip(
                names, of["curves"], of["ms"], ("black", "C0"), strict=True
            ):
                steps = torch.tensor(curves[0]["iter"][1:])
                losses = torch.tensor([curve["val_loss"][1:] for curve in curves])
                for ax, x in zip(axes[2 * i : 2 * i + 2], (steps, steps * ms / 1e3), strict=True):
                    ax.plot(x, losses.mean(0), color=color, label=name)
                    ax.fill_between(x, losses.amin(0), losses.amax(0), color=color, alpha=0.2)
                    ax.set(ylabel="validation loss", title=size)
            in_time = mean(of["losses"][0]) + of["time"][0]
            at = n["steps"] * of["ms"][0] / 1e3
            axes[2 * i + 1].plot(at, in_time, "o", color="C0", label="run made for this time")
            axes[2 * i].set(xlabel="steps")
            axes[2 * i + 1].set(xlabel="seconds of steps, one thread")


def draw_maps(n: dict, folders: list[str], path: str) -> bool:
    """The maps of the last layer of both; return whether there are any to draw."""
    grids = {}
    try:
        for name, folder in zip((n["base"], n["idea"]), folders, strict=True):
            model, tok, settings, _ = open_model("resume", folder, "latest")
            val = Tokens(folder_of(settings["dataset"]), "val", 1)
            text = tok.decode(val.ids[:TOKENS].tolist())
            last = model.config.n_layer - 1
            tokens, grids[name] = maps.chosen_maps(model, tok, text, last, None)
    except UserError as error:
        print(f"no maps: {error}")
        return False
    rows = sum(maps.titled(grids, {name: name for name in grids}), [])
    maps.save(maps.draw(rows, tokens), path)
    return True


def card() -> None:
    """Print a table of all verdicts, the lowest loss at equal steps first."""
    verdicts = {}
    for pattern in VERDICTS:
        for path in glob.glob(pattern):
            with open(path, encoding="utf-8") as f:
                n = json.load(f)
            verdicts[title(n), n["base"]] = n
    done = [n for n in verdicts.values() if "layer" in n]
    columns = (
        "attention | against | equal steps | equal time | step | layer at 2048 | recall, 64 pairs "
        "| 4x the context | cache | verdict"
    )
    show_table(columns, [cells_of(n) for n in sorted(done, key=order)])
    for n in verdicts.values():
        if "layer" not in n:
            print(f"\n{n['idea']}: {n['verdict']}")


def order(n: dict) -> float:
    """The mean difference at equal steps over the sizes."""
    return mean([of["steps"][0] for of in n["sizes"].values()])


def title(n: dict) -> str:
    """The name of a verdict, with its flags and what differs from other verdicts' settings."""
    settings = [word for word in shlex.split(n["command"]) if re.match(SETTINGS, word)]
    return f"{n['idea']} `{' '.join([n['flags'], *settings])}`"


def cells_of(n: dict) -> list[str]:
    """A verdict's row of the card."""
    sizes = n["sizes"].values()
    return [
        title(n),
        n["base"],
        "; ".join(str(Difference(*of["steps"])) for of in sizes),
        "; ".join(str(Difference(*of["time"])) for of in sizes),
        "; ".join(f"{of['ratio']:.2f}x" for of in sizes),
        f"{n['layer']['ratio']:.2f}x, {n['layer']['bytes'] / 2**20:,.0f} MiB",
        f"{n['recall']['idea']['64']:.2f} ({n['recall']['base']['64']:.2f})",
        f"{n['longer']['idea']:+.2f} ({n['longer']['base']:+.2f})",
        f"{n['decoding']['cache']:.2f}x",
        n["verdict"],
    ]
