"""Times whole models with each attention, and finds the sizes of their caches.

    python -m lab.experiments.model_times              # the tables of docs/benchmarks.md
    python -m lab.experiments.model_times --lengths=128 --repeats=3     # a minute or two
    python -m lab.experiments.model_times --what=decode --lengths=8192
    python -m lab.experiments.model_times --device=cuda --dtype=bfloat16 --tokens=32768

--import=my.ideas adds rows for the attentions of a module of your own.

The parts (--what):

forward  a forward pass of the long-short paper's model, as in its Table 1, up to the logits of the
         last token
step     a training step of this model
decode   nanoGPT's Shakespeare model writes one sequence of the likeliest tokens, in at most three
         rounds; the bytes of its cache

A short head sees 50 tokens before its own, or 100 where the text is longer than 2048 tokens. Times
and ratios are as in bench.py's tables.
"""

from collections.abc import Callable
from functools import cache, partial

from configurator import DTYPE, names, pick_device, positive, run_script

import torch

from attention.forms import FORM
from bench import clock, interleaved, table
from lab.experiments.results import save
from lab.experiments.times import milliseconds, write
from model import ATTENTION, GPT, GPTConfig

# What is measured?
what = ""  # the parts: forward, step, decode, separated by commas; empty: all
# How large are the inputs?
lengths = ""  # sequence lengths in tokens; empty: forward 2048,8192, step and decode 1024
batch_size = 2  # forward, step: sequences at once
tokens = 0  # tokens at once: sets the number of sequences instead of batch_size; 0: batch_size does
heads = "SSSSSL"  # in rows with short heads, a letter for each head of a layer: S short, L long
# How exact?
repeats = 9  # rounds; in each round every model runs once
# Where do the results go?
out = "model-times.json"  # the file of results
# What does it run on?
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: DTYPE = "auto"  # of autocast
seed = 1337  # decides the random numbers: weights and tokens

# The long-short paper's model (section 5.1). The paper does not say which GELU: this is PyTorch's
# default, and faster on a CPU
LS_MODEL = {"n_layer": 6, "n_head": 6, "n_embd": 192, "vocab_size": 10000, "mlp": "gelu_exact"}
# nanoGPT's Shakespeare model
GPT_10M = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}


def models(dev: str, n: int, sizes: dict) -> dict:
    """{name: model} for texts of n tokens, for each attention with long heads and with --heads.

    The last two are softmax with fewer heads of keys and values: GQA and MQA.
    """
    rows = {}
    for name, definition in ATTENTION.items():
        if isinstance(definition, type):
            continue
        rows[f"{name} L"] = {"attention": name}
        rows[f"{name} {heads}"] = {"attention": name, "heads": heads}
    if {"S", "L"} <= set(heads):  # softmax in short heads, another attention in long heads
        mixed = {"short_attention": "softmax", "heads": heads, "conv": 4}
        for name, form in FORM.items():
            if form.sums is not None:
                rows[f"softmax/{name} conv {heads}"] = mixed | {"attention": name}
    rows |= {"softmax L, GQA 2": {"n_kv_head": 2}, "softmax L, MQA": {"n_kv_head": 1}}
    gpts = {}
    for name, fields in rows.items():
        gpts[name] = GPT(GPTConfig(block_size=n, **sizes | fields)).to(dev)
    return gpts


def timed(title: str, run: Callable, dev: str, n: int) -> list[dict]:
    """Time run(gpt, x) on random tokens x (B, n); print a table and return its rows."""
    B = max(1, tokens // n) if tokens else batch_size
    x = torch.randint(LS_MODEL["vocab_size"], (B, n), device=dev)
    tasks = {}
    for name, gpt in models(dev, n, LS_MODEL).items():
        tasks[name] = partial(milliseconds, dev, run, gpt, x)
    rounds = interleaved(tasks, dev, repeats)
    return table(title, {"n": n, "batch": B}, rounds, {})


def forward(dev: str, amp: object, n: int) -> list[dict]:
    """Time a forward pass of texts of n tokens."""

    @torch.no_grad()
    def last_logits(gpt, x):
        with amp:
            gpt(x)

    return timed("forward pass", last_logits, dev, n)


def step(dev: str, amp: object, n: int) -> list[dict]:
    """Time a training step on texts of n tokens."""

    @cache  # the first round, which does not count, makes the optimizer
    def adamw(gpt):
        return torch.optim.AdamW(gpt.parameters(), fused=True)

    def train(gpt, x):
        with amp:
            loss = gpt(x, x)[1]
        loss.backward()
        adamw(gpt).step()
        adamw(gpt).zero_grad()

    return timed("training step", train, dev, n)


def decode(dev: str, amp: object, n: int) -> list[dict]:
    """Time how a model writes n tokens; print a table and return its rows."""
    tasks = {}
    sizes = {}

    def speed(name, gpt):
        began = clock(dev)
        sizes[name] = {"cache, bytes": write(gpt, n, dev, amp)}
        return {"tokens/s": n / (clock(dev) - began)}

    for name, gpt in models(dev, n, GPT_10M).items():
        tasks[name] = partial(speed, name, gpt)
    rounds = interleaved(tasks, dev, min(repeats, 3))
    return table("decoding one sequence", {"n": n}, rounds, sizes)


# {part: (what measures one length, its lengths)}
PARTS = {
    "forward": (forward, "2048,8192"),
    "step": (step, "1024"),
    "decode": (decode, "1024"),
}


def main() -> None:
    chosen = names(what, PARTS)
    GPTConfig(heads=heads, window=50, **LS_MODEL)  # raises UserError for heads without an S
    dev, precision, amp = pick_device(device, dtype)
    torch.set_float32_matmul_precision("high")
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
    about = {
        "device": dev,
        "dtype": precision,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "heads": heads,
        "repeats": repeats,
    }
    print(about)
    results = {"about": about}
    for part in chosen:
        measure, usual = PARTS[part]
        results[part] = []
        for n in positive("lengths", lengths or usual):
            results[part] += measure(dev, amp, n)
            save(out, results)
    print(f"\nwrote {out}")


if __name__ == "__main__":
    run_script(globals())
