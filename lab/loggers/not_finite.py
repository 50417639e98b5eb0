"""Ends a run where a number first is not finite, and says in which module.

    python train.py config/train_shakespeare_char_cpu.py --init_from=resume \
        --import=lab.loggers.not_finite

After a run that has diverged, this makes the steps since its last checkpoint again. Each output of
each module is looked at, so the steps are slower. With a compiled model it does not work
(--no-compile).
"""

import sys

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from errors import note
from model import GPT

names = {}  # of the modules of the model that runs


def name_modules(module: nn.Module, args: tuple) -> None:
    if isinstance(module, GPT):
        names.update((part, name or "the model") for name, part in module.named_modules())


def look(module: nn.Module, args: tuple, output: object) -> None:
    """End with exit code 1 if an output is not finite; says whether the weights are."""
    if module not in names or not torch.is_tensor(output) or output.isfinite().all():
        return
    weights = [name for name, p in module.named_parameters() if not p.isfinite().all()]
    because = f": its weights are not finite either ({', '.join(weights)})" if weights else ""
    note(f"\nThe output of {names[module]} is the first that is not finite{because}")
    sys.exit(1)


hooks = [register_module_forward_pre_hook(name_modules), register_module_forward_hook(look)]
