"""What an attention costs, and what else it can do: speed, memory, skills, longer texts.

Each function builds its models itself, so that it can run in a process of its own (`apart`). There
rows are flags of train.py: of what the idea is compared with, then of the idea.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from statistics import fmean, median

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from attention.cache import heads_of
from attention.fast import general_form
from attention.scores import plain_form
from bench import peak_memory
from errors import UserError, first_line
from lab.experiments import recall
from lab.experiments.identity import unchanged
from lab.experiments.runs import import_all
from lab.experiments.times import fresh_processes, milliseconds, model_of, step_of, write
from lab.verdict import checks
from model import GPT, GPTConfig
from text.dataset import Tokens, folder_of
from training.checkpoint import open_model
from training.run import DEFAULTS

LONG = 2048  # tokens of the measured layer
LONGER = 4  # times the context
ROUNDS = 10  # steps of each model in a sitting
# The fields of the opponent's config that an idea may be unable to take, and what stands for none
LEFT_OUT = ({}, {"position": "none"}, {"position": "none", "qk_norm": "none"})
SKILLS = {"pairs": "64", "products": "32"}  # {a task of recall.py: the size that the card shows}
SKILL_RATES = 1.0, 0.5  # of the recipe's
SEEDS = 3  # of a skill


def tried(f: Callable, *args: object) -> dict:
    """f(*args), or {"why": a sentence} if it fails or one of its processes is killed."""
    try:
        return f(*args)
    except BrokenProcessPool:
        return {"why": "its process was killed, perhaps for its memory"}
    except Exception as error:  # of any kind: the other measurements go on
        unchanged()  # but not if code or data were edited
        return {"why": f"{type(error).__name__}: {first_line(error)}"}


def alone(f: Callable, *args: object) -> object:
    """f(*args) on one thread, as the runs."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    return f(*args)


def fitting(flags: dict, settings: dict) -> dict:
    """The flags that an idea needs besides its own: none for positions if it takes no position.

    settings: of a config file. Raises UserError if the idea fits none of LEFT_OUT.
    """
    errors = []
    for more in LEFT_OUT:
        fields = settings | more | flags
        try:
            GPTConfig(**{name: fields[name] for name in DEFAULTS if fields.get(name) is not None})
            return {name: x for name, x in more.items() if name not in flags}
        except UserError as error:
            errors.append(error)
    raise errors[0]


class Clock:
    """Times steps of training of three models in turns: opponent, opponent as written, idea."""

    def __init__(self, config_file: str, rows: list[dict], vocab_size: int):
        self.steps = []
        for flags, plain in ((rows[0], False), (rows[0], True), (rows[1], False)):
            gpt, settings = model_of(config_file, flags, vocab_size)
            for heads in heads_of(gpt):
                if plain:  # as a definition runs that has no fast code
                    heads.run = general_form(heads.definition)
            self.steps.append(step_of(gpt, settings, vocab_size))

    def sitting(self) -> list[float]:
        """[the log of the idea's time to the opponent's, to that as written, the three in ms]."""
        rounds = [[step()["ms"] for step in self.steps] for _ in range(1 + ROUNDS)]
        fast, plain, idea = zip(*rounds[1:], strict=True)
        ms = [median(x) for x in (fast, plain, idea)]
        ratios = [median(map(math.log, map(float.__truediv__, idea, x))) for x in (fast, plain)]
        return [*ratios, *ms]


# what the counter does not know: PyTorch's own attention on a CPU; backward as if it kept weights
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda dy, q, k, v, *_, **__: 2 * sdpa_flop_count(q, k, v)
    ),
}


def of_flops(config_file: str, rows: list[dict], vocab_size: int) -> dict:
    """{"ratio": the FLOPs of the idea's products of matrices to the opponent's}, in one step.

    Those of definitions count, hidden keys included; those of the code that runs only for short
    heads, running sums, and PyTorch's own attention, which LASER takes too.
    """
    counts = []
    for flags in rows:
        gpt, settings = model_of(config_file, flags, vocab_size)
        T = settings["block_size"]
        D = gpt.config.resolved().head_dim
        for heads in heads_of(gpt):
            sums = heads.sums and T >= heads.sums.linear_from(D)
            if heads.window is None and not sums and "fused" not in heads.words:
                heads.run = plain_form(heads.definition)
        x = torch.randint(vocab_size, (1, T))
        with FlopCounterMode(display=False, custom_mapping=FUSED) as counter:
            gpt(x, x)[1].backward()
        counts.append(counter.get_total_flops())
    return {"ratio": counts[1] / counts[0]}


