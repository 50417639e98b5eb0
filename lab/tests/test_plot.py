"""Curves of runs: lab/look/plot.py, lab/loggers/tensorboard.py. lab/loggers/not_finite.py."""

import json
import math
import struct

import pytest
import torch
from harness import done, log_of, refused

from lab.look import plot
from model import GPT, GPTConfig


def test_plot(run, train, tmp_path):
    """Of whole runs, an evaluation alone, a norm that overflowed, a line that is being written."""
    pytest.importorskip("matplotlib")
    train("--import=lab.loggers.logits")
    logs = {
        "b": '{"iter": 0, "loss": 2, "norm": Infinity, "ms": 1, "tokens_per_s": 1}\n{"iter": 9',
        "c": '{"iter": 0, "val_loss": 3.0}\n{"iter": 5, "val_loss": 3.5}\n',
        "bad": "{1",
    }
    for name, log in logs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(log)

    def draw(runs, *flags):
        paths = ",".join(f"{tmp_path}/{name}" for name in runs.split())
        picture = tmp_path / "p.png"
        picture.unlink(missing_ok=True)
        code, out, err = run("lab.look.plot", f"--runs={paths}", f"--out={picture}", *flags)
        assert (code == 0) == picture.exists()
        width = struct.unpack(">I", picture.read_bytes()[16:20])[0] if code == 0 else None
        return width, out + err

    wide, out = draw("out b c/", "--x=tokens")
    assert "out: 10 steps, 2,560 tokens, best validation loss" in out
    assert "c: 5 steps, 0 tokens, best validation loss 3.0000" in out
    width, out = draw("b c", "--x=time", "--y=loss,logit")
    assert wide == 4 * width and "no run has logged logit" in out  # four curves, and one
    assert draw("c")[0] == width
    for runs, y, says in (
        ("none", "loss", "there is no"),
        ("bad", "loss", "is empty"),
        ("out", "los", "is not one of loss, norm"),
        ("b", "logit", "none of these runs has logged logit"),
    ):
        width, err = draw(runs, f"--y={y}")
        assert width is None and says in err
    wrong = run("lab.look.plot", f"--runs={tmp_path}/b", f"--out={tmp_path}/p.xyz")
    refused(wrong, "p.xyz: Format 'xyz' is not supported")


def test_the_axes_of_a_plot(tmp_path):
    """Tokens and hours are sums over the steps, which need not be logged each."""
    rows = []
    for i in (0, 10):
        ms = 1000.0 * (i + 1)
        rows.append({"iter": i, "loss": 4.0, "ms": ms, "tokens_per_s": 100.0 / (i + 1)})
    rows += [{"iter": i, "val_loss": 2.0} for i in (0, 6, 21)]  # before their steps
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = plot.read(str(tmp_path))
    assert [row["steps"] for row in read] == [1, 11, 0, 6, 21]
    assert [row["tokens"] for row in read] == pytest.approx([100, 1100, 0, 600, 2100])
    seconds = [row["time"] * 3600 for row in read]
    assert seconds == pytest.approx([1, 111, 0, 1 + 5 * 11, 111 + 10 * 11])

    halves = plot.running_mean([4.0, 2.0], [1, 11], 10 / math.log(2))  # ten steps later a half
    assert halves == pytest.approx([4, (0.5 * 4 + 2) / 1.5])


def test_names_that_matplotlib_reads_in_another_way(run, tmp_path, monkeypatch):
    """A label with _ in front is left out of a legend, and $x_$ is a broken equation."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name in ("_a", "$x_$"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text('{"iter": 0, "val_loss": 3.0}\n')
    done(run("lab.look.plot", "--runs=_a,$x_$", "--out=p.svg"), "$x_$: 0 steps")
    picture = (tmp_path / "p.svg").read_text()
    assert "<!--  _a, validation -->" in picture and "<!-- $x_$, validation -->" in picture


def test_tensorboard(train, tmp_path):
    """Its curves are log.jsonl's, also after a resume. A new run replaces the older one's."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for flags in ("--max_iters=10", "--init_from=resume --max_iters=15", "--max_iters=7"):
        done(train("--import=lab.loggers.tensorboard --import=lab.loggers.logits", flags))
        rows = log_of(tmp_path)
        for row in rows:
            row |= {f"max_logit/{i}": x for i, x in enumerate(row.pop("max_logit", ()))}
        board = events.EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
        for key in ("loss", "norm", "lr", "val_loss", "max_logit/0", "max_logit/1"):
            curve = {event.step: event.value for event in board.Scalars(key)}
            assert curve == pytest.approx({row["iter"]: row[key] for row in rows if key in row})
        settings = board.Tensors("settings/text_summary")[-1]
        assert b"attention = 'softmax'" in settings.tensor_proto.string_val[0]


def test_where_numbers_are_first_not_finite(capsys):
    from lab.loggers import not_finite

    gpt = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=2, n_head=2, n_embd=8))
    x = torch.zeros(1, 8, dtype=torch.long)
    try:
        gpt(x, x)
        gpt.transformer.h[1].mlp.c_proj.bias.data[3] = math.inf
        with pytest.raises(SystemExit, match="1"):
            gpt(x, x)
    finally:
        for hook in not_finite.hooks:
            hook.remove()
    says = "output of transformer.h.1.mlp.c_proj is the first that is not finite: its weights"
    assert says in capsys.readouterr().err
