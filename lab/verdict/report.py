"""The report of a verdict, its picture and its folder; and the card of all verdicts."""

import glob
import json
import os
import re
import shlex
from statistics import fmean

from configurator import names

from lab.experiments.identity import of_text
from lab.experiments.results import Interval, drawing, short, show_table
from lab.verdict import calibration, chance
from lab.verdict.costs import SKILLS
from lab.verdict.method import pooled, slope
from training.distributed import count
from training.estimate import duration

# Where the card looks for verdicts: those of the lab, and those of the folder in which it runs
VERDICTS = ("lab/verdict/results/*.json", "verdict-*/runs.json")
FOLDER = "verdict-"  # and the name of a verdict: the folder of its report
WIDTH = 34  # of a column of the report
AFTER = {"pairs": "after {} key-value pairs", "products": "for {} permutations (chance 0.17)"}
# where one of these numbers differs, a verdict has a folder of its own
SETTINGS = "base", "flags", "recipe", "both", "data", "steps", "seeds", "quick"
# the flags of a verdict that its row on the card names
TOLD = "--(both|config_file|dataset|sizes|steps|seeds)"


def lines_of(n: dict) -> list[str]:
    """The lines of a report, from the numbers of a verdict (see __main__.Verdict)."""
    made_by = n["origin"]
    runs, seconds = n["made"]
    code = [f"{name} {code[:8]}" for name, code in made_by["fingerprints"].items()]
    commit = made_by["commit"]
    commit = commit[:8] + (" (edited)" if commit.endswith("-dirty") else "")
    machine = n["machine"]
    checks = " | ".join(n["checks"]) or "of the new model alone: no run ended with a model"
    lines = [
        f"{n['idea']} against {n['base']}: {count(runs, 'new run')}, {duration(seconds)}",
        f"{', '.join(code)}; commit {commit}, torch {machine['torch']}, {machine['processor']}",
        f"{n['recipe']} {n['both']}".rstrip(),
        f"{n['data']}, context {n['context']}, {n['steps']} steps; losses in nats a token, "
        f"differences are {n['idea']} minus {n['base']}, with intervals of {100 * n['level']:g}%",
        f"checks     {checks}",
    ]
    if "layer" in n:
        lines += [*table_of(n), *costs_of(n), *calibration.lines(overall(n).mean)]
    lines += [f"an earlier look, with {look} seeds: {said}" for look, said in n["looks"].items()]
    lines.append(f"VERDICT    {n['verdict']}")
    return lines


def row(head: str, cells: list[str]) -> str:
    """A line of the report, with a column for each size."""
    return f"{head:<32} " + "".join(f"{cell:<{WIDTH}}" for cell in cells).rstrip()


def table_of(n: dict) -> list[str]:
    """The lines about losses."""
    sizes = n["sizes"]
    heads = []
    cells = {"learning rates": [], "validation loss": [], "seeds that failed": []}
    for size, of in sizes.items():
        base, idea = of["parameters"]
        heads.append(f"{base / 1e6:.2f}M ({size}), idea {idea / base - 1:+.1%}")
        base, idea = (2 ** (k / 2) for k in of["rates"])
        at_edge = " at the edge" if of["edge"] else ""
        cells["learning rates"].append(f"{idea:.2f}x ({n['base']} {base:.2f}x){at_edge}")
        base, idea = map(fmean, of["losses"])
        cells["validation loss"].append(f"{idea:.3f} ({n['base']} {base:.3f})")
        base, idea = of["failed"]
        cells["seeds that failed"].append(f"{idea} ({n['base']} {base})")
    lines = [row("", heads), *(row(head, of) for head, of in cells.items())]

    def lines_about(part: str, title: str, level: float = n["level"]) -> None:
        found = [Interval(*of[part]) if part in of else None for of in sizes.values()]
        if any(found):
            lines.append(row(title, [x.text(level) if x else "" for x in found]))
        if part in ("steps", "time") and all(found) and level == n["level"]:
            lines.append(row("  could have shown", [f"{x.shown(level):.3f}" for x in found]))

    of_time = f"equal time, {n['base']}{'' if n['fast'] else ' as written'}"
    for part, title in (("steps", f"equal steps, {n['seeds']} seeds"), ("time", of_time)):
        lines_about(part, title)
        if "level" in n["verdict"]:
            lines_about(part, f"  interval of {100 * n['near']:g}%", n["near"])
    if "a hint" in n["verdict"]:
        mean = overall(n).text(n["hint"])
        level = f"an interval of {100 * n['hint']:g}%"
        lines.append(row("mean over the sizes, equal steps", [f"{mean}, {level}"]))
    if len(sizes) > 2:
        parameters = [of["parameters"][0] for of in sizes.values()]
        change = slope(parameters, [Interval(*of["steps"]) for of in sizes.values()])
        lines.append(row("  for each doubling of parameters", [change.text(n["level"])]))
    fits = [f"{of['fit']} of {n['steps']}" for of in sizes.values() if "time" in of]
    lines += [row("  steps in this time", fits)] if fits else []
    lines_about("other_time", f"  fast {n['base']}, estimate")
    lines_about("equal_flops", "equal FLOPs, estimate")
    for title, x in n.get("columns", {}).items():
        lines.append(row(title, [f"{column_of(x, n['level'])}, few seeds ({x['of']})"]))
    return lines


