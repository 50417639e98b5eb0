"""The texts: README.md is short, links lead somewhere, commands have flags, printed code runs."""

import functools
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

from harness import QUICK, ROOT, SMALL, Workers, done, parametrize, slow
from test_configurator import SCRIPTS

from model import ATTENTION
from parts import NORM, POSITION

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(glob.glob("docs/*.md", root_dir=ROOT))]
LINK = re.compile(r"""\[([^\]]*)\]\(<?([^)>\s]+)>?(?:\s+["'][^)]*)?\)""")  # [words](target "title")
# [words]: target, and HTML; not [^footnote]: words
OTHER_LINK = re.compile(r"(?m)^ *\[[^^\]][^\]]*\]:|<[^>]*\b(?:src|href) *=")
# a picture for dark pages, and the one for all others
PICTURE = re.compile(r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">'
                     r'<img alt="[^"]+" src="([^"]+)"></picture>')  # fmt: skip
# flags of torchrun, pytest, ruff, lm_eval, tensorboard and uv, and words for a flag
OTHERS = (
    "--model --model_args --include_path --logdir --standalone --nproc_per_node --nnodes "
    "--max-restarts --rdzv_backend --rdzv_id --rdzv_endpoint --flag --key --check --extra"
).split()


@functools.cache
def read(path: str) -> str:
    with open(os.path.join(ROOT, path), encoding="utf-8") as f:
        return f.read()


def without_code(page: str) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", page)


def exists(path: str) -> bool:
    return os.path.exists(os.path.join(ROOT, path))


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", without_code(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short():
    page = read("README.md")
    assert len(page.splitlines()) <= 200
    assert len(page.encode()) <= 13 * 1024


def test_the_readme_begins_with_code_of_the_model():
    code = PYTHON_BLOCK.findall(read("README.md"))[0]
    for function in code.split("\n\n\n"):
        assert function.strip() in read("model.py")


@parametrize("path", PAGES)
def test_links(path):
    check_links(path)


def check_links(path: str) -> None:
    """Files and headings exist, [file, `name`](file) names something in it, no link has a line."""
    page = PICTURE.sub(r"[dark](\1) [light](\2)", without_code(read(path)))
    assert not OTHER_LINK.search(page), f"{path}: write links as [words](target)"
    for words, target in LINK.findall(page):
        assert not re.search(r"#L\d", target), f"{path}: {target} has a line number"
        # The last is GitHub's page of the tests.
        if not target.startswith(("http:", "https:", "../../actions/")):
            check_link(path, words, target)
    if path.startswith("docs/"):
        assert "(../README.md" in page


def check_link(path: str, words: str, target: str) -> None:
    where = f"{path}: [{words}]({target})"
    file, _, anchor = target.partition("#")
    if file:
        path = os.path.normpath(os.path.join(os.path.dirname(path), file))
    assert exists(path), f"{where} leads nowhere"
    if anchor:
        assert path.endswith(".md"), f"{where} is no page"
        assert anchor in anchors(read(path)), f"{where} is no heading"
    name = re.search(r", `(?:\w+\.)*(\w+)`$", words)
    if name:
        definition = rf"(?m)^\s*(?:class |def |){name[1]}\b[^\n]"
        assert re.search(definition, read(path)), f"{where} names nothing"


def commands(page: str) -> list[str]:
    """The command lines of a page's code blocks, and of the code in its sentences."""
    languages = set(re.findall(r"(?m)^```(.+)$", page))
    assert languages <= {"sh", "python", "diff"}, "a block of commands begins with ```sh"
    lines = []
    for block in re.findall(r"(?ms)^```sh\n(.*?)^```$", page):
        lines += block.replace("\\\n", " ").splitlines()
    for code in re.findall(r"(?s)`([^`]+)`", without_code(page)):
        lines.append(code.replace("\n", " "))
    parts = [part for line in lines for part in re.split(r"&&|;", line)]
    return [part for part in parts if ".py" in part or "--" in part]


