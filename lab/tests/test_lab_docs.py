"""The lab's pages: links lead somewhere, commands have flags that exist. And each script explains its flags."""

import glob
import os
import re

import pytest
from harness import ROOT
from test_configurator import SCRIPTS, help_of
from test_docs import check_commands, check_links, commands, read

from lab.experiments import attention_probabilities
from lab.experiments.results import saved

PAGES = ["lab/README.md", "lab/RESULTS.md", *sorted(glob.glob("lab/*/README.md", root_dir=ROOT))]
FILES = sorted(glob.glob("lab/*.py", root_dir=ROOT) + glob.glob("lab/[ehl]*/*.py", root_dir=ROOT))
SETS_FLAGS = re.compile(r"(?m)^ *(config, .*= configure\(|(results\.)?start\(globals)")
DRAW = {path[:-3].replace("/", ".") for path in FILES if "\npicture = " in read(path)}
LAB_SCRIPTS = [path[:-3].replace("/", ".") for path in FILES if SETS_FLAGS.search(read(path))]
LAB_SCRIPTS = [name.removesuffix(".__main__") for name in LAB_SCRIPTS]


@pytest.mark.parametrize("path", PAGES)
def test_links(path):
    check_links(path)


def test_commands(run):
    pages = {path: [x for x in commands(read(path)) if "--variant" not in x] for path in PAGES}  # of variants.py
    check_commands(run, pages, [*SCRIPTS, *LAB_SCRIPTS])


@pytest.mark.parametrize("script", LAB_SCRIPTS)
def test_help(run, script):
    """It says the command, and explains every flag."""
    flags = [flag for group in help_of(run, script).values() for flag in group]
    assert flags and all(re.split(r"\s{2,}", flag, maxsplit=1)[1].strip() for flag in flags)


TABLES = "cores laser choices 64 256 speedrun speedrun_more warmup laser_settled differential bert narang qkv maps"
TABLES += " aspect long_short novels_1024 vit conformer before_attention ideas ideas_conv ideas_256"
SHOWN = [f"compare --table={name} --what=show" for name in TABLES.split()]
SHOWN += [f"{name} --what=show" for name in ("beta_post", "endless", "laser", "lecture", "long_short")]
SHOWN += ["jacobians", "recall", "local_dependencies --what=sweep,show"]
SHOWN += ["local_dependencies --what=full,show --steps=20000"]


@pytest.mark.parametrize("command", SHOWN)
def test_results_are_what_the_experiments_have(command, run, tmp_path):
    """Each row of a table that an experiment prints of its JSON file stands on the page."""
    # docs/choices.md has two more columns: where a choice is made, and its paper
    choices = re.sub(r"(?m)(\|[^|\n]*){2}\|$", "|", read("docs/choices.md"))
    page, (script, *flags) = read("lab/RESULTS.md") + choices, command.split()
    if f"lab.experiments.{script}" in DRAW:
        flags.append(f"--picture={tmp_path / 'x.png'}")
    code, out, err = run(f"lab.experiments.{script}", *flags)
    printed = [line for line in out.splitlines() if line.startswith("|")]
    assert code == 0 and printed, err
    assert not [line for line in printed if line not in page]


def test_probabilities_are_what_the_models_had(capsys):
    attention_probabilities.show(saved("lab/experiments/attention_probabilities.json", {})["models"])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) == 4 and not [line for line in printed if line not in read("lab/RESULTS.md")]


def test_the_table_names_every_experiment():
    page = read("lab/README.md")
    shared = ("__init__", "results", "runs", "tables", "times")
    for path in glob.glob("experiments/*.py", root_dir=os.path.join(ROOT, "lab")):
        assert os.path.basename(path)[:-3] in shared or f"({path})" in page, path
