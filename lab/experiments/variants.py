"""Changes of GPT-2 for which GPTConfig has no field: rows of Narang et al. 2021, and beta's maps.

    python -m lab.experiments.variants config/train_shakespeare_char_cpu.py --variant=rezero
    python -m lab.experiments.variants config/train_gpt2.py --variant=factorised,shared

This script runs train.py with a changed GPT. It takes all flags of train.py and --variant: names in
VARIANT, separated by commas; without --variant it trains the model as it is. A variant is a
function that changes a new GPT. The tables of compare.py that use it are narang ("Do Transformer
Modifications Transfer Across Implementations and Applications?"), maps and ideas. A variant's
matrices begin as GPT-2's, normal with standard deviation 0.02, unless its docstring says otherwise.
"""

import copy
import operator
import runpy
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

from configurator import names

import torch
from torch import nn
from torch.nn import functional as F

from attention.fast import general_form
from errors import UserError
from model import GPT

# -----------------------------------------------------------------------------
# Residual branches without norms


class Number(nn.Module):
    """op(x, number), with one learned number."""

    def __init__(self, op: Callable, start: float):
        super().__init__()
        self.op = op
        self.number = nn.Parameter(torch.tensor([start]))

    def forward(self, x):
        return self.op(x, self.number.to(x.dtype))


added = partial(Number, operator.add, 0.0)  # x + a
scaled = partial(Number, operator.mul)  # a x


def rezero(gpt: GPT, norms: bool = False) -> None:
    """x + a f(x), where each sublayer's number a begins at 0 (ReZero, Bachlechner et al. 2020).

    norms: keep the norms, as in Narang et al.'s rows "Rezero + LayerNorm" and "Rezero + RMS Norm".
    """
    if gpt.config.where != "pre":
        raise UserError(f"this variant is for where='pre', not {gpt.config.where!r}")
    for block in gpt.transformer.h:
        block.ln_1_after = scaled(0.0)
        block.ln_2_after = scaled(0.0)
        if not norms:
            block.ln_1 = block.ln_2 = nn.Identity()
    if not norms:
        gpt.transformer.ln_f = nn.Identity()


def fixup(gpt: GPT) -> None:
    """No norms, and other first weights (Fixup, Zhang et al. 2019, section 3).

    With L branches of m = 2 matrices each:

    1. The last matrix of a branch begins at 0. (In the paper the head begins at 0 too; here the
       head is the embedding, and does not.)
    2. The first matrix of a branch begins as He et al.'s, sqrt(2 / fan_in), times
       L^(-1 / (2m - 2)). In attention the first matrix is c_attn.
    3. A learned number is added before each matrix and activation; another multiplies the branch.
    """
    rezero(gpt)
    branches = 2 * gpt.config.n_layer
    for block in gpt.transformer.h:
        block.ln_1 = added()
        block.ln_2 = added()
        block.ln_1_after = scaled(1.0)
        block.ln_2_after = scaled(1.0)
        for first in (block.attn.c_attn, block.mlp.c_fc):
            nn.init.normal_(first.weight, std=(2 / first.in_features / branches) ** 0.5)
        block.mlp.c_fc = nn.Sequential(block.mlp.c_fc, added())
        for branch in (block.attn, block.mlp):
            nn.init.zeros_(branch.c_proj.weight)
            branch.c_proj = nn.Sequential(added(), branch.c_proj)


# -----------------------------------------------------------------------------
# Fewer weights


