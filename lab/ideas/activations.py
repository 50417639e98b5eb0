"""More activations of the MLP, of Narang et al. 2021 and Shazeer 2020.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas.activations --mlp=reglu

Importing this file adds them to parts.ACTIVATION.
"""

from torch.nn import functional as F

from parts import ACTIVATION

ACTIVATION |= {
    "swish": (F.silu, False),  # SiLU
    "elu": (F.elu, False),
    "selu": (F.selu, False),
    "sigmoid": (F.sigmoid, False),
    "softplus": (F.softplus, False),
    "glu": (F.sigmoid, True),
    "reglu": (F.relu, True),
    "liglu": (lambda x: x, True),  # called bilinear by Shazeer
}
