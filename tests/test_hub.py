"""data/text/prepare.py --source=owner/name: a hub (hub.py) that works, fails, is out of reach."""

import gzip
import re

import hub
import pytest
from harness import Workers, done, parametrize, refused

from text.dataset import read_meta

pandas = pytest.importorskip("pandas")
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


def texts(name, n):
    return [f"{name} {i}:\r\n" + f"Ünïcödé\n{i} " * 50 * (i + 1) for i in range(n)]


def parquet(name, n):
    return pandas.DataFrame({"text": texts(name, n)}).to_parquet(row_group_size=2)


def json_gz(name):
    rows = pandas.DataFrame({"url": "-", "text": texts(name, 4)})
    return gzip.compress(rows.to_json(orient="records", lines=True).encode())


BOOKS = {
    "data/train-00000-of-00002.parquet": parquet("first", 5),
    "data/train-00001-of-00002.parquet": parquet("second", 3),
    "data/validation-00000-of-00001.parquet": parquet("third", 2),
    "data/test-00000-of-00001.parquet": parquet("fourth", 1),
}
LINES = {
    f"{name}.json.gz": json_gz(name)
    for name in ("en/train.0", "en/train.1", "en/validation", "de/all")
}
REPOSITORIES = {
    "owner/books": BOOKS,
    "owner/lines": LINES | {"README.md": README},
    "owner/other": {"data/train.parquet": parquet("other", 20)},
}


@pytest.fixture(scope="module")
def server():
    with hub.serve(REPOSITORIES) as server:
        yield server


@pytest.fixture(scope="module")
def worker(server, tmp_path_factory):
    home = str(tmp_path_factory.mktemp("hf"))
    pool = Workers(HF_ENDPOINT=server.url, HF_HOME=home, HF_DATASETS_CACHE=f"{home}/datasets")
    yield pool
    pool.stop()


@pytest.fixture
def prepare(worker, tmp_path):
    """prepare("owner/name", "--flag=1") -> (exit code, stdout, stderr).

    Another process runs it, since HF_ENDPOINT is read when huggingface_hub is imported. The process
    does not wait between the many times that it asks a hub that fails.
    """

    def prepare(source, *args, before=AT_ONCE):
        flags = (f"--source={source}", "--tokenizer=bytes", f"--out_dir={tmp_path / 'out'}", *args)
        (code,), out, err = worker.run(1, "data/text/prepare.py", *flags, before=before)
        return code, out, err

    return prepare


@pytest.fixture
def sentence(prepare, tmp_path):
    """sentence("owner/name", "--flag=1") -> the sentence on stderr that prepare.py ended with."""

    def sentence(*args, **kwargs):
        line = refused(prepare(*args, **kwargs)).splitlines()[-1]
        assert line.startswith("prepare.py: ")
        assert not (tmp_path / "out").exists()
        return line

    return sentence


def test_parquet_files_are_as_local_ones(prepare, run, tmp_path):
    done(prepare("owner/books"))
    (tmp_path / "data").mkdir()
    for path, data in BOOKS.items():
        (tmp_path / path).write_bytes(data)
    local = tmp_path / "local"
    flags = (f"--source={tmp_path / 'data'}", "--tokenizer=bytes", f"--out_dir={local}")
    done(run("data/text/prepare.py", *flags))
    files = read_meta(local)["files"]  # with checksums
    assert len(files) == 3 and read_meta(tmp_path / "out")["files"] == files


def test_json_lines_of_a_config(prepare, tmp_path):
    done(prepare("owner/lines:en"))
    train = texts("en/train.0", 4) + texts("en/train.1", 4)
    for name, rows in (("train.bin", train), ("val.bin", texts("en/validation", 4))):
        documents = [row.replace("\r\n", "\n").encode() + b"\xff" for row in rows]
        assert (tmp_path / "out" / name).read_bytes() == b"".join(documents)


@parametrize(
    "source, says",
    [
        ("owner/nothing", "cannot read owner/nothing .*doesn't exist on the Hub"),
        ("owner/books --column=texts", "no column 'texts', but text: give one"),
        ("owner/lines", "Config name is missing.*'en', 'de'"),
    ],
)
def test_what_is_not_on_the_hub(sentence, source, says):
    assert re.search(says, sentence(*source.split()))


def test_a_gated_data_set(sentence, server, monkeypatch):
    monkeypatch.setattr(server, "fault", {"data/train.parquet": 401}.get)
    assert "gated repo" in sentence("owner/other")


def test_no_network(sentence):
    says = "Couldn't reach 'owner/unknown' on the Hub"
    assert says in sentence("owner/unknown", before=NO_NETWORK)
