"""The log of a run while it trains: log.jsonl, the terminal, Weights & Biases."""

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import exists, join
from time import perf_counter
from types import SimpleNamespace
from typing import NoReturn

from errors import UserError, optional
from training import checkpoint, distributed
from training.distributed import by_master, say
from training.estimate import duration


def diverged(step: int, what: object) -> NoReturn:
    """Ends the run with exit code 1, because its numbers, what, are not finite any more."""
    say(
        f"\nstep {step}: {what}: the training has diverged. No checkpoint has such numbers; "
        "a smaller --learning_rate, --grad_clip or --dtype=float32 may help. "
        "docs/training.md says how to see where in the model they begin",
        file=sys.stderr,
    )
    sys.exit(1)


def rows_to_keep(path: str, start: int, evaluates: bool) -> list[str]:
    """The lines of a log that a run which goes on from step `start` will not write again.

    evaluates: whether the run begins with an evaluation.
    """
    kept = []
    with open(path) as f:
        for line in f:
            row = re.fullmatch(r'\{"iter": (\d+).*\}\n', line)  # None: a line that was cut
            end = start
            if '"val_loss": ' in line and not evaluates:
                end += 1
            if row and int(row[1]) < end:
                kept.append(line)
    return kept


@dataclass
class Log:
    """log.jsonl, the terminal and wandb. An older run moves to previous/."""

    config: dict  # train.py's settings
    start: int  # the first step
    wandb_id: str | None  # of a resumed run
    flops: int  # per token
    peak: float | None  # FLOP/s of a GPU
    origin: dict | None = None  # what makes the run: the first row of log.jsonl
    file = None
    wandb = None

    def __post_init__(self):
        self.c = SimpleNamespace(**self.config)
        self.path = join(self.c.out_dir, checkpoint.LOG)
        if not self.c.eval_only:
            by_master(self.open)
        self.began = perf_counter()  # when the steps began that are logged next
        self.logged = self.start  # the number of steps before them

    def open(self) -> None:
        """Opens the logs. A resumed run makes the steps after its checkpoint again."""
        c = self.c
        if c.wandb_log:
            self.wandb = optional("wandb", "--wandb_log")
            try:
                self.wandb.init(
                    project=c.wandb_project,
                    name=c.wandb_run_name,
                    id=self.wandb_id,
                    config=self.config,
                    resume="allow",
                )
            except self.wandb.Error as error:
                raise UserError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from None
            self.wandb_id = self.wandb.run.id
        os.makedirs(c.out_dir, exist_ok=True)
        kept = []
        if c.init_from != "resume":
            if files := checkpoint.move_to_previous(c.out_dir):
                say(f"{c.out_dir} held a run: moved {', '.join(files)} to {c.out_dir}/previous")
        elif exists(self.path):
            evaluates = self.start % c.eval_interval == 0 or self.start == c.max_iters
            kept = rows_to_keep(self.path, self.start, evaluates)
        with open(self.path + ".tmp", "w") as f:
            f.writelines(kept)
        os.replace(self.path + ".tmp", self.path)
        self.file = open(self.path, "a", buffering=1)
        if self.origin is not None:
            self.file.write(json.dumps({"iter": self.start} | self.origin) + "\n")

    def write(self, row: dict, line: str) -> None:
        """Writes a row to the logs, and its line to the terminal."""
        if self.file:
            try:
                self.file.write(json.dumps(row) + "\n")
            except OSError as error:  # a full disk ends no run
                say(f"\ncannot write {self.path} ({error}): training continues without this row")
        say(line)
        if self.wandb:
            values = dict(row)
            for layer, largest in enumerate(values.pop("max_logit", ())):
                values[f"max_logit/{layer}"] = largest
            self.wandb.log(values, step=row["iter"])

    def evaluation(self, step: int, losses: dict[str, float]) -> None:
        """Logs the losses (nats) of the splits after `step` steps."""
        if not all(map(math.isfinite, losses.values())):
            diverged(step, f"the losses of the evaluation are {losses}")
        self.write(
            {"iter": step, "train_loss": losses["train"], "val_loss": losses["val"]},
            f"step {step}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}",
        )

    def step(
        self,
        step: int,
        loss: float,
        norm: float,
        lr: float,
        largest: list[float] | None,
        scaled: bool,
    ) -> None:
        """Logs one step: loss (nats), gradient norm, learning rate, each layer's largest score.

        scaled: float16 loss scaling is on, so an infinite norm is normal.
        """
        if not math.isfinite(loss) or not (math.isfinite(norm) or scaled):
            diverged(step, f"the loss is {loss} and the gradient norm {norm}")
        c = self.c
        seconds = (perf_counter() - self.began) / (step + 1 - self.logged)
        speed = c.batch_size * c.gradient_accumulation_steps * c.block_size / seconds
        ms = seconds * 1e3
        row = {"iter": step, "loss": loss, "lr": lr, "norm": norm, "ms": ms, "tokens_per_s": speed}
        line = f"iter {step}: loss {loss:.4f}, time {ms:.2f}ms, {speed:,.0f} tok/s, norm {norm:.3f}"
        if largest:
            row["max_logit"] = largest
            line += f", largest logit {max(largest):.2f}"
        if step >= self.start + 20:
            line += f", {duration(seconds * (c.max_iters - step - 1))} left"
        if self.peak:
            row["mfu"] = self.flops * speed / (self.peak * distributed.world)
            line += f", mfu {row['mfu'] * 100:.2f}%"
        self.write(row, line)
        self.began = perf_counter()
        self.logged = step + 1

    def close(self) -> None:
        """Waits until wandb has everything."""
        if self.wandb:
            self.wandb.finish()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the enclosed code from the step times."""
        paused = perf_counter()
        yield
        self.began += perf_counter() - paused
