"""What an attention costs, and what it can do besides a low loss: speed, recall, longer texts."""

import concurrent.futures
import contextlib
import functools
import importlib
import multiprocessing
from collections.abc import Callable

import torch

from bench import interleaved, peak_memory, ratios
from errors import UserError
from lab.experiments import recall
from lab.experiments.times import milliseconds, write
from model import GPT, GPTConfig
from training.run import DEFAULTS

# Of a model, but not of its attention
SIZES = ("block_size", "vocab_size", "n_layer", "n_embd")


def ratio_of(tasks: list[Callable], repeats: int) -> float:
    """The time of the second task as a ratio to the first's, in rounds of one call each."""
    timed = {i: functools.partial(milliseconds, "cpu", task) for i, task in enumerate(tasks)}
    return ratios(interleaved(timed, "cpu", repeats), 1, 0)["ms"]


def of_layer(base: GPT, idea: GPT) -> dict:
    """{"ratio": the time of the idea's layer to the base's, "bytes": its peak memory}.

    Forward and backward, of one text as long as the models' block_size.
    """

    def passes(gpt: GPT) -> None:
        x = torch.randn(1, gpt.config.block_size, gpt.config.n_embd, requires_grad=True)
        y = gpt.transformer.h[0].attn(x)
        y.backward(y.detach())

    tasks = [functools.partial(passes, gpt) for gpt in (base, idea)]
    return {"ratio": ratio_of(tasks, 3), "bytes": peak_memory(tasks[1], "cpu")}


def of_decoding(base: GPT, idea: GPT) -> dict:
    """Ratios of the idea to the base: the time of block_size tokens, and the size of the cache."""
    tasks = []
    for gpt in (base, idea):
        n = gpt.config.block_size
        tasks.append(functools.partial(write, gpt, n, "cpu", contextlib.nullcontext()))
    return {"ratio": ratio_of(tasks, 5), "cache": tasks[1]() / tasks[0]()}


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
    for module in filter(None, modules):
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
