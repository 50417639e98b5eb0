"""What the examples share: a GPTConfig from their flags, a training loop, and the lines that they print."""

import time
from collections.abc import Callable, Iterable
from dataclasses import fields

import torch

from configurator import at_least_one
from errors import UserError
from model import GPTConfig
from training.optimizers import OPTIMIZER, Settings


def gpt_config(config: dict, given: dict, unused: Iterable[str] = (), **sizes: int) -> GPTConfig:
    """The GPTConfig of an example's flags, with other `sizes`. Raises UserError for a given flag that is `unused`."""
    for name in (name for name in given if name in (*sizes, *unused)):
        raise UserError(f"--{name} has no effect in this example: leave it out")
    at_least_one(steps=config["steps"], batch_size=config["batch_size"])
    return GPTConfig(**{field.name: config[field.name] for field in fields(GPTConfig)} | sizes)


def fit(model: torch.nn.Module, batch: Callable[[int], tuple], steps: int, learning_rate: float, device: str) -> None:
    """Trains a model whose model(*batch(step)) is (anything, loss), and prints ten lines about it.

    AdamW; a tenth of the steps is warm-up, then the learning rate falls along a cosine. Gradients have norm 1 at most.
    """
    (adamw,) = OPTIMIZER["adamw"](model.train(), Settings(learning_rate, (0.9, 0.98), 0.01))
    schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, learning_rate, steps + 1, pct_start=0.1, cycle_momentum=False)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {device}, {steps} steps", flush=True)
    began, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        loss = model(*(x if x is None else x.to(device) for x in batch(step)))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        schedule.step()
        adamw.zero_grad()
        losses.append(loss.item())
        if step % max(1, steps // 10) == 0:
            mean = sum(losses) / len(losses)
            print(f"step {step}: loss {mean:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
            losses = []
    model.eval()


def result(config: GPTConfig, seed: int, text: str) -> None:
    """Prints the line with an example's result."""
    print(f"result: attention={config.attention} seed={seed} {text}")
