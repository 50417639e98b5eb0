"""Changes of GPT-2 that GPTConfig has no field for, trained by train.py: rows of Narang et al. 2021, and beta's maps.

    python -m lab.experiments.variants config/train_shakespeare_char_cpu.py --variant=rezero
    python -m lab.experiments.variants config/train_shakespeare_char_cpu.py --variant=factorised,shared

This script runs in the place of train.py. It takes all of its flags and --variant: names in VARIANT, separated by
commas; without --variant it trains the model as it is. A variant is a function that changes a new GPT. The tables of
compare.py that use it are narang ("Do Transformer Modifications Transfer Across Implementations and Applications?"),
maps and qkv. If a variant says nothing else, its matrices begin as GPT-2's: normal, with standard deviation 0.02.
"""

import copy
import operator
import runpy
import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.forms import fast_form
from configurator import names
from errors import refuse
from model import GPT

# -----------------------------------------------------------------------------
# Residual branches without norms


class Number(nn.Module):
    """op(x, number), with one learned number."""

    def __init__(self, op: Callable, start: float):
        super().__init__()
        self.op, self.number = op, nn.Parameter(torch.tensor([start]))

    def forward(self, x):
        return self.op(x, self.number.to(x.dtype))


def rezero(gpt: GPT, norms: bool = False) -> None:
    """x + a f(x): each sublayer has its own number a, which begins at 0 (ReZero, Bachlechner et al. 2020).

    norms: the norms of pre-norm stay, as in Narang et al.'s rows "Rezero + LayerNorm" and "Rezero + RMS Norm".
    """
    refuse([(gpt.config.where != "pre", f"this variant is for where='pre', not {gpt.config.where!r}")])
    for block in gpt.transformer.h:
        block.ln_1_after, block.ln_2_after = Number(operator.mul, 0.0), Number(operator.mul, 0.0)
        if not norms:
            block.ln_1 = block.ln_2 = nn.Identity()
    if not norms:
        gpt.transformer.ln_f = nn.Identity()


def fixup(gpt: GPT) -> None:
    """No norms, and other first weights (Fixup, Zhang et al. 2019, section 3), for L branches of m = 2 matrices each:

    1. The last matrix of a branch begins at 0. (So does the head in the paper. Here it is the embedding, and does not.)
    2. The first matrix begins as He et al.'s, sqrt(2 / fan_in), times L^(-1 / (2m - 2)). In attention this is c_attn.
    3. There is a learned number before each matrix and activation, which is added, and one that multiplies the branch.
    """
    rezero(gpt)
    for block in gpt.transformer.h:
        block.ln_1, block.ln_2 = Number(operator.add, 0.0), Number(operator.add, 0.0)
        block.ln_1_after, block.ln_2_after = Number(operator.mul, 1.0), Number(operator.mul, 1.0)
        for first in (block.attn.c_attn, block.mlp.c_fc):
            nn.init.normal_(first.weight, std=(2 / first.in_features / (2 * gpt.config.n_layer)) ** 0.5)
        block.mlp.c_fc = nn.Sequential(block.mlp.c_fc, Number(operator.add, 0.0))
        for branch in (block.attn, block.mlp):
            nn.init.zeros_(branch.c_proj.weight)
            branch.c_proj = nn.Sequential(Number(operator.add, 0.0), branch.c_proj)


# -----------------------------------------------------------------------------
# Fewer weights


