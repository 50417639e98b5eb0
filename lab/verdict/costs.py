"""What an attention costs, and what it can do besides a low loss: speed, recall, longer texts."""

import concurrent.futures
import contextlib
import functools
import importlib
import multiprocessing

import torch
from torch import nn

from bench import interleaved, peak_memory, ratios, stopwatch
from errors import UserError
from lab.experiments import recall
from model import GPT, GPTConfig
from training.run import DEFAULTS

# Of a model, but not of its attention
SIZES = ("block_size", "vocab_size", "n_layer", "n_embd")


def of_layer(gpts: dict[str, GPT], repeats: int) -> dict:
    """{"ratio": time of the last model's layer to the first's, "bytes": its peak memory}.

    Forward and backward, of one text as long as the models' block_size.
    """

    def passes(layer: nn.Module, x: torch.Tensor) -> dict:
        def both() -> None:
            y = layer(x)
            y.backward(y.detach())

        return {"ms": stopwatch("cpu", both)[0]}

    tasks = {}
    for name, gpt in gpts.items():
        x = torch.randn(1, gpt.config.block_size, gpt.config.n_embd, requires_grad=True)
        tasks[name] = functools.partial(passes, gpt.transformer.h[0].attn.train(), x)
    first, last = tasks
    ratio = ratios(interleaved(tasks, "cpu", repeats), last, first)["ms"]
    return {"ratio": ratio, "bytes": peak_memory(tasks[last], "cpu")}


def of_decoding(gpts: dict[str, GPT], repeats: int) -> dict:
    """The time of a token and the size of the cache, each as a ratio of the last to the first."""
    sizes = {}

    @torch.no_grad()
    def write(name: str, gpt: GPT) -> dict:
        cache = gpt.new_cache()
        token = torch.zeros(1, 1, dtype=torch.long)

        def tokens() -> None:
            for _ in range(gpt.config.block_size):
                gpt(token, cache=cache)

        ms = stopwatch("cpu", tokens)[0]
        sizes[name] = cache.nbytes
        return {"ms": ms}

    tasks = {name: functools.partial(write, name, gpt.eval()) for name, gpt in gpts.items()}
    first, last = tasks
    ratio = ratios(interleaved(tasks, "cpu", repeats), last, first)["ms"]
    return {"ratio": ratio, "cache": sizes[last] / max(1, sizes[first])}


def added(flags: dict, extra: dict) -> dict:
    """The fields of GPTConfig in flags, and those in `extra` that they lack and that fit."""
    fields = {key: x for key, x in flags.items() if key in DEFAULTS and key not in SIZES}
    for key, value in extra.items():
        if key not in fields:
            with contextlib.suppress(UserError):
                GPTConfig(**recall.SIZES | {"position": "learned"} | fields | {key: value})
                fields[key] = value
    return fields


def recalled(fields: dict, modules: list[str]) -> dict:
    """The accuracy of a small model in associative recall, {number of pairs: accuracy}."""
    for module in modules:
        importlib.import_module(module)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    runs = []
    for rate in recall.RATES:
        if all(run["trained"] < recall.ENOUGH for run in runs):
            runs.append(recall.fit("pairs", fields, rate, 1))
    return max(runs, key=lambda run: run["trained"])["accuracy"]


def recall_of(all_fields: list[dict], modules: list[str], jobs: int) -> list[dict]:
    """What `recalled` gives for each of these models, in processes of their own."""
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=fresh) as pool:
        return list(pool.map(recalled, all_fields, [modules] * len(all_fields)))