def notebook_cells() -> list[dict]:
    cells = json.loads(read("notebooks/attention.ipynb"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_commands(run):
    pages = {path: commands(read(path)) for path in PAGES}
    source = "\n".join("".join(cell["source"]) for cell in notebook_cells())
    texts = dict(re.findall(r'(?m)^(\w+) = f?"([^"]*)"$', source))  # QUICK = "--max_iters=600 ..."
    pages["notebook"] = []
    for line in re.findall(r'python\(f?"([^"]+)"\)', source):
        for name, text in texts.items():
            line = line.replace(f"{{{name}}}", text)
        pages["notebook"].append(f"python {line}")
    check_commands(run, pages, SCRIPTS)


def script_of(words: list[str]) -> str | None:
    """The script or the module (python -m) that a command runs."""
    for i, word in enumerate(words):
        runs = {"python", "torchrun"} & set(words[:i]) or (i == 0 and len(words) > 1)
        is_module = words[i - 1] == "-m" and re.fullmatch(r"\w+(\.\w+)+", word)
        if runs and (is_module or re.fullmatch(r"[\w/]+\.py", word)):
            return word
    return None


def is_there(script: str) -> bool:
    if script.endswith(".py"):
        return exists(script)
    path = script.replace(".", "/")
    return exists(f"{path}.py") or exists(f"{path}/__main__.py")


def check_commands(run, pages: dict[str, list[str]], scripts: list[str]) -> None:
    """Every script, config file and flag in the pages exists.

    A flag without a script must be a flag of one of the scripts.
    """

    @functools.cache
    def flags_of(script):
        out = done(run(str(script), "--help"))
        return {"--help", "--import", *re.findall(r"(?m)^ +(--\w+)", out)}

    def check(path, line):
        where = f"{path}: {line}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # the line is no command
            return
        script = script_of(words)
        assert script is None or is_there(script), where
        for i, word in enumerate(words):
            flag = re.match(r"--(?:no-)?([\w-]+)", word)
            if flag:
                known = flags_of(script) if script in words[:i] else flags_of_all
                assert f"--{flag[1]}" in known, where
            if re.fullmatch(r"config/\w+\.py", word):
                assert exists(word), where

    flags_of_all = {*OTHERS}
    for script in scripts:
        flags_of_all |= flags_of(script)
    for path, lines in pages.items():
        for line in lines:
            check(path, line)


def test_packages_are_the_same_in_all_lists():
    """For pip in two files, for uv in pyproject.toml. `dev` has those of all other extras."""
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    for file, of_uv in (("", project["dependencies"]), ("-dev", extras["dev"])):
        lines = re.findall(r"(?m)^\w\S*", read(f"requirements{file}.txt"))
        assert lines == of_uv
    assert {*sum(extras.values(), [])} == {*extras["dev"]}


def test_the_notebook_is_stored_as_it_ran():
    """It ran once, from top to bottom. It has pictures, no error, and no path of a machine."""
    cells = notebook_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "softmax1 attention" in printed
    assert not re.search(r"/(home|root|tmp|Users|work)/", printed)


PYTHON_BLOCK = re.compile(r"(?ms)^```python\n(.*?)^```$")


@slow
def test_add_your_own(data, tmp_path):
    """README's own attention, put where README says, trains, decodes, is timed and tested."""
    section = read("README.md").split("## Add your own")[1].split("\n## ")[0]
    (block,) = PYTHON_BLOCK.findall(section)
    assert len([line for line in block.splitlines() if line]) <= 10
    folder = tmp_path / "nanoattn"
    left_out = ".* lab out* venv wandb *.bin *.png __pycache__".split()
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_out))
    model = read("model.py")
    end = model.index("\n}\n", model.index("\nATTENTION: ")) + 3  # below the table ATTENTION
    (folder / "model.py").write_text(f"{model[:end]}\n\n{block}{model[end:]}", encoding="utf-8")

    worker = Workers(str(folder))

    def output(command, *says):
        (code,), out, err = worker.run(1, *shlex.split(command))
        return done((code, out, err), *says)

    output(
        "train.py config/train_shakespeare_char_cpu.py --attention=sigmoid --out_dir=out "
        f"--dataset={data} --n_layer=2 --block_size=32 --batch_size=4 --heads=SSSL --window=8 "
        "--device=cpu --max_iters=4 --eval_interval=4 --eval_iters=2 --sample_tokens=0",
        "sigmoid attention",
        "step 4: train loss",
    )
    sample = "sample.py --out_dir=out --num_samples=1 --max_new_tokens=40 --start='the '"
    output(sample, "-----")
    out = output("bench.py --only=sdpa,softmax,sigmoid --lengths=300 --repeats=1 --device=cpu")
    assert re.search(r"(?m)^sigmoid .*e-\d\d$", out)
    worker.stop()
    assert "\npytest -k sigmoid " in section
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-k", "sigmoid"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, tests.stdout
    assert int(re.search(r"(\d+) passed", tests.stdout)[1]) > 100


