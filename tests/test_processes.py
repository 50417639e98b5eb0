"""Several processes: the same losses for any number, shared checkpoints, how all stop."""

import functools

import pytest
from harness import QUICK, SMALL, Workers, log_of, parametrize, same, state_of, weights_of, write
from test_seams import FILES, printed  # noqa: F401

from text import tokenizers


@pytest.fixture(scope="module")
def workers():
    pool = Workers()
    yield pool
    pool.stop()


@pytest.fixture
def train(workers, data, tmp_path):
    """train(2, "--max_iters=3 --tied=False") -> (stdout, stderr) of a run into tmp_path/out.

    code: with which each process ends.
    """

    def train(n, *args, before="", code=0):
        flags = (f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", *SMALL, *QUICK)
        given = "--lr_decay_iters=50 --learning_rate=1e-3 " + " ".join(args)
        codes, out, err = workers.run(n, "train.py", *flags, *given.split(), before=before)
        assert codes == [code] * n, (codes, err)
        return out, err

    return train


def rows(tmp_path, *keys) -> list:
    return [row[key] for row in log_of(tmp_path) for key in keys if key in row]


def same_curve(train, tmp_path, ways: list, *flags) -> list:
    """Losses and norms of a run, the same in each way (processes, more flags) to compute it."""
    curves = []
    for n, more in ways:
        train(n, *flags, more)
        curves.append(rows(tmp_path, "loss", "norm", "val_loss"))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=1e-5)
    return curves[0]


WAYS = [(1, ""), (2, "--parallel=ddp"), (2, "--parallel=fsdp")]


@parametrize(
    "flags",
    [  # the first: 10 sequences, five micro-batches of 2; for each of two processes 2, 2 and 1
        "--batch_size=2 --gradient_accumulation_steps=5 --n_kv_head=2 --position=rope",
        "--attention=laser --heads=SSSL --window=4 --position=alibi --optimizer=muon "
        "--muon_lr=2e-3",
        "--attention=beta --import=lab.ideas.positions --position=relative --import=lab.ideas.lamb "
        "--optimizer=lamb --n_layer=1 --activation_checkpointing",
        # a layer of its own
        "--import=lab.ideas.gated_delta --attention=gated_delta --position=none",
    ],
)
def test_the_same_curve_whoever_computes_it(train, tmp_path, flags):
    curve = same_curve(train, tmp_path, WAYS, flags, "--max_iters=12 --eval_interval=6")
    assert len(curve) == 12 + 12 + 3 and curve[-1] < curve[0]


@parametrize("name", ["value_residual", "gated", "half_rope"])
def test_a_printed_file(train, tmp_path, printed, name):  # noqa: F811
    """Each is a file of docs/attention.md, in a folder of the user's own."""
    train = functools.partial(train, before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    ((field, value),) = FILES[name].items()
    flags = f"--import={printed(name)} --{field}={value} --max_iters=4"
    assert len(same_curve(train, tmp_path, WAYS, flags)) == 4 + 4 + 2


@parametrize(
    "flags",
    [
        "--position=rope --n_kv_head=2 --import=lab.ideas.qkv --qkv=value_residual",
        "--attention=laser --heads=SSSL --window=4 --position=alibi --conv=3",
        "--attention=beta --decay=alibi --position=rope --activation_checkpointing",
        "--attention=beta_squared --heads=SL --window=3 --import=lab.ideas.positions "
        "--decay=learned",
        "--import=lab.ideas --attention=forgetting --position=none",
    ],
)
def test_a_sequence_over_several_processes(train, tmp_path, flags):
    """Two, four, and two groups of two have one process's losses and norms of the gradient."""
    cut = "--parallel=context"
    ways = [(1, ""), (2, cut), (4, cut), (4, f"{cut} --context_processes=2")]
    same_curve(train, tmp_path, ways, flags, "--max_iters=6 --eval_interval=6 --block_size=64")


@parametrize(
    "flags, says",
    [
        ("--block_size=34", "block_size=34 must be a multiple of 4"),
        ("--heads=SL --window=9", "a part of 8 tokens is shorter than a window"),
        ("--attn_dropout=0.1", "drops no attention weights"),
        ("--import=lab.ideas.gated_delta --attention=gated_delta --position=none", "GatedDelta"),
        ("--import=lab.ideas.sparse --attention=selective", "selective_scores: a query"),
        ("--import=lab.ideas.fading --attention=wall --position=none", "this layer keeps a state"),
        ("--context_processes=3", "context_processes=3 does not divide 2 processes"),
        ("--context_processes=-1", "context_processes=-1 does not divide 2 processes"),
    ],
)
def test_what_cannot_be_cut(train, flags, says):
    _, err = train(2, "--parallel=context", flags, code=2)
    assert says in err


def test_sharded_in_half_precision(train, tmp_path):
    """Its weights and activations are rounded where DDP's autocast keeps some in float32."""
    curves = []
    for parallel, dtype in (("ddp", "bfloat16"), ("fsdp", "bfloat16"), ("fsdp", "float16")):
        train(2, f"--parallel={parallel} --dtype={dtype} --eval_interval=10")
        curves.append(rows(tmp_path, "loss"))
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], abs=0.02) and curve != curves[0]


@parametrize("core, parallel", [("laser", "ddp"), ("softmax", "fsdp")])
def test_resume_is_exact_with_two_processes(train, tmp_path, core, parallel):
    """6 + 4 steps are 10 steps, bit for bit, also with dropout, which differs in each process."""
    flags = f"--attention={core} --parallel={parallel} --heads=SL --window=5 --dropout=0.1"
    train(2, flags)
    straight = weights_of(tmp_path)
    log = rows(tmp_path, "loss")
    train(2, flags, "--max_iters=6")
    train(2, "--init_from=resume --max_iters=10")
    assert same(weights_of(tmp_path), straight) and rows(tmp_path, "loss") == log


