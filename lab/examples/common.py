"""What the examples share: a GPTConfig from their flags, a training loop, batches with padding, the result line."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import fields

import torch
from torch.nn.utils.rnn import pad_sequence

from configurator import at_least_one
from errors import NotFinite, UserError, refuse
from model import GPTConfig
from training.optimizers import OPTIMIZER, Settings


def gpt_config(config: dict, given: dict, unused: Iterable[str] = (), **sizes: int) -> GPTConfig:
    """The GPTConfig of an example's flags, with other `sizes`. Raises UserError for a given flag that has no effect."""
    for name in (name for name in given if name in (*sizes, *unused)):
        raise UserError(f"--{name} has no effect in this example: leave it out")
    check_training(config)
    c = GPTConfig(**{field.name: config[field.name] for field in fields(GPTConfig)} | sizes)
    window = c.resolved().window
    refuse([
        (window is not None and window >= c.block_size - 1,
         f"heads={c.heads!r} has short heads, but window={window} covers all {c.block_size} tokens: set --window"),
    ])  # fmt: skip
    return c


def check_training(config: dict, *counts: str) -> None:
    """Raises UserError for flags of the training that make no sense. counts: more flags that must be at least 1."""
    at_least_one(**{name: config[name] for name in ("steps", "batch_size", *counts)})
    refuse([
        (not config["learning_rate"] > 0, f"--learning_rate={config['learning_rate']} must be above 0"),
        (not 0 <= config["seed"] < 2**31, f"--seed={config['seed']} must be in 0 to 2^31 - 1"),
    ])  # fmt: skip


def fit(model: torch.nn.Module, batch: Callable[[int], tuple], steps: int, learning_rate: float, device: str) -> None:
    """Trains a model whose model(*batch(step)) is (anything, loss), and prints a line at each tenth of the steps.

    AdamW; a tenth of the steps is warm-up, then the learning rate falls along a cosine. Gradients have norm 1 at most.
    Raises NotFinite for a loss that is NaN or infinite.
    """
    (adamw,) = OPTIMIZER["adamw"](model.train(), Settings(learning_rate, (0.9, 0.98), 0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        adamw, learning_rate, steps + 1, pct_start=max(0.1, 2 / (steps + 1)), cycle_momentum=False
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {device}, {steps} steps", flush=True)
    began, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        loss = model(*(x.to(device) for x in batch(step)))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        schedule.step()
        adamw.zero_grad()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise NotFinite(f"step {step}: the loss is {losses[-1]}; a smaller --learning_rate may help")
        if step * 10 // steps > (step - 1) * 10 // steps:
            mean = sum(losses) / len(losses)
            print(f"step {step}: loss {mean:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
            losses = []
    model.eval()


def generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of a step's batch: a run with the same seed has the same batches."""
    return torch.Generator().manual_seed(seed * 10**6 + step)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(x (B, T, ...), seen (B, T)) of rows (n, ...) of different lengths n. seen: False at the padding after a row."""
    lengths = torch.tensor([len(row) for row in rows])
    return pad_sequence(rows, batch_first=True), torch.arange(lengths.max()) < lengths[:, None]


def result(config: GPTConfig, seed: int, text: str) -> None:
    """Prints the line with an example's result."""
    print(f"result: attention={config.attention} seed={seed} {text}")