def factorised(gpt: GPT) -> None:
    """The embedding is V x E times E x C, with E = C / 6 as Narang et al.'s 128 of 768 (ALBERT, Lan et al. 2019).

    If tied, the head is C x E times E x V and shares the V x E numbers ("Factorized & shared embeddings"); if not, the
    head stays V x C ("Factorized Embedding"). The E x C and C x E matrices begin with a standard deviation of
    fan_in^-0.5, so that the token embedding is as large as without them.
    """
    V, C = gpt.config.vocab_size, gpt.config.n_embd
    E = max(1, C // 6)
    embedding, up, down, head = nn.Embedding(V, E), *(nn.Linear(*n, bias=False) for n in ((E, C), (C, E), (E, V)))
    for matrix, std in ((embedding, 0.02), (up, E**-0.5), (down, C**-0.5)):
        nn.init.normal_(matrix.weight, std=std)
    gpt.transformer.wte = nn.Sequential(embedding, up)
    if gpt.config.tied:
        head.weight = embedding.weight
        gpt.lm_head = nn.Sequential(down, head)


def shared(gpt: GPT) -> None:
    """The first block in the place of all blocks: one set of weights ("Block sharing"; ALBERT)."""
    first = gpt.transformer.h[0]
    for i in range(1, len(gpt.transformer.h)):
        block, attn = copy.copy(first), copy.copy(first.attn)  # shallow copies: they share all weights
        attn.groups = [copy.copy(group) for group in attn.groups]  # a cache keeps k and v for each group
        block._modules = first._modules | {"attn": attn}
        gpt.transformer.h[i] = block


# -----------------------------------------------------------------------------
# Other queries and keys


class Apart(nn.Module):
    """c_attn as one Linear each for q, k and v, with the weights that it had; a part that is not wanted is 0."""

    def __init__(self, attn: nn.Module, wanted: str = "qkv"):
        super().__init__()
        H, G, D = attn.sizes
        self.sizes, self.parts = {"q": H * D, "k": G * D, "v": G * D}, nn.ModuleDict()
        for name, rows in zip("qkv", torch.arange(sum(self.sizes.values())).split([*self.sizes.values()]), strict=True):
            if name in wanted:
                self.parts[name] = part = copy.copy(attn.c_attn)
                part.out_features = len(rows)
                part._parameters = dict(part._parameters)
                for key, p in attn.c_attn.named_parameters():
                    setattr(part, key, nn.Parameter(p.detach()[rows]))

    def forward(self, x):
        q, k, v = (
            self.parts[name](x) if name in self.parts else x.new_zeros(*x.shape[:-1], n)
            for name, n in self.sizes.items()
        )
        return torch.cat((q, k, v), dim=-1)


def qkv_apart(gpt: GPT) -> None:
    """Three matrices in the place of c_attn: Muon makes each orthogonal by itself, LAMB scales each by itself."""
    for block in gpt.transformer.h:
        block.attn.c_attn = Apart(block.attn)


class Synthesizer(nn.Module):
    """Scores that depend on no key (Tay et al. 2020, section 3), in the place of q k or, if plus, added to q k.

    dense: relu(q_i) W, with W (D, T) for each head: the query's token alone decides its scores of keys 1 to T. The
    paper has W2 relu(W1 x); as in Narang et al.'s code, W1 is the matrix of the queries. random: R (T, T) for each
    head, learned, which does not depend on the text.
    """

    def __init__(self, c, dense: bool, plus: bool):
        super().__init__()
        self.dense, self.plus = dense, plus
        self.table = nn.Parameter(0.02 * torch.randn(c.n_head, c.head_dim if dense else c.block_size, c.block_size))

    def forward(self, q, k, group, past):
        """As a positions.Scheme: (q, k, what is added to the scores)."""
        table, end = self.table[group.q], past + q.shape[-2]
        bias = F.relu(q) @ table[..., :end].to(q.dtype) if self.dense else table[None, :, past:end, :end]
        return q if self.plus else torch.zeros_like(q), k, {"bias": bias}


def synthesizer(gpt: GPT, dense: bool, plus: bool = False) -> None:
    """Every head is a Synthesizer. Without plus, the matrices of queries and keys that are not used are left out."""
    c = gpt.config.resolved()
    refuse([(c.scheme is not None, f"a Synthesizer cannot be combined with position={c.position!r}: use learned")])
    for block in gpt.transformer.h:
        block.attn.synthesizer = Synthesizer(c, dense, plus)
        for group in block.attn.groups:
            group.schemes, group.sums = [block.attn.synthesizer, *group.schemes], None
        if not plus:
            block.attn.c_attn = Apart(block.attn, "qv" if dense else "v")


# -----------------------------------------------------------------------------
# Beta with another map than x / (1 + ||x||): y = map(s) v

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "unit": lambda x: F.normalize(x, dim=-1),  # x / ||x||, homogeneous of degree 0: the size of the scores is lost
    "root": lambda x: x / (1 + x.square().sum(-1, keepdim=True)).sqrt(),  # into the unit ball as beta; smooth at 0 too
    "l1": lambda x: x / (1 + x.abs().sum(-1, keepdim=True)),  # y is not larger than the largest value, as in softmax
    "max": lambda x: x / (1 + x.abs().amax(-1, keepdim=True)),  # many weights can be near 1 together
}


def beta_map(gpt: GPT, name: str) -> None:
    """Every head with beta has a map of MAPS, by its definition: no running sums."""
    refuse([(gpt.config.attention != "beta", "this variant changes the map of beta: add --attention=beta")])

    def attention(s, seen, v, drop, fade):
        return drop(MAPS[name](fade(s).where(seen, 0.0))) @ v

    for group in (group for block in gpt.transformer.h for group in block.attn.groups if group.name == "beta"):
        group.definition, group.core, group.sums = attention, fast_form(f"beta_{name}", attention), None


# -----------------------------------------------------------------------------

VARIANT: dict[str, Callable[[GPT], None]] = {  # several variants are made in this order
    "rezero": rezero,
    "rezero_norm": partial(rezero, norms=True),
    "fixup": fixup,
    "factorised": factorised,
    "qkv_apart": qkv_apart,
    "synthesizer_dense": partial(synthesizer, dense=True),
    "synthesizer_dense_plus": partial(synthesizer, dense=True, plus=True),
    "synthesizer_random": partial(synthesizer, dense=False),
    "synthesizer_random_plus": partial(synthesizer, dense=False, plus=True),
    **{f"beta_{name}": partial(beta_map, name=name) for name in MAPS},
    "shared": shared,
    "bfloat16": lambda gpt: gpt.bfloat16(),  # weights and all that is computed with them (LASER paper, table 11)
}


def change(gpt: GPT, variants: str) -> GPT:
    """The new GPT itself, changed by variants: names in VARIANT, separated by commas. UserError if one does not fit."""
    wanted = names(variants, VARIANT) if variants else []
    for name in (name for name in VARIANT if name in wanted):
        VARIANT[name](gpt)
    return gpt


def main() -> None:
    given = [arg for arg in sys.argv if arg.startswith("--variant=")]
    sys.argv = [arg for arg in sys.argv if arg not in given]
    variants, init = ",".join(arg.partition("=")[2] for arg in given), GPT.__init__

    def changed(self, config):
        init(self, config)
        change(self, variants)

    with mock.patch.object(GPT, "__init__", changed):
        runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
