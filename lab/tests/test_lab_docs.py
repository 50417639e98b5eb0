"""The lab's pages: links lead somewhere, commands have flags that exist, tables are the results.

And each script explains its flags.
"""

import glob
import re
import shlex
import statistics
import subprocess
import sys

import pytest
import test_configurator
from harness import ROOT, done, parametrize
from test_docs import PYTHON_BLOCK, check_commands, check_links, commands, read

from lab.experiments import attention_probabilities, results, tables
from lab.experiments.results import saved
from lab.verdict import report

PAGES = sorted(glob.glob("lab/**/*.md", root_dir=ROOT, recursive=True))
FILES = sorted(glob.glob("lab/[ehl]*/*.py", root_dir=ROOT))
SCRIPTS = [
    path.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    for path in FILES
    if re.search(r"= configure\(globals|run_script\(globals", read(path))
]


@parametrize("path", PAGES)
def test_links(path):
    check_links(path)


def test_the_zoo_has_the_code_as_it_stands():
    code = "".join(read(path) for path in glob.glob("lab/ideas/*.py"))
    for block in PYTHON_BLOCK.findall(read("docs/zoo.md")):
        for part in block.split("\n\n\n"):
            assert part.strip() in code


def test_commands(run):
    pages = {}
    for path in PAGES:
        lines = commands(read(path))
        pages[path] = [line for line in lines if "--variant" not in line]  # of variants.py
    check_commands(run, pages, [*test_configurator.SCRIPTS, *SCRIPTS])


@parametrize("script", SCRIPTS)
def test_help(run, script):
    test_configurator.test_help_explains_every_flag(run, script)


@pytest.fixture(autouse=True)
def _kept_results_are_printed(monkeypatch):
    """Not measured anew, whatever code they are of."""
    monkeypatch.setattr(results, "is_current", lambda stored, of: stored is not None)


TABLES = (
    "laser choices 64 256 speedrun speedrun_more warmup laser_settled laser_fresh "
    "differential differential_3e-3 narang maps aspect long_short novels_1024 hybrids ideas "
    "ideas_conv ideas_256 equal_256 equal_novels nanogpt in_nanogpts_time"
)
SHOWN = [
    *[f"compare --table={name} --what=show" for name in TABLES.split()],
    "beta_post --what=show",
    "endless --what=show",
    "laser --what=show",
    "long_short --what=show",
    "jacobians",
    "laser_precision",
    "length --what=show",
    "speeds",
    "local_dependencies --what=sweep,show",
    "local_dependencies --what=full,show --steps=20000",
]

# they have such tables too
OTHERS = [f"docs/{name}.md" for name in "benchmarks card choices mathematics speedrun zoo".split()]


def missing(out):
    """The rows of the tables in out that no page has. out must have a table.

    Errors of float64, such as 8e-16, differ from CPU to CPU.
    """
    pages = "".join(read(path) for path in [*PAGES, *OTHERS])
    out, pages = (re.sub(r"\b\de-1\d\b", "tiny", text) for text in (out, pages))
    rows = [line for line in out.splitlines() if line.startswith(("|", "80% power"))]
    assert rows
    return [row for row in rows if row not in pages]


@parametrize("command", SHOWN)
def test_results_are_what_the_experiments_have(command, run, tmp_path):
    """Each row of a table that an experiment prints of its JSON file stands on a page."""
    script, *flags = command.split()
    if "\npicture = " in read(f"lab/experiments/{script}.py"):
        flags.append(f"--picture={tmp_path / 'x.png'}")
    assert not missing(done(run(f"lab.experiments.{script}", *flags)))


# the pages' own commands that print kept results, with an import or with long flags
PRINTING = r"(?m)^(?:OMP_NUM_THREADS=1 )?python -m (lab\.experiments\.(?:recall|compare.*=show).*)$"


AS_KEPT = """
import runpy, sys
from lab.experiments import results
results.is_current = lambda stored, of: stored is not None
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@parametrize("command", sorted({x for path in PAGES for x in re.findall(PRINTING, read(path))}))
def test_results_are_what_a_page_says_that_prints_them(command, tmp_path):
    """In a new process: in this one an import that another test has made would add nothing."""
    script, *argv = shlex.split(command, comments=True)
    if "recall" in command:
        argv.append(f"--picture={tmp_path / 'x.png'}")
    argv = [sys.executable, "-c", AS_KEPT, script, *argv]
    out = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert not missing(out.stdout)


def test_probabilities_are_what_the_models_had(capsys):
    models = saved("lab/experiments/attention_probabilities.json", {})["models"]
    attention_probabilities.show(models)
    assert not missing(capsys.readouterr().out)


def test_the_card_is_what_the_verdicts_are(monkeypatch, capsys):
    """And so are the rows of the zoo. The report on README is one of them."""
    monkeypatch.setattr(report, "VERDICTS", ["lab/verdict/results/*.json"])
    for only in ("", *re.findall(r"=card --only=(\S+)", read("docs/zoo.md"))):
        report.card(only)
    assert not missing(capsys.readouterr().out)
    block = read("README.md").split("```\n\n```\n")[1].split("```")[0]
    verdict = saved("lab/verdict/results/forgetting.json", {})
    assert {*block.splitlines()} <= {*report.lines_of(verdict)}


def test_the_records_are_what_ten_runs_had():
    page = read("docs/speedrun.md")
    runs = saved("lab/experiments/compare.json", {})["runs"]
    for row in tables.RECORDS:
        losses = [runs[f"records, {row}, seed {seed}"]["val"] for seed in range(1, 11)]
        mean = statistics.mean(losses)
        bound = mean + 2.82 * statistics.stdev(losses) / len(losses) ** 0.5
        cell = f"{mean:.3f} ({min(losses):.3f} to {max(losses):.3f}) < {bound:.3f}"
        assert cell in page and bound < 1.88
