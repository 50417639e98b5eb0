"""How far back does stick-breaking look, and what does it cost beside PyTorch's softmax (SDPA)?

    OMP_NUM_THREADS=1 python -m lab.experiments.sticks

It trains the CPU config with a context of 512 characters and no positions, unless it has done so
before. It prints of this model and of a new one, for each head, the median number of keys back
until 99% of a query's stick is used up. For texts of --lengths tokens it prints the share of the
pairs of blocks that are computed, and the time of attention, forward and backward, as a ratio to
SDPA's in the same round. Numbers that are in --out are not measured again.
"""

from collections.abc import Callable
from functools import partial

from configurator import positive, run_script

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.forms import FORM
from attention.scores import scores, visible
from bench import interleaved, ratios
from lab.experiments.results import measured, show_table
from lab.experiments.runs import finished, identity
from lab.experiments.times import milliseconds
from lab.ideas.scores import log_sticks
from lab.ideas.stick_breaking import BLOCK, cut, walk
from lab.look.probe import Probe
from model import ATTENTION, GPT
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model

# What is measured?
out_dir = "out-sticks"  # the folder of the run
out = "lab/experiments/sticks.json"  # the results
lengths = "512,2048,8192"  # tokens of a text, separated by commas: whole blocks
repeats = 5  # rounds of the times

RUN = "config/train_shakespeare_char_cpu.py --import=lab.ideas --attention=stick_breaking"
RUN += " --position=none --block_size=512 --batch_size=2 --eval_iters=108"
RUN += " --max_iters=1500 --lr_decay_iters=1500 --eval_interval=1500"


def layers_of(gpt: GPT, idx: Tensor) -> list[tuple]:
    """q, k and v of each layer, (1, H, T, D)."""
    layers = []

    def see(heads, q, k, v, **_) -> None:
        layers.append((q, k, v))

    with torch.no_grad():
        gpt.eval().hidden(idx, Probe(see))
    return layers


def reach(q: Tensor, k: Tensor, scale: float) -> str:
    """The median number of keys back until 99% of a stick is used up, or all keys, of each head.

    Over the last half of the queries. The query's own key counts, the last key does not.
    """
    seen = visible(q, k, None)
    weights = log_sticks(scores(q, k, scale), seen, own_weight=False).exp()
    used = weights.flip(-1).cumsum(-1).flip(-1)  # by a key and those after it
    keys = (seen & (used < 0.99)).sum(-1)[0, :, q.shape[-2] // 2 :]
    return ", ".join(str(n) for n in keys.median(-1).values.tolist())


def step(attend: Callable, layers: list) -> None:
    """Make a forward and a backward pass of all layers."""
    for x in layers:
        y = attend(*(t.detach().requires_grad_() for t in x))
        y.backward(y.detach())


def computed(layers: list, n_head: int, scale: float) -> float:
    """The share of the pairs of blocks that stick-breaking computes."""
    done = 0
    for q, k, _ in layers:
        for part, *_ in walk(cut(q * scale), cut(k), n_head, 0):
            done += len(part)
    blocks = q.shape[-2] // BLOCK
    return done / (len(layers) * n_head * blocks * (blocks + 1) / 2)


def table(sizes: list[int]) -> dict:
    """{"rows": of the table}."""
    finished("stick-breaking", RUN.split(), out_dir)
    trained, _, run, _ = open_model("resume", out_dir, "best")
    ids = Tokens(folder_of(run["dataset"]), "val", 1).ids[: max(sizes)]
    text = torch.from_numpy(ids.astype("int64"))
    forms = {
        "sdpa": partial(F.scaled_dot_product_attention, is_causal=True),
        "sticks": FORM["stick_breaking"].long(ATTENTION["stick_breaking"]),
    }
    rows = []
    for name, gpt in (("trained", trained), ("new", GPT(trained.config))):
        for n in sizes:
            gpt.crop_block_size(n)  # it has no positions, so it can be longer
            layers = layers_of(gpt, text[None, :n])
            scale = gpt.config.scale
            far = "; ".join(reach(q, k, scale) for q, k, _ in layers) if n <= 2048 else ""
            share = computed(layers, gpt.config.n_head, scale)
            tasks = {
                key: partial(milliseconds, "cpu", step, form, layers) for key, form in forms.items()
            }
            ratio = ratios(interleaved(tasks, "cpu", repeats), "sticks", "sdpa")["ms"]
            rows.append([name, n, far, f"{share:.0%}", f"{ratio:.2f}x"])
    return {"rows": rows}


def main() -> None:
    kept = measured(
        out, "rows", lengths, repeats, table, positive("lengths", lengths), of=identity(RUN.split())
    )
    columns = "model | tokens | keys back, of each head; layer | pairs of blocks"
    show_table(f"{columns} | time against SDPA", kept["rows"])


if __name__ == "__main__":
    run_script(globals())
