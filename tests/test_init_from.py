"""The folder of a run as --init_from: its weights, what may change, what is refused."""

import json

from harness import done

from training import checkpoint


def test_a_run_begins_with_the_weights_of_another(run, train, tmp_path):
    done(train("--attention=laser", "--heads=SSSL", "--window=4", "--position=rope"))
    trained = tmp_path / "out"
    flags = [f"--init_from={trained}", f"--out_dir={tmp_path / 'new'}"]

    code, out, err = train(*flags, "--max_iters=0", "--eval_interval=1")
    assert code == 0 and "all of its weights carry over" in out, err
    with open(trained / "log.jsonl") as f:
        rows = [json.loads(line) for line in f]
    best = min(row["val_loss"] for row in rows if "val_loss" in row)
    assert f"val loss {best:.4f}" in out

    samples = [
        run("sample.py", f"--{flag}={trained}", "--num_samples=1")[1]
        for flag in ("out_dir", "init_from")
    ]
    assert samples[0] == samples[1] != ""

    changes = ("--attention=softmax", "--conv=3", "--max_iters=2", "--block_size=16")
    code, out, err = train(*flags, *changes)
    assert code == 0 and "with another attention the loss is higher" in out, err

    code, _, err = train(f"--init_from={trained}/best.pt", flags[1])
    assert code == 2 and "best.pt' is not one of gpt2" in err and "no folder" in err
    code, _, err = train(*flags, "--position=learned")
    says = f"--position=learned does not fit {trained}, which has position=rope"
    assert code == 2 and says in err

    path = str(trained / "best.pt")
    state = checkpoint.load(path)
    state["tokenizer"]["vocab"] = state["tokenizer"]["vocab"][::-1]
    checkpoint.save(path, state)
    code, out, err = train(*flags, "--max_iters=1")
    assert code == 0 and "may have other tokens than" in out, err


def test_a_changed_model_needs_a_place_for_every_trained_weight(train, tmp_path):
    done(train("--conv=3", "--max_iters=2"))
    flags = [f"--init_from={tmp_path / 'out'}", f"--out_dir={tmp_path / 'more'}"]
    for width in (0, 4):
        code, _, err = train(*flags, f"--conv={width}")
        assert code == 2 and "transformer.h.0.attn.conv.weight" in err
    code, out, err = train(*flags, "--conv=3", "--attention=softmax", "--max_iters=1")
    assert code == 0 and "trained without" not in out, err
    short = ("--position=relative", "--nope_long", "--heads=S/L", "--window=4", "--max_iters=2")
    assert train(*short)[0] == 0
    code, _, err = train(*flags, "--heads=S/SL")
    assert code == 2 and "transformer.h.1.attn.position.k" in err
