"""data/text/prepare.py --source=owner/name with a hub (hub.py) that works, that fails, and that cannot be reached."""

import gzip
import io
import json

import hub
import pytest
from harness import Workers

from text.dataset import read_meta

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("datasets")
pytestmark = pytest.mark.slow  # it imports `datasets` in a process of its own

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
AT_ONCE = """import time
wait, time.sleep = time.sleep, lambda seconds: None
def after():
    time.sleep = wait
"""
NO_NETWORK = """import socket, time, huggingface_hub
wait, time.sleep = time.sleep, lambda seconds: None
connect = socket.create_connection
def unreachable(*args, **kwargs):
    raise OSError(101, "Network is unreachable")
socket.create_connection = unreachable
huggingface_hub.close_session()
def after():
    time.sleep, socket.create_connection = wait, connect
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
    other = {"data/train.parquet": parquet(texts("other", 20))}
    return {"owner/books": books, "owner/lines": lines | {"README.md": README}, "owner/other": other}


@pytest.fixture(scope="module")
def server(repositories):
    with hub.serve(repositories) as server:
        yield server


@pytest.fixture(scope="module")
def worker(server, tmp_path_factory):
    home = str(tmp_path_factory.mktemp("hf"))
    cache = {"HF_HOME": home, "HF_DATASETS_CACHE": f"{home}/datasets"}
    pool = Workers(HF_ENDPOINT=server.url, HF_HUB_DISABLE_TELEMETRY="1", **cache)
    yield pool
    for process in pool.processes:
        process.kill()


@pytest.fixture
def prepare(worker, tmp_path):
    """prepare("owner/name", "--flag=1") -> (exit code, stdout, stderr). Another process runs it, since HF_ENDPOINT is
    read when huggingface_hub is imported; it does not wait between the many times that it asks a hub that fails."""

    def prepare(source: str, *args: str, before: str = AT_ONCE) -> tuple[int, str, str]:
        flags = (f"--source={source}", "--tokenizer=bytes", f"--out_dir={tmp_path / 'out'}", *args)
        (code,), out, err = worker.run(1, "data/text/prepare.py", *flags, before=before)
        return code, out, err

    return prepare


def said(result: tuple[int, str, str]) -> str:
    """The sentence on stderr that prepare.py ended with."""
    code, _, err = result
    *before, line = err.splitlines()
    assert code == 2 and line.startswith("prepare.py: ") and "Traceback" not in err, err
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


def test_json_lines_of_a_config(prepare, tmp_path):
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
        ("owner/nothing", ["cannot read owner/nothing", "owner/nothing' doesn't exist on the Hub", "local files"]),
        ("owner/books --column=texts", ["has no column 'texts', but title, text: give one as --column="]),
        ("owner/lines", ["Config name is missing", "['en', 'de']"]),
        ("owner/lines:fr", ["'fr' not found", "['en', 'de']"]),
    ],
)
def test_what_is_not_on_the_hub(prepare, source, says, tmp_path):
    line = said(prepare(*source.split()))
    assert all(part in line for part in says), line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("status, says", [(401, "gated repo"), (500, "500 Internal"), (hub.CUT, "RemoteProtocolError")])
def test_a_hub_that_breaks_off(prepare, server, status, says, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "fault", lambda path: status if path == "data/train.parquet" else None)
    line = said(prepare("owner/other"))
    assert says in line and "local files" in line and not (tmp_path / "out").exists()
    if status == hub.CUT:
        monkeypatch.undo()
        assert prepare("owner/other")[0] == 0


def test_no_network(prepare, tmp_path):
    line = said(prepare("owner/unknown", before=NO_NETWORK))
    assert "Couldn't reach 'owner/unknown' on the Hub" in line and "local files" in line
    assert not (tmp_path / "out").exists()
