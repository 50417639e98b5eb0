"""What the examples share: flags of the training, a GPTConfig, a training loop, batches with padding, the result."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from configurator import at_least_one
from errors import NotFinite, UserError, refuse
from model import GPTConfig
from training.optimizers import OPTIMIZER, Settings


@dataclass
class Training:
    """Flags of every example's training. Each example has its own defaults of steps, batch_size and learning_rate."""

    # Which optimizer?
    optimizer: Literal[*OPTIMIZER] = "adamw"  # muon trains the matrices of the blocks, and AdamW the other weights
    weight_decay: float = 0.01  # weight decay of matrices and embeddings; biases and norms have none
    beta1: float = 0.9  # AdamW, NAdamW and LAMB: decay rate of the mean of the gradients
    beta2: float = 0.98  # AdamW, NAdamW and LAMB: decay rate of the mean of the squared gradients
    adam_eps: float = 1e-8  # AdamW and NAdamW divide by the root of that mean plus this number
    muon_lr: float = 0.02  # the highest learning rate, of Muon
    warmup_share: float = 0.1  # the share of the steps in which the learning rate grows to its highest value


def gpt_config(config: dict, given: dict, unused: Iterable[str] = (), **sizes: int) -> GPTConfig:
    """The GPTConfig of an example's flags, with other `sizes`. Raises UserError for a given flag that has no effect."""
    refuse((name in (*sizes, *unused), f"--{name} has no effect in this example: leave it out") for name in given)
    check_training(config, given)
    c = GPTConfig(**{field.name: config[field.name] for field in fields(GPTConfig)} | sizes)
    window = c.resolved().window
    refuse([
        (window is not None and window >= c.block_size - 1,
         f"heads={c.heads!r} has short heads, but window={window} covers all {c.block_size} tokens: set --window"),
    ])  # fmt: skip
    return c


def check_training(config: dict, given: dict, *counts: str) -> None:
    """Raises UserError for flags of the training that are wrong or have no effect. counts: more that must be >= 1."""
    at_least_one(**{name: config[name] for name in ("steps", "batch_size", *counts)})
    shares, c = ("beta1", "beta2", "warmup_share"), config
    refuse((c[name] < 0, f"--{name}={c[name]} must not be negative") for name in ("weight_decay", "adam_eps"))
    refuse((not 0 <= c[name] < 1, f"--{name}={c[name]} must be in [0, 1)") for name in shares)
    refuse((not c[name] > 0, f"--{name}={c[name]} must be above 0") for name in ("learning_rate", "muon_lr"))
    unused = {"adam_eps": c["optimizer"] == "lamb", "muon_lr": c["optimizer"] != "muon"}
    refuse((name in given and unused[name], f"--{name} has no effect with {c['optimizer']}") for name in unused)
    refuse([(not 0 <= c["seed"] < 2**31, f"--seed={c['seed']} must be in 0 to 2^31 - 1")])


def fit(model: torch.nn.Module, batch: Callable[[int], tuple], config: dict, device: str) -> None:
    """Trains a model whose model(*batch(step)) is (anything, loss), and prints a line at each tenth of the steps.

    config: an example's flags, with those of Training. After the warm-up the learning rate falls along a cosine.
    Gradients have norm 1 at most. Raises NotFinite for a loss that is NaN or infinite, and UserError for Muon where the
    model is not a GPT.
    """
    c = Training(**{field.name: config[field.name] for field in fields(Training)})
    if c.optimizer == "muon" and not hasattr(model, "transformer"):
        raise UserError("--optimizer=muon is for the blocks of a GPT, and this model is not one: use another optimizer")
    steps, settings = config["steps"], (config["learning_rate"], (c.beta1, c.beta2), c.weight_decay, c.adam_eps)
    optimizers = OPTIMIZER[c.optimizer](model.train(), Settings(*settings, muon_lr=c.muon_lr))
    warmup = max(c.warmup_share, 2 / (steps + 1))
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            o, [group["lr"] for group in o.param_groups], steps + 1, pct_start=warmup, cycle_momentum=False
        )
        for o in optimizers
    ]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {device}, {steps} steps", flush=True)
    began, losses = time.perf_counter(), []
    for step in range(1, steps + 1):
        loss = model(*(x.to(device) for x in batch(step)))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for x in (*optimizers, *schedules):
            x.step()
        model.zero_grad()
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