def test_each_process_drops_other_numbers(train, tmp_path):
    """All rows are one window: two processes have the loss of one, except for their dropout."""
    same_rows = (
        "from text.dataset import Tokens\n"
        "windows = Tokens._windows\n"
        "Tokens._windows = lambda self, offsets: windows(self, offsets * 0)\n"
        "def after(): Tokens._windows = windows\n"
    )
    first = {}
    for dropout in (0.0, 0.5):
        for n in (1, 2):
            flags = f"--dropout={dropout} --batch_size=1 --max_iters=1"
            train(n, flags, f"--gradient_accumulation_steps={n}", before=same_rows)
            first[dropout, n] = rows(tmp_path, "loss")[0]
    assert first[0.0, 2] == pytest.approx(first[0.0, 1], abs=1e-6)
    assert abs(first[0.5, 2] - first[0.5, 1]) > 1e-3


def test_a_checkpoint_for_any_number_of_processes(train, tmp_path):
    """Sharded by 2, then by 3, by 1, whole in 2, and sharded again: always the same run."""
    flags = "--batch_size=6 --gradient_accumulation_steps=1 --optimizer=muon --muon_lr=2e-3"
    train(1, flags, "--max_iters=15")
    curve = rows(tmp_path, "loss")
    names = weights_of(tmp_path).keys()
    for n, steps, parallel in (
        (2, 3, "fsdp"),
        (3, 6, "fsdp"),
        (1, 9, "fsdp"),
        (2, 12, "ddp"),
        (2, 15, "fsdp"),
    ):
        train(n, flags, f"--parallel={parallel} --max_iters={steps}")
        flags += " --init_from=resume"
        if steps == 3:
            assert weights_of(tmp_path).keys() == names
    assert rows(tmp_path, "loss") == pytest.approx(curve, abs=1e-5)
    train(2, flags, "--eval_only")


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


@parametrize("parallel", ["ddp", "fsdp"])
def test_all_stop_at_the_same_step(train, tmp_path, parallel):
    """A signal to one of them, while it computes its fifth step."""
    flags = f"--max_iters=100 --sample_tokens=9 --eval_interval=100 --parallel={parallel}"
    out, err = train(2, flags, before=PLANT.format(plant="os.kill(os.getpid(), 15)"), code=143)
    assert "stopped by signal after 5 steps" in out and "a sample" not in out, err
    assert state_of(tmp_path)["iter_num"] == len(rows(tmp_path, "loss")) == 5


@parametrize(
    "plant, parallel, interval, says",
    [
        ("grad.view(-1)[0] = float('nan')", "ddp", 1, "step 4: the loss is"),
        ("grad.view(-1)[0] = float('nan')", "ddp", 50, "holds values that are not finite"),
        ("data._local_tensor.view(-1)[0] = float('inf')", "fsdp", 1, "step 5: the loss is"),
    ],
)
def test_a_nan_of_one_process_stops_all(train, tmp_path, plant, parallel, interval, says):
    """A NaN in its gradient, or an infinity in a weight: at the next log line, or before a save."""
    flags = f"--eval_interval=100 --save_interval=3 --log_interval={interval}"
    before = PLANT.format(plant=f"parameters[3].{plant}")
    _, err = train(2, flags, f"--parallel={parallel}", before=before, code=1)
    assert says in err and "Traceback" not in err, err
    saved = state_of(tmp_path)
    assert saved["iter_num"] == 3 and all(x.isfinite().all() for x in saved["model"].values())


def test_processes_that_start_at_different_steps(train, tmp_path):
    """torchrun has started one of them on a new machine: both say so, and nothing is lost."""
    again = "from training import distributed; distributed.launch = 'old machine'"
    train(2, "--max_iters=3", before=again)
    one = "import os; from training import distributed\n"
    one += "distributed.launch = ['old machine', 'new machine'][int(os.environ['RANK'])]"
    _, err = train(2, "--max_iters=6", before=one, code=2)
    assert "add --init_from=resume" in err
    assert state_of(tmp_path)["iter_num"] == 3
    out, err = train(2, "--max_iters=6", before=again)
    assert "started again by torchrun" in out, err
    assert rows(tmp_path, "iter")[-1] == 6
    assert state_of(tmp_path)["launch"] == ["old machine"]


def test_eval_in_shares(train, workers, data, tmp_path):
    """eval.py prints the same for one, two and three processes; some have one window less."""
    train(1, "--max_iters=3")
    flags = [f"--out_dir={tmp_path / 'out'}", f"--dataset={data}", "--device=cpu"]
    numbers = []
    for n in (1, 2, 3):
        codes, out, err = workers.run(n, "eval.py", *flags, "--batch_size=3", "--stride=25")
        assert codes == [0] * n and f"on {n} process" in out, err
        loss, perplexity, _, bits = out.splitlines()[2:]  # the third shows how float32 was rounded
        numbers.append((loss, perplexity, bits))
    assert numbers[0] == numbers[1] == numbers[2]


def test_more_processes_than_rows_of_a_weight(train, tmp_path):
    """An empty shard of the embedding, which is also the head."""
    texts = {"train": "abc\n" * 100, "val": "abc\n" * 20}
    write(tmp_path / "few", tokenizers.CharTokenizer("abc\n"), texts, {})  # shares of 2, 2 and 0
    flags = f"--parallel=fsdp --batch_size=3 --dataset={tmp_path / 'few'}"
    train(3, flags, "--max_iters=5")
    out, err = train(3, flags, "--init_from=resume --max_iters=7 --sample_tokens=9")
    assert "a sample" in out, err