def column_of(x: dict, level: float) -> str:
    """A difference on a second text, or in a second recipe."""
    if "why" in x:
        return f"not measured: {x['why']}"
    return Interval(*x["difference"]).text(level)


def told(x: dict, text: str, *names: str) -> str:
    """A text with numbers of a measurement, or why it was not measured."""
    if not all(name in x for name in names):
        return f"not measured: {x['why']}"
    return text.format(**x) + (f"; {x['why']}" if "why" in x else "")


def costs_of(n: dict) -> list[str]:
    """The lines about speed, memory, skills and longer texts."""
    ratios = ", ".join(f"{of['ratio'][0]:.2f}" for of in n["sizes"].values())
    flops = told(n["flops"], "{ratio:.2f}x", "ratio")
    decoding = told(n["decoding"], "{ratio:.2f}x for a token, cache {cache:.2f}x", "ratio")
    lines = [
        f"step       {ratios} times fast {n['base']}'s; FLOPs {flops}",
        f"layer      of 2048 tokens: {layer_of(n)}",
        f"decoding   {decoding}",
    ]
    if "trained" in n:
        of = n["trained"]
        lines.append(f"bfloat16   error {told(of, '{bfloat16:.1f}x', 'bfloat16')}")
        if "longer" in of:
            base, idea = (", ".join(f"{x:+.2f}" for x in side) for side in of["longer"])
            lines.append(
                "longer     loss at 4x the context minus loss at 1x: "
                f"{idea or '-'} ({n['base']} {base or '-'})"
            )
    if "skills" in n:
        for task, size in SKILLS.items():
            text = f"not measured: {n['skills'].get('why')}"
            if task in n["skills"]:
                base, idea = (f"{seeds_of(x[size])}" for x in n["skills"][task])
                text = f"{idea} ({n['base']} {base})"
            lines.append(f"{task:<10} right answers {AFTER[task].format(size)}: {text}")
    return lines


def layer_of(n: dict) -> str:
    """What the layer costs."""
    layer = n["layer"] | {"mib": n["layer"].get("bytes", 0) / 2**20}
    return told(layer, "{ratio:.2f}x, {mib:,.0f} MiB", "ratio")


def seeds_of(x: list[float]) -> str:
    """Numbers of seeds."""
    return " ".join(f"{one:.2f}" for one in x)


def name_of_file(text: str) -> str:
    """A name for a file, of a text of any letters."""
    return re.sub(r"[^\w.]+", "-", text).strip("-")[:40]


def write(numbers: dict) -> None:
    """Print the report, and write it, its picture, the numbers and the code into its folder."""
    settings = str([numbers[x] for x in SETTINGS] + [*numbers["sizes"]])
    folder = f"{FOLDER}{name_of_file(numbers['idea'])}-{of_text(settings)[:6]}"
    os.makedirs(folder, exist_ok=True)
    numbers = json.loads(json.dumps(short(numbers)))
    text = "\n".join(lines_of(numbers))
    print(f"\n{text}\n")
    picture = ""
    if "layer" in numbers:
        draw_losses(numbers, f"{folder}/losses.png")
        picture = "\n![losses](losses.png)\n"
    numbers["origin"].pop("command", None)  # it has the path of a file of this machine
    for name, source in numbers["origin"].pop("sources").items():
        with open(f"{folder}/{name_of_file(name)}.py.txt", "w", encoding="utf-8") as f:
            f.write(source)
    with open(f"{folder}/runs.json", "w", encoding="utf-8") as f:
        json.dump(numbers, f)
    with open(f"{folder}/report.md", "w", encoding="utf-8") as f:
        f.write(
            f"```sh\n{numbers['command']}\n```\n\n```\n{text}\n```\n\n"
            f"How to read it: docs/verdict.md\n{picture}"
        )
    print(f"wrote {folder}/")


