"""data/text/prepare.py --source=owner/name with a hub (hub.py) that works, that fails, and without one."""

import gzip
import io
import json
import os
import subprocess
import sys
import time

import hub
import pytest
from harness import ROOT, Workers

from text.dataset import read_meta

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("datasets")
pytestmark = pytest.mark.slow  # it imports `datasets` in a process of its own

TRAIN = "data/train-00001-of-00002.parquet"
README = b"""---
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/train.*.json.gz"}
  - {split: validation, path: en/validation.json.gz}
- config_name: de
  data_files: "de/*.json.gz"
---
# Lines
"""


def texts(name: str, n: int) -> list[str]:
    return [f"{name} {i}:\r\n" + f"Ünïcödé\n{i} " * 50 * (i + 1) for i in range(n)]


def parquet(rows: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"title": [row[:9] for row in rows], "text": rows}), file, row_group_size=2)
    return file.getvalue()


def json_gz(rows: list[str]) -> bytes:
    return gzip.compress("".join(json.dumps({"url": "-", "text": row}) + "\n" for row in rows).encode())


@pytest.fixture(scope="module")
def repositories():
    sizes = {"train-00000-of-00002": 5, "train-00001-of-00002": 3}
    sizes |= {"validation-00000-of-00001": 2, "test-00000-of-00001": 1}
    books = {f"data/{name}.parquet": parquet(texts(name, n)) for name, n in sizes.items()}
    names = ("en/train.0", "en/train.1", "en/validation", "de/all")
    lines = {f"{name}.json.gz": json_gz(texts(name, 4)) for name in names}
    return {"owner/books": books, "owner/lines": lines | {"README.md": README}}


AT_ONCE = """import time
wait, time.sleep = time.sleep, lambda seconds: None
def after():
    time.sleep = wait
"""


@pytest.fixture(scope="module")
def server(repositories):
    with hub.serve(repositories) as server:
        yield server


@pytest.fixture(scope="module")
def worker(server, tmp_path_factory):
    home = str(tmp_path_factory.mktemp("hf"))
    pool = Workers(HF_ENDPOINT=server.url, HF_HOME=home, HF_HUB_DISABLE_TELEMETRY="1")
    yield pool
    for process in pool.processes:
        process.kill()


@pytest.fixture
def prepare(worker, tmp_path):
    """prepare("owner/name", "--flag=1") -> (exit code, stdout, stderr). Another process runs it, since HF_ENDPOINT is
    read when huggingface_hub is imported."""

    def prepare(source: str, *args: str, patient: bool = True) -> tuple[int, str, str]:
        flags = (f"--source={source}", "--tokenizer=bytes", f"--out_dir={tmp_path / 'out'}", *args)
        before = "" if patient else AT_ONCE  # huggingface_hub waits for 23 s between its tries
        (code,), out, err = worker.run(1, "data/text/prepare.py", *flags, before=before)
        return code, out, err

    return prepare


def said(result: tuple[int, str, str]) -> str:
    """The sentence on stderr that prepare.py ended with."""
    code, _, err = result
    *before, line = err.splitlines()
    assert code == 2 and line.startswith("prepare.py: ") and "Traceback" not in err
    assert not any("prepare.py" in line for line in before)
    return line


def test_parquet_files_are_as_local_ones(prepare, run, repositories, tmp_path):
    code, _, err = prepare("owner/books")
    assert code == 0, err
    for path, data in repositories["owner/books"].items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    local = tmp_path / "local"
    flags = (f"--source={tmp_path / 'data'}", "--tokenizer=bytes", f"--out_dir={local}")
    assert run("data/text/prepare.py", *flags)[0] == 0
    for name in ("train.bin", "val.bin", "test.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (local / name).read_bytes() != b""
    assert read_meta(str(tmp_path / "out"))["files"] == read_meta(str(local))["files"]


def test_json_lines_of_a_config_go_through_datasets(prepare, tmp_path):
    code, _, err = prepare("owner/lines:en")
    assert code == 0, err
    code, out, _ = prepare("owner/lines:en")
    assert code == 0 and "nothing to do" in out
    for name, files in {"train.bin": ("en/train.0", "en/train.1"), "val.bin": ("en/validation",)}.items():
        rows = [row.replace("\r\n", "\n") for file in files for row in texts(file, 4)]
        assert (tmp_path / "out" / name).read_bytes() == b"".join(row.encode() + b"\xff" for row in rows)


@pytest.mark.parametrize(
    "source, says",
    [
        ("owner/nothing", ["has no data set owner/nothing", "a local folder"]),
        ("owner/books --column=texts", ["has no column 'texts', but title, text: give one as --column="]),
        ("owner/lines", ["Config name is missing", "['en', 'de']"]),
        ("owner/lines:fr", ["'fr' not found", "['en', 'de']"]),
    ],
)
def test_what_is_not_on_the_hub(prepare, source, says, tmp_path):
    line = said(prepare(*source.split()))
    assert all(part in line for part in says) and not (tmp_path / "out").exists()


def test_no_hub_at_all(tmp_path):
    began = time.monotonic()
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, os.path.join(ROOT, "data", "text", "prepare.py"), "--source=owner/books"]
    done = subprocess.run([*command, f"--out_dir={tmp_path / 'out'}"], env=env, capture_output=True, text=True)
    line = said((done.returncode, done.stdout, done.stderr))
    assert "Connection refused" in line and "a local folder" in line and not (tmp_path / "out").exists()
    assert time.monotonic() - began < 20  # and not the time of many tries


@pytest.mark.parametrize(
    "when, status, says",
    [
        ("opening", 401, "gated repo"),
        ("opening", 500, "500 Internal"),
        ("tokenising", 500, "500 Internal"),
        ("tokenising", hub.CUT, "RemoteProtocolError"),
    ],
)
def test_a_hub_that_breaks_off(prepare, server, when, status, says, tmp_path, monkeypatch):
    asked = []

    def fault(path):
        asked.append(path)
        return status if path == TRAIN and asked.count(TRAIN) > (when == "tokenising") else None

    monkeypatch.setattr(server, "fault", fault)
    line = said(prepare("owner/books", patient=False))
    assert says in line and TRAIN in line and ("the same command goes on" in line) == (when == "tokenising")
    assert not (tmp_path / "out" / "meta.json").exists()
    monkeypatch.undo()
    assert prepare("owner/books")[0] == 0
