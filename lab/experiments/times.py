"""What the experiments share: times of training steps and of decoding, and memory."""

import concurrent.futures
import functools
import multiprocessing
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace

import torch
from torch import Tensor

from bench import interleaved, medians, ratios, stopwatch
from lab.experiments.runs import end_with_parent, import_all, imports_of, settings_of
from lab.experiments.variants import change
from model import GPT, GPTConfig
from text.dataset import folder_of, prepare_small, read_meta
from training.optimizers import OPTIMIZER
from training.run import DEFAULTS, check_flags, model_args


def milliseconds(dev: str, f: Callable, *args: object) -> dict[str, float]:
    """The time of f(*args) on the device dev."""
    return {"ms": stopwatch(dev, f, *args)[0]}


@torch.no_grad()
def write(gpt: GPT, n: int, dev: str, amp: AbstractContextManager) -> int:
    """Write n tokens, each time the likeliest; return the bytes of the cache.

    amp: autocast, or nothing.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=dev)
    cache = gpt.eval().new_cache()
    with amp:
        for _ in range(n):
            token = gpt(token, cache=cache)[0].argmax(-1)
    return cache.nbytes


def fresh_processes(n: int) -> concurrent.futures.ProcessPoolExecutor:
    """A pool of n processes, each of which ends when this one does, however that is killed."""
    fresh = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(n, fresh, end_with_parent, (os.getpid(),))


def apart(f: Callable, *args: object) -> object:
    """f(*args) in a fresh process, whose memory is f's alone."""
    with fresh_processes(1) as pool:
        return pool.submit(f, *args).result()


def vocab_size_of(dataset: str) -> int:
    """The number of different tokens of a data set. A small one that is missing is prepared."""
    prepare_small(dataset)
    return read_meta(folder_of(dataset))["vocab_size"]


def model_of(config_file: str, flags: dict, vocab_size: int) -> tuple[GPT, dict]:
    """(the model that train.py or variants.py would build, all its settings).

    vocab_size: of the data set, if the config file does not set it. Raises UserError for settings
    that train.py refuses.
    """
    import_all(imports_of(flags))
    settings = DEFAULTS | settings_of(config_file, flags)
    if settings["vocab_size"] is None:
        settings["vocab_size"] = vocab_size
    check_flags(settings, 1)
    gpt = GPT(GPTConfig(**model_args(settings)))
    return change(gpt, settings.get("variant", "")), settings


def step_times(config_file: str, rows: dict, vocab_size: int, repeats: int, against: dict) -> dict:
    """{row: (milliseconds of a training step, their ratio to another row's in the same round)}.

    rows: {name: flags of train.py}. against: {name: the name of that other row}.
    """
    tasks = {}
    for name, flags in rows.items():
        tasks[name] = step_of(*model_of(config_file, flags, vocab_size), vocab_size)
    rounds = interleaved(tasks, "cpu", repeats)
    times = {}
    for name in rounds:
        ms = medians(rounds[name])[0]["ms"]
        times[name] = ms, ratios(rounds, name, against[name])["ms"]
    return times


def step_of(gpt: GPT, settings: dict, vocab_size: int) -> Callable[[], dict]:
    """A `timed_step` of a model on random tokens. settings: train.py's."""
    optimizers = OPTIMIZER[settings["optimizer"]](gpt, SimpleNamespace(**settings))
    x = torch.randint(vocab_size, (settings["batch_size"], settings["block_size"]))
    return functools.partial(timed_step, gpt.train(), optimizers, x)


def timed_step(gpt: GPT, optimizers: list, x: Tensor) -> dict[str, float]:
    """Make a training step on the tokens x (B, T); return its milliseconds."""

    def step() -> None:
        gpt(x, x)[1].backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        gpt.zero_grad(set_to_none=True)

    return milliseconds("cpu", step)
