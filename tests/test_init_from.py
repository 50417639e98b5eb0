"""The folder of a run as --init_from: its weights, what may change, what is refused."""

from harness import done, log_of, refused

from training import checkpoint, pretrained


def test_a_run_begins_with_the_weights_of_another(run, train, tmp_path, monkeypatch):
    done(train("--attention=laser --heads=SSSL --window=4 --position=rope"))
    trained = tmp_path / "out"
    new = f"--out_dir={tmp_path / 'new'}"
    flags = f"--init_from={trained} {new}"

    says = "all of its weights carry over"
    out = done(train(flags, "--max_iters=0 --eval_interval=1"), says)
    best = min(row["val_loss"] for row in log_of(tmp_path) if "val_loss" in row)
    assert f"val loss {best:.4f}" in out

    samples = [
        run("sample.py", f"--{flag}={trained}", "--num_samples=1")[1]
        for flag in ("out_dir", "init_from")
    ]
    assert samples[0] == samples[1] != ""

    changes = "--attention=softmax --conv=3 --max_iters=2 --block_size=16"
    done(train(flags, changes), "with another attention the loss is higher")

    monkeypatch.delitem(pretrained.SOURCES, "other", raising=False)
    refused(train(f"--init_from={trained}/best.pt", new), "best.pt' is not one of", "no folder")
    says = f"--position=learned does not fit {trained}, which has position=rope"
    refused(train(flags, "--position=learned"), says)

    path = str(trained / "best.pt")
    state = checkpoint.load(path)
    state["tokenizer"]["vocab"] = state["tokenizer"]["vocab"][::-1]
    checkpoint.save(path, state)
    refused(train(flags, "--max_iters=1"), "has another vocabulary than the data of")


def test_a_changed_model_needs_a_place_for_every_trained_weight(train, tmp_path):
    done(train("--conv=3 --max_iters=2"))
    flags = f"--init_from={tmp_path / 'out'} --out_dir={tmp_path / 'more'}"
    for width in (0, 4):
        refused(train(flags, f"--conv={width}"), "transformer.h.0.attn.conv.weight")
    out = done(train(flags, "--conv=3 --attention=softmax --max_iters=1"))
    assert "trained without" not in out
