"""How far back does stick-breaking look, and what does it cost beside PyTorch's softmax (SDPA)?

    OMP_NUM_THREADS=1 python -m lab.experiments.sticks

It trains the CPU config with a context of 512 characters and no positions, unless it has done so before. It prints of
this model and of a new one, for each head, the median number of keys back until 99% of a query's stick is used up. For
texts of --lengths tokens it prints the share of the pairs of blocks that are computed, and the time of attention,
forward and backward, as a ratio to SDPA's in the same round.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from attention.forms import fast_form
from attention.scores import scores, visible
from bench import interleaved, ratios, stopwatch
from configurator import positive
from lab.experiments.laser_precision import layers_of
from lab.experiments.results import show_table, start
from lab.experiments.runs import finished
from lab.ideas import log_sticks
from lab.stick_breaking import BLOCK, cut, walk
from model import ATTENTION, GPT
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model

# What is measured?
out_dir = "out-sticks"  # the folder of the run
lengths = "512,2048,8192"  # tokens of a text, separated by commas: whole blocks
repeats = 5  # rounds of the times

RUN = "config/train_shakespeare_char_cpu.py --import=lab.ideas --attention=stick_breaking --position=none"
RUN += " --block_size=512 --batch_size=2 --eval_iters=108 --max_iters=1500 --lr_decay_iters=1500 --eval_interval=1500"


def reach(q: torch.Tensor, k: torch.Tensor, scale: float) -> str:
    """The median number of keys back until 99% of a stick is used up, or all keys, for the last half of the queries."""
    seen = visible(q, k, None)
    weights = log_sticks(scores(q, k, scale), seen, own_weight=False).exp()
    used = weights.flip(-1).cumsum(-1).flip(-1)  # by a key and those after it
    keys = (seen & (used < 0.99)).sum(-1)[0, :, q.shape[-2] // 2 :]  # the own token counts, the last key does not
    return ", ".join(str(n) for n in keys.median(-1).values.tolist())


def timed(attend: Callable, layers: list) -> dict[str, float]:
    """Milliseconds of a forward and a backward pass of all layers."""

    def step() -> None:
        for x in layers:
            y = attend(*(t.detach().requires_grad_() for t in x))
            y.backward(y.detach())

    return {"ms": stopwatch("cpu", step)[0]}


def main() -> None:
    finished("stick-breaking", RUN.split(), out_dir)
    trained, _, run, about = open_model("resume", out_dir, "best")
    sizes, rows = positive("lengths", lengths), []
    text = torch.from_numpy(Tokens(folder_of(run["dataset"]), "val", 1).ids[: max(sizes)].astype("int64"))
    forms = {"sdpa": partial(F.scaled_dot_product_attention, is_causal=True)}
    forms["sticks"] = fast_form("stick_breaking", ATTENTION["stick_breaking"])
    print(about)
    for name, gpt in (("trained", trained), ("new", GPT(trained.config))):
        for n in sizes:
            gpt.crop_block_size(n)  # it has no positions, so it can be longer
            layers, H, blocks = layers_of(gpt, text[None, :n]), gpt.config.n_head, n // BLOCK
            far = [reach(q, k, gpt.config.scale) for q, k, _ in layers] if n <= 2048 else [""]
            done = sum(len(at) for q, k, _ in layers for at, *_ in walk(cut(q * gpt.config.scale), cut(k), H, 0))
            rounds = interleaved({key: partial(timed, f, layers) for key, f in forms.items()}, "cpu", repeats)
            share = done / (len(layers) * H * blocks * (blocks + 1) / 2)
            rows.append([name, n, "; ".join(far), f"{share:.0%}", f"{ratios(rounds, 'sticks', 'sdpa')['ms']:.2f}x"])
    show_table(["model", "tokens", "keys back, of each head; layer", "pairs of blocks", "time against SDPA"], rows)


if __name__ == "__main__":
    start(globals())
