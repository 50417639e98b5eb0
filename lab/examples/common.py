"""What the examples share: flags, a GPTConfig, the training loop, padded batches, the result."""

import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import OneCycleLR

from configurator import at_least_one, configure, pick_device, user_errors
from errors import NotFinite, UserError, optional, out_of_range, refuse
from model import ATTENTION, GPTConfig
from training.optimizers import OPTIMIZER


@dataclass
class Training:
    """The training's flags. Steps, batch_size and learning_rate are flags of each example."""

    # Which optimizer?
    optimizer: "Literal[*OPTIMIZER]" = "adamw"  # muon: for the blocks of a GPT, at a rate of 0.02
    weight_decay: float = 0.01  # of matrices and embeddings; biases and norms are not decayed
    beta1: float = 0.9  # all but Muon: decay rate of the mean of the gradients
    beta2: float = 0.98  # all but Muon: decay rate of the mean of the squared gradients
    adam_eps: float | None = None  # is added to the root of that mean; None: the optimizer's own
    warmup_share: float = 0.1  # the share of the steps in which the learning rate grows


@user_errors()
def run_example(script: dict, *dataclasses: type) -> None:
    """Set the flags of an example, given by its globals(), and call its main(config, given).

    dataclasses: classes whose fields are flags as well, beside those of Training.
    """
    config, given = configure(script, *dataclasses, Training)
    check(config)
    config["device"], _, _ = pick_device(config["device"], "float32")
    script.update(config)
    script["main"](config, given)


def check(config: dict) -> None:
    """Raise UserError for wrong flags of the training, or if the picture cannot be written."""
    at_least_one(steps=config["steps"], batch_size=config["batch_size"])
    ranges = [
        ("weight_decay adam_eps", lambda x: x >= 0, "0 or more"),
        ("beta1 beta2 warmup_share", lambda x: 0 <= x < 1, "in [0, 1)"),
        ("learning_rate", lambda x: x > 0, "above 0"),
        ("seed", lambda x: 0 <= x < 2**31, "in 0 to 2^31 - 1"),
    ]
    refuse(out_of_range(config, ranges))
    if config.get("picture"):
        optional("matplotlib", "--picture")
        folder = os.path.dirname(os.path.abspath(config["picture"]))
        if not os.access(folder, os.W_OK):
            raise UserError(f"--picture: no file can be written in {folder}")


def gpt_config(config: dict, given: dict, unused: Iterable[str] = (), **sizes: int) -> GPTConfig:
    """The GPTConfig of an example's flags, with `sizes` in place of their flags.

    Raises UserError for wrong flags, for given flags that are in `sizes` or `unused`, and for an
    attention that is a whole layer: it sees the tokens before its own.
    """
    for name in given:
        if name in sizes or name in unused:
            raise UserError(f"--{name} has no effect in this example: leave it out")
    for name in (config["attention"], config["short_attention"]):
        if isinstance(ATTENTION.get(name), type):
            raise UserError(f"attention={name!r} is a whole layer of a GPT: use another one here")

    flags = {field.name: config[field.name] for field in fields(GPTConfig)}
    c = GPTConfig(**flags | sizes)
    window = c.resolved().window
    if window is not None and window >= c.block_size - 1:
        raise UserError(
            f"heads={c.heads!r} has short heads, but window={window} covers all "
            f"{c.block_size} tokens: set --window"
        )
    return c


def fit(model: torch.nn.Module, batch: Callable, config: dict) -> None:
    """Train a model; print the mean loss after each tenth of the steps.

    batch(step) -> the inputs of a step, a tuple of tensors. model(*inputs) -> (anything, loss).
    config: an example's flags, with those of Training. Gradients are clipped to a norm of 1.
    Raises NotFinite for a loss that is NaN or infinite.
    """
    steps = config["steps"]
    device = config["device"]
    if config["optimizer"] == "muon" and not hasattr(model, "transformer"):
        raise UserError("--optimizer=muon is for a GPT, and this model is none: use another one")
    settings = SimpleNamespace(**config, muon_lr=0.02, muon_beta=0.95)
    optimizers = OPTIMIZER[config["optimizer"]](model.train(), settings)
    schedules = [warmup_and_cosine(optimizer, config) for optimizer in optimizers]
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters:,} parameters, {device}, {steps} steps", flush=True)

    began = time.perf_counter()
    losses = []
    for step in range(1, steps + 1):
        _, loss = model(*[x.to(device) for x in batch(step)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        model.zero_grad()

        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise NotFinite(
                f"step {step}: the loss is {losses[-1]}; a smaller --learning_rate may help"
            )

        # after each tenth of the steps
        if step * 10 // steps > (step - 1) * 10 // steps:
            mean = sum(losses) / len(losses)
            seconds = time.perf_counter() - began
            print(f"step {step}: loss {mean:.3f}, {seconds:.0f} s", flush=True)
            losses = []
    model.eval()


def warmup_and_cosine(optimizer: torch.optim.Optimizer, config: dict) -> OneCycleLR:
    """The schedule of an optimizer's learning rate: after the warm-up it falls along a cosine."""
    total = config["steps"] + 1
    return OneCycleLR(
        optimizer,
        max_lr=optimizer.defaults["lr"],
        total_steps=total,
        pct_start=max(config["warmup_share"], 2 / total),
        cycle_momentum=False,
    )


def generator(seed: int, step: int) -> torch.Generator:
    """The random numbers of a step's batch: equal seeds give equal batches."""
    return torch.Generator().manual_seed(seed * 10**6 + step)


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(x (B, T, ...), seen (B, T)) of rows (n, ...) whose lengths n differ.

    seen is False at the padding, which follows a row.
    """
    lengths = torch.tensor([len(row) for row in rows])
    seen = torch.arange(lengths.max()) < lengths[:, None]
    return pad_sequence(rows, batch_first=True), seen


def result(config: GPTConfig, seed: int, text: str) -> None:
    """Print the line with an example's result."""
    print(f"result: attention={config.attention} seed={seed} {text}")
