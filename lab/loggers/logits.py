"""Logs the largest absolute attention score of each layer too, as max_logit.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.loggers.logits

It explodes if training is unstable (long-short paper, figure 1b). Each logged step costs one more
forward pass, on its first micro-batch.
"""

import sys

from lab.look.probe import max_abs_scores
from training.log import Log

log_step = Log.step
write = Log.write
scores = []  # of the layers, at the step that is logged


def step_with_scores(self, *args, **kwargs) -> None:
    """Log.step, with the scores in its row and in its line.

    Every process calls it: with FSDP each has a part of the weights.
    """
    main = sys.modules["__main__"]
    idx = main.batch[0].tensor_split(main.micro_steps)[0]
    main.raw_model.eval()
    with main.amp:
        scores[:] = max_abs_scores(main.raw_model, idx)
    main.raw_model.train()
    log_step(self, *args, **kwargs)


def write_with_scores(self, row: dict, line: str) -> None:
    if "loss" in row and scores:
        row["max_logit"] = list(scores)
        line += f", largest logit {max(scores):.2f}"
        if self.wandb:
            of_layers = {f"max_logit/{layer}": score for layer, score in enumerate(scores)}
            self.wandb.log(of_layers, step=row["iter"])
    write(self, row, line)


Log.step = step_with_scores
Log.write = write_with_scores