@parametrize("name", ["forgetting", "gated_delta"])
def test_ideas_that_are_no_function_of_scores(name, run, train, tmp_path, monkeypatch):
    """Each file of docs/attention.md trains as printed, and a cache changes no text."""
    blocks = PYTHON_BLOCK.findall(read("docs/attention.md"))
    block = next(block for block in blocks if name in block)
    module = f"my_{name}"
    (tmp_path / f"{module}.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ATTENTION, name, None)
    flags = [f"--import={module} --attention={name}"]
    if name == "gated_delta":
        flags.append("--short_attention=gated_delta --attention=softmax --heads=S/L")
    for more in flags:
        done(train(f"--import={module}", more, "--max_iters=3"), "sees no later tokens")
        sample = [f"--out_dir={tmp_path / 'out'}", f"--import={module}", "--num_samples=1"]
        sample += ["--start=the", "--max_new_tokens=40"]
        cached = done(run("sample.py", *sample))
        assert cached == done(run("sample.py", *sample, "--no-use_cache"))


def with_edit(path: str, diff: str) -> str:
    """The text of a file with an edit that a page prints."""
    text = read(path)
    for hunk in re.split(r"(?m)^@@.*\n", diff)[1:]:
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if not line.startswith("+"))
        assert text.count(old) == 1, old
        text = text.replace(old, "\n".join(line[1:] for line in lines if not line.startswith("-")))
    return text


@parametrize("n, flag", [(0, "--schedule=sqrt"), (1, ""), (2, "")])
def test_edits_of_train(n, flag, run, data, tmp_path):
    """Those of docs/training.md run as printed, and change the losses."""
    diff = re.findall(r"(?ms)^```diff\n(.*?)^```$", read("docs/training.md"))[n]
    script = tmp_path / "train.py"
    losses = []
    for text, flags in ((read("train.py"), []), (with_edit("train.py", diff), flag.split())):
        script.write_text(text, encoding="utf-8")
        out = tmp_path / f"out{len(losses)}"
        done(run(str(script), f"--dataset={data}", f"--out_dir={out}", *SMALL, *QUICK, *flags))
        rows = map(json.loads, (out / "log.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert len(losses[0]) == len(losses[1]) > 1 and losses[0] != losses[1]


def test_add_a_norm_and_a_position(run, train, tmp_path, monkeypatch):
    """Those of docs/choices.md train, and a cache changes no text."""
    (block,) = PYTHON_BLOCK.findall(read("docs/choices.md"))
    (tmp_path / "my_choices.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(NORM, "scalenorm", None)  # so that both leave their tables after the test
    monkeypatch.setitem(POSITION, "kerple", None)
    flags = "--import=my_choices --norm=scalenorm --position=kerple --heads=SL --window=3"
    done(train(flags, "--max_iters=5"), "position=kerple, norm=scalenorm")
    sample = "--import=my_choices --num_samples=1 --start=the --max_new_tokens=60".split()
    sample.append(f"--out_dir={tmp_path / 'out'}")
    cached = run("sample.py", *sample)[1]
    assert "-----" in cached
    assert cached == run("sample.py", *sample, "--no-use_cache")[1]
