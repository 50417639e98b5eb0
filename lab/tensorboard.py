"""Logs a run to TensorBoard too, in the folder `tensorboard` of its out_dir.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.tensorboard
    tensorboard --logdir=.

Both need `pip install tensorboard`.
"""

import os
import shutil
from os.path import exists, join

from errors import optional
from training.log import Log

optional("tensorboard", "--import=lab.tensorboard")
from torch.utils.tensorboard import SummaryWriter  # noqa: E402


class WithBoard:
    """Log's methods, and the same for TensorBoard."""

    open = Log.open
    write = Log.write
    close = Log.close


def open_board(self) -> None:
    """An older run's folder moves to previous/. A run that resumes goes on with its own."""
    WithBoard.open(self)
    folder = join(self.c.out_dir, "tensorboard")
    if self.c.init_from != "resume" and exists(folder):
        previous = join(self.c.out_dir, "previous")
        os.makedirs(previous, exist_ok=True)
        shutil.rmtree(join(previous, "tensorboard"), ignore_errors=True)
        os.replace(folder, join(previous, "tensorboard"))
    self.board = SummaryWriter(folder, purge_step=self.start)
    settings = "".join(f"    {name} = {x!r}\n" for name, x in self.config.items())
    self.board.add_text("settings", settings)


def write_board(self, row: dict, line: str) -> None:
    WithBoard.write(self, row, line)
    if self.file:  # on the first process
        values = dict(row)
        step = values.pop("iter")
        for layer, largest in enumerate(values.pop("max_logit", ())):
            values[f"max_logit/{layer}"] = largest
        for name, x in values.items():
            self.board.add_scalar(name, x, step)


def close_board(self) -> None:
    WithBoard.close(self)
    if self.file:
        self.board.close()


Log.open = open_board
Log.write = write_board
Log.close = close_board
