"""Several processes: the same losses for any number of them, shared checkpoints, and news that all must learn."""

import itertools
import json

import pytest
import torch
from harness import ROOT, SMALL, Workers, write

from model import ATTENTION
from text import tokenizers
from training import checkpoint

NAME = {"ddp": "ckpt.pt", "fsdp": "ckpt"}  # of the latest checkpoint


@pytest.fixture(scope="module")
def workers():
    pool = Workers()
    yield pool
    for process in pool.processes:
        process.kill()


@pytest.fixture
def train(workers, data, tmp_path):
    """train(2, "--max_iters=3") -> ([exit codes], stdout, stderr) of a small run into tmp_path / "out"."""

    def train(n: int, *args: object, before: str = "", script: str = "train.py") -> tuple[list, str, str]:
        quick = ["--gradient_accumulation_steps=2", "--warmup_iters=2", "--lr_decay_iters=50", "--learning_rate=1e-3"]
        quick += ["--eval_interval=5", "--eval_iters=2", "--sample_tokens=0", "--max_iters=10"]
        flags = (f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, *quick)
        return workers.run(n, script, *flags, *args, before=before)

    return train


def rows(folder, *keys) -> list:
    with open(folder / "log.jsonl") as f:
        return [row[key] for row in map(json.loads, f) for key in keys if key in row]


def weights(path) -> dict:
    return {name: x.clone() for name, x in checkpoint.load(str(path))["model"].items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    "flags",
    [  # the first: 10 sequences, five micro-batches of 2; or for each of two processes micro-batches of 2, 2 and 1
        ("--batch_size=2", "--gradient_accumulation_steps=5", "--n_kv_head=2", "--position=t5", "--optimizer=nadamw"),
        ("--attention=laser", "--heads=SSSL", "--window=4", "--position=alibi", "--optimizer=muon", "--muon_lr=2e-3"),
        ("--attention=beta", "--position=relative", "--optimizer=lamb", "--n_layer=1", "--activation_checkpointing"),
    ],
)
def test_the_same_curve_whoever_computes_it(train, tmp_path, flags):
    curves = []
    for n, parallel in ((1, "ddp"), (2, "ddp"), (2, "fsdp")):
        codes, out, err = train(n, *flags, f"--parallel={parallel}", "--max_iters=12", "--eval_interval=6")
        assert codes == [0] * n, (codes, err)
        assert "T5" not in err and ("fsdp" in out) == (parallel == "fsdp")
        curves.append(rows(tmp_path / "out", "loss", "norm", "val_loss"))
    assert len(curves[0]) == 12 + 12 + 3 and curves[0][-1] < curves[0][0]
    assert curves[1] == pytest.approx(curves[0], abs=1e-5) and curves[2] == pytest.approx(curves[0], abs=1e-5)


def test_sharded_in_bfloat16(train, tmp_path):
    """Its weights and activations are rounded where DDP's autocast keeps some in float32."""
    curves = []
    for parallel in ("ddp", "fsdp"):
        codes, _, err = train(2, f"--parallel={parallel}", "--dtype=bfloat16", "--eval_interval=10")
        assert codes == [0, 0], (codes, err)
        curves.append(rows(tmp_path / "out", "loss"))
    assert curves[0] == pytest.approx(curves[1], abs=0.02) and curves[0] != curves[1]
    assert train(2, "--parallel=fsdp", "--dtype=float16", "--eval_interval=10")[0] == [0, 0]
    assert rows(tmp_path / "out", "loss") == pytest.approx(curves[0], abs=0.02)


@pytest.mark.parametrize(("core", "parallel"), [*zip(ATTENTION, itertools.cycle(("ddp", "fsdp")), strict=False)])
def test_resume_is_exact_with_two_processes(train, tmp_path, core, parallel):
    """6 + 4 steps are 10 steps, bit for bit, dropout included, which differs between the processes."""
    flags = (f"--attention={core}", "--dropout=0.1", "--heads=SL", "--window=5", f"--parallel={parallel}")
    assert train(2, *flags)[0] == [0, 0]
    straight, log = weights(tmp_path / "out" / NAME[parallel]), rows(tmp_path / "out", "loss")
    assert train(2, *flags, "--max_iters=6")[0] == [0, 0]
    codes, out, err = train(2, "--init_from=resume", "--max_iters=10")
    assert codes == [0, 0] and "resume: max_iters was 6, now 10" in out, err
    assert same(weights(tmp_path / "out" / NAME[parallel]), straight) and rows(tmp_path / "out", "loss") == log


