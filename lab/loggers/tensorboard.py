"""Logs a run to TensorBoard too, in the folder `tensorboard` of its out_dir.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.loggers.tensorboard
    tensorboard --logdir=.

Both need `pip install tensorboard`.
"""

import os

from errors import optional
from training.log import Log

optional("tensorboard", "--import=lab.loggers.tensorboard")
from torch.utils.tensorboard import SummaryWriter  # noqa: E402

open_log = Log.open


class Board:
    """A TensorBoard that Log takes for wandb: it gets the same values, and passes them on."""

    def __init__(self, folder: str, start: int, wandb: object | None):
        self.writer = SummaryWriter(folder, purge_step=start)
        self.wandb = wandb

    def log(self, values: dict, step: int) -> None:
        for name, x in values.items():
            if isinstance(x, float):
                self.writer.add_scalar(name, x, step)
        if self.wandb:
            self.wandb.log(values, step=step)

    def finish(self) -> None:
        self.writer.close()
        if self.wandb:
            self.wandb.finish()


def open_with_board(self) -> None:
    """Log.open, and a Board. From the run's first step on it hides what an older run wrote."""
    open_log(self)
    folder = os.path.join(self.c.out_dir, "tensorboard")
    self.wandb = Board(folder, self.start, self.wandb)
    settings = "".join(f"    {name} = {x!r}\n" for name, x in vars(self.c).items())
    self.wandb.writer.add_text("settings", settings)


Log.open = open_with_board
