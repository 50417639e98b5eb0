"""Several processes: the same losses for any number of them, shared checkpoints, and news that all must learn."""

import json

import pytest
from harness import SMALL, Workers, same, state_of, write

from text import tokenizers


@pytest.fixture(scope="module")
def workers():
    pool = Workers()
    yield pool
    for process in pool.processes:
        process.kill()


@pytest.fixture
def train(workers, data, tmp_path):
    """train(2, "--max_iters=3") -> ([exit codes], stdout, stderr) of a small run into tmp_path / "out"."""

    def train(n: int, *args: object, before: str = "") -> tuple[list, str, str]:
        quick = ["--gradient_accumulation_steps=2", "--warmup_iters=2", "--lr_decay_iters=50", "--learning_rate=1e-3"]
        quick += ["--eval_interval=5", "--eval_iters=2", "--sample_tokens=0", "--max_iters=10"]
        flags = (f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, *quick)
        return workers.run(n, "train.py", *flags, *args, before=before)

    return train


def rows(folder, *keys) -> list:
    with open(folder / "log.jsonl") as f:
        return [row[key] for row in map(json.loads, f) for key in keys if key in row]


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


@pytest.mark.parametrize(("core", "parallel"), [("laser", "ddp"), ("softmax", "fsdp")])
def test_resume_is_exact_with_two_processes(train, tmp_path, core, parallel):
    """6 + 4 steps are 10 steps, bit for bit, dropout included, which differs between the processes."""
    flags = (f"--attention={core}", "--dropout=0.1", "--heads=SL", "--window=5", f"--parallel={parallel}")
    assert train(2, *flags)[0] == [0, 0]
    straight, log = state_of(tmp_path)["model"], rows(tmp_path / "out", "loss")
    assert train(2, *flags, "--max_iters=6")[0] == [0, 0]
    codes, out, err = train(2, "--init_from=resume", "--max_iters=10")
    assert codes == [0, 0] and "resume: max_iters was 6, now 10" in out, err
    assert same(state_of(tmp_path)["model"], straight) and rows(tmp_path / "out", "loss") == log


def test_a_checkpoint_for_any_number_of_processes(train, workers, tmp_path):
    """Sharded by 2, then by 3, by 1, whole in 2, and sharded again; each time the run goes on as it would have."""
    batch = ("--batch_size=6", "--gradient_accumulation_steps=1", "--optimizer=muon", "--muon_lr=2e-3")
    assert train(1, *batch, "--max_iters=15")[0] == [0]
    curve, names = rows(tmp_path / "out", "loss"), state_of(tmp_path)["model"].keys()
    codes, _, err = train(2, *batch, "--parallel=fsdp", "--max_iters=3", "--save_interval=2", "--keep_checkpoints=1")
    assert codes == [0, 0], err
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == ["best.pt", "ckpt.pt", "log.jsonl", "previous"]
    assert state_of(tmp_path)["model"].keys() == names
    sampling = ("--num_samples=1", "--max_new_tokens=9", "--start=t", "--device=cpu")
    code, text, _ = workers.run(1, "sample.py", f"--out_dir={out}", *sampling)
    assert code == [0] and "step 3" in text
    for n, steps, parallel in ((3, 6, "fsdp"), (1, 9, "fsdp"), (2, 12, "ddp"), (2, 15, "fsdp")):
        codes, text, err = train(n, "--init_from=resume", *batch, f"--parallel={parallel}", f"--max_iters={steps}")
        assert codes == [0] * n, (codes, err)
    assert rows(out, "loss") == pytest.approx(curve, abs=1e-5)
    assert train(2, "--init_from=resume", *batch, "--eval_only")[0] == [0, 0]


PLANT = """
import os, torch
norm, steps = torch.nn.utils.clip_grad_norm_, [0]
def clip(parameters, largest):
    parameters = list(parameters)
    steps[0] += 1
    if os.environ["RANK"] == "1" and steps[0] == 5:
        {plant}
    return norm(parameters, largest)
torch.nn.utils.clip_grad_norm_ = clip
def after():
    torch.nn.utils.clip_grad_norm_ = norm
"""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_all_stop_at_the_same_step(train, tmp_path, parallel):
    """A signal to one of them, while it computes its fifth step."""
    plant = "os.kill(os.getpid(), 15)"
    flags = ("--max_iters=100", "--sample_tokens=9", f"--parallel={parallel}", "--eval_interval=100")
    codes, out, err = train(2, *flags, before=PLANT.format(plant=plant))
    assert codes == [143, 143] and "stopped by signal after 5 steps" in out and "a sample" not in out, (codes, err)
    assert state_of(tmp_path)["iter_num"] == len(rows(tmp_path / "out", "loss")) == 5


@pytest.mark.parametrize(
    ("plant", "parallel", "step"),
    [
        ("parameters[3].grad.view(-1)[0] = float('nan')", "ddp", 4),
        ("parameters[3].data._local_tensor.view(-1)[0] = float('inf')", "fsdp", 5),
    ],
)
@pytest.mark.parametrize(("interval", "where"), [(1, "step {}: the loss is"), (50, "holds values that are not finite")])
def test_a_nan_of_one_process_stops_all(train, tmp_path, plant, parallel, step, interval, where):
    """After a NaN in its gradient, or an infinity in a weight: in the next line of the log, or before a save."""
    flags = ("--eval_interval=100", "--save_interval=3", f"--log_interval={interval}", f"--parallel={parallel}")
    codes, _, err = train(2, *flags, before=PLANT.format(plant=plant))
    assert codes == [1, 1] and where.format(step) in err and "Traceback" not in err, (codes, err)
    assert state_of(tmp_path)["iter_num"] == 3 and all(x.isfinite().all() for x in state_of(tmp_path)["model"].values())


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