def draw_losses(n: dict, path: str) -> None:
    """For each size the losses at the rates that were tried, and the differences of the seeds."""
    # matplotlib takes what follows a $ for a formula
    names = [n[side].replace("$", r"\$") for side in ("base", "idea")]
    with drawing(path, len(n["sizes"]), 2, 11, 4 * len(n["sizes"])) as axes:
        for i, (size, of) in enumerate(n["sizes"].items()):
            left, right = axes[2 * i : 2 * i + 2]
            octaves = set()
            for side, name in enumerate(names):
                color = ("black", "C0")[side]
                tried = [(k / 2, loss) for k, loss in of["tried"][side]]
                octaves |= {octave for octave, _ in tried}
                left.plot(*zip(*tried, strict=True), "o", color=color, fillstyle="none")
                losses = of["losses"][side]
                chosen = [of["rates"][side] / 2] * len(losses)
                left.plot(chosen, losses, ".", color=color, label=name)
            left.set_xticks(list(octaves), [f"{2**octave:g}x" for octave in octaves])
            left.set(xlabel="times the recipe's learning rates", ylabel="validation loss")
            left.set_title(f"{size}: circles are for choosing, dots are compared")

            changes = [y - x for x, y in zip(*of["losses"], strict=True)]
            right.plot(range(1, len(changes) + 1), changes, "o", color="C0", label="a pair")
            x = Interval(*of["steps"])
            half = x.half(n["level"])
            label = f"the mean, and its {100 * n['level']:g}% interval"
            right.axhline(x.mean, color="C0", linewidth=0.8)
            right.axhspan(x.mean - half, x.mean + half, alpha=0.2, label=label)
            right.axhline(0, color="black", linewidth=0.8)
            right.set(
                xlabel="pair of seeds",
                ylabel=f"loss of {names[1]} minus loss of {names[0]}",
                title=size,
            )


def card(only: str = "") -> None:
    """Print a table of all verdicts but first looks, the lowest loss at equal steps first.

    only: names of ideas, separated by commas; then first looks as well, and no column that one of
    the rows leaves empty.
    """
    verdicts = {}
    for pattern in VERDICTS:
        for path in sorted(glob.glob(pattern)):
            with open(path, encoding="utf-8") as f:
                n = json.load(f)
            verdicts["--quick" in n["command"], title(n), n["base"]] = n
    verdicts = {key: n for key, n in verdicts.items() if "layer" in n}
    shown = whole = {key: n for key, n in verdicts.items() if not key[0]}
    if only:
        chosen = names(only, [n["idea"] for n in verdicts.values()])
        shown = {key: n for key, n in verdicts.items() if n["idea"] in chosen}
    ps = sorted(overall(n).p for n in (whole | shown).values())
    done = sorted(shown.values(), key=lambda n: overall(n).mean)
    columns = (
        "attention | against | verdict | equal steps | equal time | mean at equal steps, p by Holm "
        "| text; recipe | step | layer at 2048 | pairs; products | 4x the context | cache"
    )
    rows = [cells_of(n, ps) for n in done]
    if only:
        table = zip(columns.split(" | "), *rows, strict=True)
        columns, *rows = zip(*filter(all, table), strict=True)
        columns = " | ".join(columns)
    else:
        itself = chance.itself()
        rows.append([*itself, *[""] * (columns.count(" | ") + 1 - len(itself))])
    show_table(columns, rows)
    print(f"\nSoftmax's own standard error, which all rows share: {chance.shared_error()} nats")


def overall(n: dict) -> Interval:
    """The mean difference at equal steps over the sizes."""
    return pooled([Interval(*of["steps"]) for of in n["sizes"].values()])


def title(n: dict) -> str:
    """The name of a verdict, with its flags and what differs from other verdicts' settings."""
    settings = [word for word in shlex.split(n["command"]) if re.match(TOLD, word)]
    return f"{n['idea']} `{' '.join([n['flags'], *settings])}`"


def cells_of(n: dict, ps: list[float]) -> list[str]:
    """A verdict's row of the card. ps: of all rows, the smallest first."""
    sizes = n["sizes"].values()
    level = n["level"]
    p = overall(n).p
    holm = max(min(1.0, x * (len(ps) - i)) for i, x in enumerate(ps) if x <= p)
    skills = []
    for task, size in SKILLS.items():
        if task in n.get("skills", {}):
            base, idea = (seeds_of(x[size]) for x in n["skills"][task])
            skills.append(f"{idea} ({base})")
    base, idea = n.get("trained", {}).get("longer", ([], []))
    return [
        title(n),
        n["base"],
        n["verdict"],
        "; ".join(Interval(*of["steps"]).text(level) for of in sizes),
        "; ".join(Interval(*of["time"]).text(level) for of in sizes if "time" in of),
        f"{overall(n).text(level)}, p {holm:.2g}" if "--quick" not in n["command"] else "",
        "; ".join(column_of(x, level) for x in n.get("columns", {}).values()),
        "; ".join(f"{of['ratio'][0]:.2f}x" for of in sizes),
        layer_of(n),
        "; ".join(skills),
        f"{seeds_of(idea)} ({seeds_of(base)})" if idea else "",
        told(n["decoding"], "{cache:.2f}x", "cache"),
    ]