def of_layer(config_file: str, rows: list[dict], vocab_size: int) -> dict:
    """{"ratio": the time of the idea's layer to the opponent's, "bytes": its peak memory}.

    Forward and backward, of one text of LONG tokens.
    """
    layers = []
    for flags in rows:
        gpt = model_of(config_file, flags | {"block_size": LONG}, vocab_size)[0]
        layers.append((gpt.transformer.h[0].attn, gpt.config.n_embd))

    def passes(layer: torch.nn.Module, width: int) -> None:
        x = torch.randn(1, LONG, width, requires_grad=True)
        y = layer(x)
        y.backward(y.detach())

    tasks = [functools.partial(passes, *layer) for layer in layers]
    return {"ratio": ratio_of(tasks, 3), "bytes": peak_memory(tasks[1], "cpu")}


def of_decoding(config_file: str, rows: list[dict], vocab_size: int) -> dict:
    """Ratios of the idea to the opponent: the time of a context's tokens, the size of the cache.

    "why": what is wrong with the idea's cache.
    """
    gpts = [model_of(config_file, flags, vocab_size)[0] for flags in rows]
    wrong = checks.cached(gpts[1])
    tasks = []
    for gpt in gpts:
        n = gpt.config.block_size
        tasks.append(functools.partial(write, gpt, n, "cpu", contextlib.nullcontext()))
    numbers = {"ratio": ratio_of(tasks, 3), "cache": tasks[1]() / tasks[0]()}
    return numbers | ({"why": wrong} if wrong else {})


def ratio_of(tasks: list[Callable], repeats: int) -> float:
    """The time of the second task as a ratio to the first's: the median of rounds."""
    rounds = [[milliseconds("cpu", task)["ms"] for task in tasks] for _ in range(1 + repeats)]
    return median(idea / base for base, idea in rounds[1:])


def of_trained(folders: list[list[str]], modules: list[str]) -> dict:
    """Of trained models, folders of each side's seeds: bfloat16's error, and longer texts.

    {"bfloat16": the ratio of the idea's error to the opponent's, "longer": for each side, for each
    seed, how much higher the loss is on texts LONGER times the context}. Raises UserError where no
    seed of a side has a trained model.
    """
    if not all(folders):
        raise UserError("no trained model")
    import_all(modules)
    bfloat16 = []
    longer = []
    for side in folders:
        errors = []
        rises = []
        for folder in side:
            gpt, _, settings, _ = open_model("resume", folder, "latest")
            T = gpt.config.block_size
            data = folder_of(settings["dataset"])
            errors.append(
                checks.bfloat16_error(gpt, next(Tokens(data, "val", T).eval_batches(1, 8))[0])
            )
            with contextlib.suppress(UserError):  # learned positions end with the context
                gpt.crop_block_size(LONGER * T)
                rises.append(loss_of(gpt, data, LONGER * T) - loss_of(gpt, data, T))
        bfloat16.append(fmean(errors))
        longer.append(rises)
    return {"bfloat16": bfloat16[1] / bfloat16[0], "longer": longer}


@torch.no_grad()
def loss_of(gpt: GPT, data: str, n: int) -> float:
    """The mean loss on windows of n tokens of the validation split, which cover half of it."""
    text = Tokens(data, "val", n)
    gpt.eval()
    return fmean(gpt(x, y)[1].item() for x, y in text.eval_batches(len(text) // (8 * n), 4))


def skill(task: str, fields: dict, recipe: dict, modules: list[str]) -> dict:
    """A small model's accuracy in a task of recall.py, by size: {size: [of each seed]}.

    In the opponent's recipe: its fields and optimizers, at the better of two multiples of its rates
    for the first seed.
    """
    import_all(modules)
    runs = {rate: recall.fit(task, fields, rate, 1, recipe) for rate in SKILL_RATES}
    rate = max(runs, key=lambda rate: runs[rate]["trained"])
    found = [runs[rate]]
    found += [recall.fit(task, fields, rate, seed, recipe) for seed in range(2, SEEDS + 1)]
    return {size: [run["accuracy"][size] for run in found] for size in found[0]["accuracy"]}


def skills(settings: dict, own: dict, modules: list[str], jobs: int) -> dict:
    """{a task: what `skill` gives}. settings: of train.py. own: the side's own flags.

    The model has the recipe's fields of GPTConfig, but recall's sizes; n_head may be the side's.
    """
    sizes = {"block_size", "vocab_size", "n_layer", "n_embd", *({"n_head"} - {*own})}
    fields = {x: settings[x] for x in DEFAULTS if x not in sizes}
    args = fields, settings, modules
    with fresh_processes(jobs) as pool:
        calls = {task: pool.submit(alone, skill, task, *args) for task in SKILLS}
        return {task: call.result() for task, call in calls.items()}