def test_a_checkpoint_for_any_number_of_processes(train, workers, tmp_path):
    """Sharded by 2, loaded by 3, by 1, in whole by 2, and sharded again; each time the run goes on as it would have."""
    batch = ("--batch_size=6", "--gradient_accumulation_steps=1", "--optimizer=muon", "--muon_lr=2e-3")
    assert train(1, *batch, "--max_iters=15")[0] == [0]
    curve = rows(tmp_path / "out", "loss")
    codes, _, err = train(2, *batch, "--parallel=fsdp", "--max_iters=3", "--save_interval=2", "--keep_checkpoints=1")
    assert codes == [0, 0], err
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["best", "ckpt", "log.jsonl", "previous"]
    assert sum(path.suffix == ".safetensors" for path in (out / "ckpt").iterdir()) == 2
    sampling = ("--num_samples=1", "--max_new_tokens=9", "--start=t", "--device=cpu")
    code, text, _ = workers.run(1, "sample.py", f"--out_dir={out}", *sampling)
    assert code == [0] and "step 3" in text
    for n, steps, parallel in ((3, 6, "fsdp"), (1, 9, "fsdp"), (2, 12, "ddp"), (2, 15, "fsdp")):
        codes, text, err = train(n, "--init_from=resume", *batch, f"--parallel={parallel}", f"--max_iters={steps}")
        assert codes == [0] * n, (codes, err)
        folder = parallel == "fsdp" and n > 1
        assert [path.name for path in out.glob("ckpt*")] == ["ckpt" if folder else "ckpt.pt"]
    assert rows(out, "loss") == pytest.approx(curve, abs=1e-5)
    assert train(2, "--init_from=resume", *batch, "--eval_only")[0] == [0, 0]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_the_status_that_is_read_a_step_later(train, workers, data, tmp_path, parallel):
    """As on CUDA: the same losses and weights. Both optimizers are asked to skip a step, on the device."""
    with open(f"{ROOT}/train.py") as f:
        later = f.read().replace('lag = int(run.device_type == "cuda" and', "lag = int(")
    (tmp_path / "later.py").write_text(later)
    event = "import torch, types\nnothing = lambda: None\n"
    event += "torch.cuda.Event = lambda: types.SimpleNamespace(record=nothing, synchronize=nothing)"
    found = []
    for script in ("train.py", str(tmp_path / "later.py")):
        flags = ("--optimizer=muon", f"--parallel={parallel}", "--max_iters=8")
        codes, _, err = train(2, *flags, before=event, script=script)
        assert codes == [0, 0], err
        found.append((rows(tmp_path / "out", "loss", "norm"), weights(tmp_path / "out" / NAME[parallel])))
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


def test_all_stop_at_the_same_step(train, workers, tmp_path):
    """A signal to one of them."""
    stop = "import os, signal, threading\nif os.environ['RANK'] == '1':\n"
    stop += "    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()"
    for parallel, name in (("ddp", "ckpt.pt"), ("fsdp", "ckpt")):
        codes, out, err = train(2, "--max_iters=1000000", "--eval_interval=1000000", "--sample_tokens=9",
                                f"--parallel={parallel}", before=stop)  # fmt: skip
        assert codes == [143, 143] and "stopped by signal after" in out and "a sample" not in out, (codes, err)
        steps = checkpoint.load(str(tmp_path / "out" / name))["iter_num"]
        assert 0 < steps < 1000000 and len(rows(tmp_path / "out", "loss")) == steps


def test_all_stop_in_the_same_evaluation(train, tmp_path):
    """A signal to one of them between two evaluation batches, which with FSDP all compute together."""
    ask = """
import os, signal
from text import dataset
read, calls = dataset.Tokens.eval_batches, [0]
def asked(self, *args, **kwargs):
    calls[0] += 1
    if os.environ["RANK"] == "1" and calls[0] == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return read(self, *args, **kwargs)
dataset.Tokens.eval_batches = asked
def after():
    dataset.Tokens.eval_batches = read
"""
    for parallel, name in (("ddp", "ckpt.pt"), ("fsdp", "ckpt")):
        flags = ("--eval_interval=3", "--eval_iters=4", f"--parallel={parallel}")
        codes, out, err = train(2, "--max_iters=100", *flags, before=ask)
        assert codes == [143, 143] and "stopped by signal after 3 steps" in out, (codes, err)
        assert checkpoint.load(str(tmp_path / "out" / name))["iter_num"] == 3


