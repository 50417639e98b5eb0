"""How far back does stick-breaking look, and what does it cost beside PyTorch's softmax (SDPA)?

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas --attention=stick_breaking --position=none \
        --block_size=512 --batch_size=2 --eval_iters=108 --max_iters=1500 --lr_decay_iters=1500 --out_dir=out-sticks
    python -m lab.experiments.sticks --import=lab.ideas --out_dir=out-sticks

The first table has, for each layer of the trained model, of each head: the median number of keys back until 99% of a
query's stick is used up. The second has, for texts of --lengths tokens and the queries, keys and values of the trained
model and of a new one: the share of the pairs of blocks that are computed, and the time of attention, forward and
backward, as a ratio to SDPA's in the same round.
"""

import math
from functools import partial

import torch
from torch.nn import functional as F

from attention.forms import fast_form
from attention.probe import probing
from attention.scores import scores, visible
from bench import interleaved, ratios, stopwatch
from configurator import positive
from lab.experiments.results import show_table, start
from lab.stick_breaking import cut, walk
from model import ATTENTION, GPT
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model

out_dir = "out-sticks"  # the folder that train.py wrote: a model with --attention=stick_breaking --position=none
lengths = "512,2048,8192"  # tokens of a text, separated by commas: whole blocks
repeats = 5  # rounds of the times


def reach(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """The number of keys back until 1% of a stick is left, or all keys: (B, H, T)."""
    before = visible(q, k, None).tril(-1)
    not_taken = F.logsigmoid(-scores(q, k, scale)).where(before, 0.0)
    left = not_taken.flip(-1).cumsum(-1).flip(-1)  # after this key
    return ((left > math.log(0.01)) & before).sum(-1) + 1


def layers_of(gpt: GPT, idx: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """q, k and v of each layer, (1, H, T, D)."""
    found = []
    with torch.no_grad(), probing(gpt.eval(), lambda layer, group, q, k, v, **_: found.append((q, k, v))):
        gpt(idx)
    return found


def timed(attend: object, parts: list) -> dict[str, float]:
    """Milliseconds of a forward and a backward pass, of all layers."""

    def step() -> None:
        for x in parts:
            y = attend(*(t.detach().requires_grad_() for t in x))
            y.backward(y.detach())

    return {"ms": stopwatch("cpu", step)[0]}


def main() -> None:
    gpt, _, run, about = open_model("resume", out_dir, "best")
    text = torch.from_numpy(
        Tokens(folder_of(run["dataset"]), "val", 1).ids[: max(positive("lengths", lengths))].astype(int)
    )
    print(about)
    fast, scale, rows = fast_form("stick_breaking", ATTENTION["stick_breaking"]), gpt.config.scale, []
    size = gpt.config.block_size
    far = [
        reach(q, k, scale)[0, :, size // 2 :].float().median(-1).values for q, k, _ in layers_of(gpt, text[None, :size])
    ]
    show_table(["layer", *range(gpt.config.n_head)], [[i, *(f"{x:.0f}" for x in row)] for i, row in enumerate(far)])
    for name, model in (("trained", gpt), ("new", GPT(gpt.config))):
        for n in positive("lengths", lengths):
            model.crop_block_size(n)
            parts = layers_of(model, text[None, :n])
            heads, blocks = gpt.config.n_head, n // 64
            done = sum(len(at) for q, k, _ in parts for at, *_ in walk(cut(q * scale), cut(k), heads, 0))
            share = done / (len(parts) * heads * blocks * (blocks + 1) / 2)
            tasks = {"sdpa": partial(F.scaled_dot_product_attention, is_causal=True), "sticks": fast}
            rounds = interleaved({key: partial(timed, f, parts) for key, f in tasks.items()}, "cpu", repeats)
            rows.append([name, n, f"{share:.0%}", f"{ratios(rounds, 'sticks', 'sdpa')['ms']:.2f}x"])
    show_table(["model", "tokens", "pairs of blocks computed", "time against SDPA"], rows)


if __name__ == "__main__":
    start(globals())
