"""The texts: README.md stays short, links lead somewhere, commands have flags that exist, the printed code runs."""

import functools
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from harness import ROOT, Workers
from test_configurator import SCRIPTS

from choices import NORM
from positions import POSITION

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(glob.glob("docs/*.md", root_dir=ROOT))]
NOTEBOOK = json.load(open(os.path.join(ROOT, "notebooks", "attention.ipynb"), encoding="utf-8"))
LINK = re.compile(r"""\[([^\]]*)\]\(<?([^)>\s]+)>?(?:\s+["'][^)]*)?\)""")  # [words](target "title")
OTHER_LINK = re.compile(r"(?m)^ *\[[^\]]+\]:|<[^>]*\b(?:src|href) *=")  # [words]: target, and HTML
OTHERS = {  # flags of torchrun, pytest, ruff, lm_eval and tensorboard, and words for a flag
    "--model", "--model_args", "--include_path", "--logdir",
    "--standalone", "--nproc_per_node", "--nnodes", "--max-restarts", "--rdzv_backend", "--rdzv_id", "--rdzv_endpoint",
    "--flag", "--key", "--check",
}  # fmt: skip


@functools.cache
def read(path: str) -> str:
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def without_code(page: str) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", page)


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    found = re.findall(r"(?m)^#+ (.+)$", without_code(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_readme_is_short():
    page = read("README.md")
    assert len(page.splitlines()) <= 250 and len(page.encode()) <= 16 * 1024


@pytest.mark.parametrize("path", PAGES)
def test_links(path):
    check_links(path)


def check_links(path: str) -> None:
    """Files and headings exist, [file, `name`](file) names something in it, and no link has a line number."""
    page = without_code(read(path))
    assert not OTHER_LINK.search(page), f"{path}: write links as [words](target), which this test understands"
    for words, target in LINK.findall(page):
        file, _, anchor = target.partition("#")
        assert not re.match(r"L\d", anchor), f"{path}: {target} has a line number"
        if file.startswith(("http:", "https:", "../../actions/")):  # the last: GitHub's page of the tests
            continue
        at = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
        assert os.path.exists(os.path.join(ROOT, at)), f"{path}: {target} leads nowhere"
        if anchor:
            assert at.endswith(".md") and anchor in anchors(read(at)), f"{path}: {target} is no heading"
        name = re.search(r", `([\w.]+)`$", words)
        if name:
            assert re.search(rf"(?m)^\s*(?:class |def |){name[1].split('.')[-1]}\b[^\n]", read(at)), f"{path}: {words}"
    if path.startswith("docs/"):
        assert "(../README.md" in read(path)


def commands(page: str) -> list[str]:
    """The command lines of a page's code blocks, and of the code in its sentences."""
    assert set(re.findall(r"(?m)^```(.+)$", page)) <= {"sh", "python"}, "a block of commands begins with ```sh"
    blocks = re.findall(r"(?ms)^```sh\n(.*?)^```$", page)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [code.replace("\n", " ") for code in re.findall(r"(?s)`([^`]+)`", without_code(page))]
    return [part for line in lines for part in re.split(r"&&|;", line) if ".py" in part or "--" in part]


def test_commands(run):
    pages = {path: commands(read(path)) for path in PAGES}
    cells = "\n".join("".join(cell["source"]) for cell in NOTEBOOK["cells"])
    texts = dict(re.findall(r'(?m)^(\w+) = f?"([^"]*)"$', cells))  # QUICK = "--max_iters=600 ..."
    calls = re.findall(r'python\(f?"([^"]+)"\)', cells)
    pages["notebook"] = ["python " + re.sub(r"{(\w+)}", lambda x: texts.get(x[1], x[0]), line) for line in calls]
    check_commands(run, pages, SCRIPTS)


def check_commands(run, pages: dict[str, list[str]], scripts: list[str]) -> None:
    """Every script, config file and flag in the pages exists. A flag without a script is one of the scripts'."""

    @functools.cache
    def flags_of(script: str) -> set[str]:
        if script.startswith("tests/"):  # argparse
            return set(re.findall(r"--\w+", read(script)))
        code, out, err = run(script, "--help")
        assert code == 0, err
        return {"--help", "--import", *re.findall(r"(?m)^ +(--\w+)", out)}

    loose = []  # (page, flag) without a script
    for path, line in ((path, line) for path, lines in pages.items() for line in lines):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # no command, but code
            continue
        script = None
        for i, word in enumerate(words):
            runs = {"python", "torchrun"} & set(words[:i]) or (i == 0 and len(words) > 1)
            if script is None and runs and re.fullmatch(r"[\w/]+\.py", word):
                script = word
                assert os.path.exists(os.path.join(ROOT, script)), f"{path}: {line}"
            elif script is None and runs and words[i - 1] == "-m" and re.fullmatch(r"\w+(\.\w+)+", word):
                script = word
                at = os.path.join(ROOT, *word.split("."))
                assert os.path.exists(f"{at}.py") or os.path.exists(f"{at}/__main__.py"), f"{path}: {line}"
            elif re.fullmatch(r"config/\w+\.py", word):
                assert os.path.exists(os.path.join(ROOT, word)), f"{path}: {line}"
            elif found := re.match(r"--(?:no-)?([\w-]+)", word):
                flag = "--" + found[1]
                if script is None:
                    loose.append((path, flag))
                else:
                    assert flag in flags_of(script), f"{path}: {script} has no {flag}: {line}"
    known = set().union(*(flags_of(script) for script in {*scripts, "tests/resources.py"}), OTHERS)
    wrong = [(path, flag) for path, flag in loose if flag not in known]
    assert not wrong


def test_the_notebook_is_stored_as_it_ran():
    """Its outputs are of one run from the top to the bottom, with pictures, without an error or a path of a machine."""
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    said = "".join("".join(output.get("text", "")) for output in outputs)
    assert "softmax1 attention" in said and not re.search(r"/(home|root|tmp|Users|work)/", said)


@pytest.mark.slow
def test_add_your_own(data, tmp_path):
    """README's own attention, put where README says: it trains, decodes, is drawn and timed, and has its tests."""
    section = read("README.md").split("## Add your own")[1].split("\n## ")[0]
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```$", section)
    assert len([line for line in block.splitlines() if line]) <= 10
    here, left_out = tmp_path / "nanoattn", (".*", "lab", "out*", "venv", "wandb", "*.bin", "*.png", "__pycache__")
    shutil.copytree(ROOT, here, ignore=shutil.ignore_patterns(*left_out))
    model = read("model.py")
    end = model.index("\n}\n", model.index("\nATTENTION: ")) + 3  # below the table ATTENTION
    (here / "model.py").write_text(f"{model[:end]}\n\n{block}{model[end:]}", encoding="utf-8")

    worker = Workers(str(here))

    def do(*command: str) -> str:
        (code,), out, err = worker.run(1, *command)
        assert code == 0, out + err
        return out

    small = ["--n_layer=2", "--block_size=32", "--batch_size=4", "--device=cpu", "--eval_iters=2", "--heads=SSSL"]
    flags = [*small, "--max_iters=4", "--eval_interval=4", "--sample_tokens=0", f"--dataset={data}", "--window=8"]
    out = do("train.py", "config/train_shakespeare_char_cpu.py", "--attention=sigmoid", *flags, "--out_dir=out")
    assert "sigmoid attention" in out and "step 4: train loss" in out
    assert "-----" in do("sample.py", "--out_dir=out", "--num_samples=1", "--max_new_tokens=40", "--start=the ")
    assert "wrote maps.png" in do("scripts/maps.py", "--out_dir=out", "--start=the lord")
    only = ["--what=attention", "--only=sdpa,softmax,sigmoid", "--lengths=300", "--repeats=1", "--device=cpu"]
    assert re.search(r"(?m)^sigmoid .*e-\d\d$", do("bench.py", *only))
    worker.processes[0].kill()
    assert "\npytest -k sigmoid " in section
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-k", "sigmoid"], cwd=here, capture_output=True, text=True
    )
    assert done.returncode == 0 and int(re.search(r"(\d+) passed", done.stdout)[1]) > 100, done.stdout


def test_add_a_norm_and_a_position(run, train, tmp_path, monkeypatch):
    """Those of docs/choices.md, as printed: they train, a cache changes no text, and beta refuses the position."""
    (block,) = re.findall(r"(?ms)^```python\n(.*?)^```$", read("docs/choices.md"))
    (tmp_path / "my_choices.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(NORM, "scalenorm", None)  # so that both leave their tables after the test
    monkeypatch.setitem(POSITION, "kerple", None)
    flags = (
        "--import=my_choices",
        "--norm=scalenorm",
        "--position=kerple",
        "--heads=SL",
        "--window=3",
        "--max_iters=5",
    )
    code, out, err = train(*flags)
    assert code == 0 and "position=kerple, norm=scalenorm" in out, err
    sample = ("sample.py", "--import=my_choices", f"--out_dir={tmp_path / 'out'}", "--num_samples=1", "--start=the")
    texts = {run(*sample, "--max_new_tokens=60", f"--use_cache={cached}")[1] for cached in (True, False)}
    assert len(texts) == 1 and "-----" in texts.pop()
    code, _, err = train(*flags, "--attention=beta")
    assert code == 2 and "position='kerple' adds a number to scores" in err