PLANT = """
import os, torch
norm, steps = torch.nn.utils.clip_grad_norm_, [0]
def clip(parameters, largest):
    parameters = list(parameters)
    steps[0] += 1
    if os.environ["RANK"] == "1" and steps[0] == 4:
        {plant}
    return norm(parameters, largest)
torch.nn.utils.clip_grad_norm_ = clip
def after():
    torch.nn.utils.clip_grad_norm_ = norm
"""


@pytest.mark.parametrize(
    ("plant", "step"),
    [("parameters[3].grad.view(-1)[0] = float('nan')", 3), ("parameters[3].data.view(-1)[0] = float('inf')", 4)],
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_nan_of_one_process_stops_all(train, tmp_path, plant, step, parallel):
    """In a gradient, before the optimizer sees it; in a weight, before the next step."""
    plant = plant.replace("[3].grad", "[3].grad._local_tensor") if parallel == "fsdp" else plant
    plant = plant.replace("[3].data", "[3].data._local_tensor") if parallel == "fsdp" else plant
    codes, _, err = train(2, "--eval_interval=3", f"--parallel={parallel}", before=PLANT.format(plant=plant))
    assert codes == [1, 1] and f"step {step}: the loss is" in err and "Traceback" not in err, (codes, err)
    path = tmp_path / "out" / NAME[parallel]
    assert checkpoint.load(str(path))["iter_num"] == 3
    assert all(x.isfinite().all() for x in weights(path).values())


CHANGE = """
import os
from text import dataset
read, calls = dataset.Tokens.{where}, [0]
def changed(self, *args, **kwargs):
    calls[0] += 1
    if os.environ["RANK"] == "1" and calls[0] == {call}:
        self._version = None
    return read(self, *args, **kwargs)
dataset.Tokens.{where} = changed
def after():
    dataset.Tokens.{where} = read
"""


@pytest.mark.parametrize(("where", "call", "file"), [("batch", 8, "train.bin"), ("eval_batches", 4, "val.bin")])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_data_that_changes_under_a_run(train, tmp_path, where, call, file, parallel):
    """Data change on one process's disk, between evaluations or in one: it tells the others, and all save the run."""
    change = CHANGE.format(where=where, call=call)
    codes, out, err = train(2, "--max_iters=100", f"--parallel={parallel}", before=change)
    assert codes == [2, 2] and err.count(f"{file} has been changed while it was in use") == 1, (codes, err)
    saved = checkpoint.load(str(tmp_path / "out" / NAME[parallel]))
    assert 0 < saved["iter_num"] < 100 and len(rows(tmp_path / "out", "loss")) == saved["iter_num"]


def test_eval_in_shares(train, workers, data, tmp_path):
    """eval.py prints the same for one, two and three processes; some of them have one window less."""
    assert train(1, "--max_iters=3")[0] == [0]
    flags = (f"--out_dir={tmp_path / 'out'}", f"--dataset={data}", "--device=cpu", "--batch_size=3", "--stride=25")
    numbers = []
    for n in (1, 2, 3):
        codes, out, err = workers.run(n, "eval.py", *flags)
        assert codes == [0] * n and f"on {n} process" in out, err
        loss, perplexity, _, bits = out.splitlines()[2:]  # e^(nats per word) shows how float32 was rounded
        numbers.append((loss, perplexity, bits))
    assert numbers[0] == numbers[1] == numbers[2]


def test_more_processes_than_rows_of_a_weight(train, tmp_path):
    """An empty share of the embedding, which is the head as well; and a norm with a single number."""
    tok = tokenizers.CharTokenizer("abc\n")  # in shares of 2, 2 and 0
    write(tmp_path / "few", tok, {"train": "abc\n" * 100, "val": "abc\n" * 20}, {})
    flags = ("--parallel=fsdp", "--batch_size=3", f"--dataset={tmp_path / 'few'}", "--qk_norm=l2")
    codes, _, err = train(3, *flags, "--max_iters=5")
    assert codes == [0] * 3, err
    codes, out, err = train(3, *flags, "--init_from=resume", "--max_iters=7", "--sample_tokens=9")
    assert codes == [0] * 3 and "a sample" in out, err