def factorised(gpt: GPT) -> None:
    """The embedding is V x E times E x C, with E = C / 6 as Narang et al.'s 128 of 768.

    (ALBERT, Lan et al. 2019.) If tied, the head is C x E times E x V and shares the V x E numbers
    ("Factorized & shared embeddings"); if not, the head stays V x C ("Factorized Embedding"). The
    E x C and C x E matrices begin with a standard deviation of fan_in^-0.5, so that the token
    embedding is as large as without them.
    """
    V, C = gpt.config.vocab_size, gpt.config.n_embd
    E = max(1, C // 6)
    embedding = nn.Embedding(V, E)
    up = nn.Linear(E, C, bias=False)
    down = nn.Linear(C, E, bias=False)
    head = nn.Linear(E, V, bias=False)
    nn.init.normal_(embedding.weight, std=0.02)
    nn.init.normal_(up.weight, std=E**-0.5)
    nn.init.normal_(down.weight, std=C**-0.5)
    gpt.transformer.wte = nn.Sequential(embedding, up)
    if gpt.config.tied:
        head.weight = embedding.weight
        gpt.lm_head = nn.Sequential(down, head)


def shared(gpt: GPT) -> None:
    """The first block's weights in all blocks ("Block sharing"; ALBERT)."""
    blocks = gpt.transformer.h
    first = blocks[0]
    for i in range(1, len(blocks)):
        # shallow copies share all weights; a cache keeps the past of each copy
        attn = copy.copy(first.attn)
        attn.heads = list(map(copy.copy, attn.heads))
        attn._modules = attn._modules | {"conv": copy.copy(attn.conv)}
        blocks[i] = copy.copy(first)
        blocks[i]._modules = first._modules | {"attn": attn}


# -----------------------------------------------------------------------------
# Layers of lab/ideas/after.py, of mixed heads


def after(gpt: GPT, name: str) -> None:
    """A gate or differential V2 after short and long heads with an attention each."""
    from lab.ideas.after import AFTER  # here, since it adds to model.ATTENTION

    c = gpt.config.resolved()
    for layer, block in enumerate(gpt.transformer.h):
        block.attn = AFTER[name](c, layer).apply(gpt._init_weights)
        nn.init.normal_(block.attn.c_proj.weight, std=0.02 / (2 * c.n_layer) ** 0.5)


# -----------------------------------------------------------------------------
# Beta with another map than x / (1 + ||x||): y = map(s) v

MAPS = {
    # x / ||x||, homogeneous of degree 0: the size of the scores is lost
    "unit": lambda x: F.normalize(x, dim=-1),
    # into the unit ball as beta; smooth at 0 too
    "root": lambda x: x / (1 + x.square().sum(-1, keepdim=True)).sqrt(),
    # y is not larger than the largest value, as in softmax
    "l1": lambda x: x / (1 + x.abs().sum(-1, keepdim=True)),
    # many weights can be near 1 together
    "max": lambda x: x / (1 + x.abs().amax(-1, keepdim=True)),
}


def beta_map(gpt: GPT, name: str) -> None:
    """Every head with beta has a map of MAPS, by its definition: no running sums."""
    if gpt.config.attention != "beta":
        raise UserError("this variant changes the map of beta: add --attention=beta")

    def attention(s, seen, v, drop, fade):
        return drop(MAPS[name](fade(s).where(seen, 0.0))) @ v

    for block in gpt.transformer.h:
        for heads in block.attn.heads:
            if heads.name == "beta":
                heads.definition = attention
                heads.run = general_form(attention)
                heads.sums = None


# -----------------------------------------------------------------------------

VARIANT = {  # several variants are made in this order
    "rezero": rezero,
    "rezero_norm": partial(rezero, norms=True),
    "fixup": fixup,
    "factorised": factorised,
    **{f"after_{name}": partial(after, name=name) for name in ("gate", "differential_v2")},
    **{f"beta_{name}": partial(beta_map, name=name) for name in MAPS},
    "shared": shared,
    # weights and all that is computed with them (LASER paper, table 11)
    "bfloat16": lambda gpt: gpt.bfloat16(),
}


def change(gpt: GPT, variants: str) -> GPT:
    """Change a new GPT and return it. variants: names in VARIANT, separated by commas.

    Raises UserError for an unknown variant, and for one that does not fit the GPT.
    """
    wanted = names(variants, VARIANT) if variants else []
    for name, variant in VARIANT.items():
        if name in wanted:
            variant(gpt)
    return gpt


def main() -> None:
    given = [arg for arg in sys.argv if arg.startswith("--variant=")]
    sys.argv = [arg for arg in sys.argv if arg not in given]
    variants = ",".join(arg.removeprefix("--variant=") for arg in given)
    init = GPT.__init__

    def changed(self, config):
        init(self, config)
        change(self, variants)

    with mock.patch.object(GPT, "__init__", changed):
        runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
