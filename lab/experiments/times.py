"""What the experiments share: times of training steps, and memory."""

import concurrent.futures
import functools
import importlib
import multiprocessing
import resource
import sys
from collections.abc import Callable

import torch

from bench import interleaved, medians, ratios, stopwatch
from lab.experiments.runs import constants
from lab.experiments.variants import change
from model import GPT, GPTConfig
from training.optimizers import OPTIMIZER, Settings
from training.run import DEFAULTS, model_args


def apart(f: Callable, *args: object) -> object:
    """f(*args) in a fresh process, whose memory is f's alone."""
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(f, *args).result()


def max_rss() -> int:
    """The most bytes of memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def model_of(config_file: str, flags: dict, vocab_size: int) -> tuple[GPT, dict]:
    """(the model that train.py, or variants.py, would build from a config file and flags, all settings).

    vocab_size: the data set's, for a config file that does not name it.
    """
    if "import" in flags:
        importlib.import_module(flags["import"])
    settings = constants("train.py") | {"vocab_size": vocab_size} | constants(config_file) | flags
    return change(GPT(GPTConfig(**model_args(DEFAULTS | settings))), settings.get("variant", "")), settings


def step_times(
    config_file: str, rows: dict[str, dict], vocab_size: int, repeats: int, against: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """Of each row, {name: flags}: milliseconds of a training step, and their ratio to another row's in that round.

    against: {name: the name of that other row}.
    """
    tasks = {}
    for name, flags in rows.items():
        gpt, chosen = model_of(config_file, flags, vocab_size)
        adam = chosen["beta1"], chosen["beta2"]
        settings = Settings(chosen["learning_rate"], adam, chosen["weight_decay"], chosen["adam_eps"])
        x = torch.randint(vocab_size, (chosen["batch_size"], chosen["block_size"]))
        tasks[name] = functools.partial(timed_step, gpt.train(), OPTIMIZER[chosen["optimizer"]](gpt, settings), x)
    rounds = interleaved(tasks, "cpu", repeats)
    return {name: (medians(rounds[name])[0]["ms"], ratios(rounds, name, against[name])["ms"]) for name in rounds}


def timed_step(gpt: GPT, optimizers: list[torch.optim.Optimizer], x: torch.Tensor) -> dict[str, float]:
    """Makes a training step; its milliseconds."""

    def step() -> None:
        gpt(x, x)[1].backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        gpt.zero_grad(set_to_none=True)

    return {"ms": stopwatch("cpu", step)[0]}
