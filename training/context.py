"""One sequence over several processes, for texts whose activations one of them cannot hold.

    torchrun --standalone --nproc_per_node=4 train.py config/train_pg19_ls.py --parallel=context

Of n processes that share a sequence, process p holds the parts p and 2n - 1 - p of its 2n parts: a
query in a late part has more keys to see, and so all have as much to do. A row-local attention
needs the keys and values that its queries see, and no more: long heads gather those of all parts,
short heads the last ones of the part before, running sums the sums of the parts before.

Shapes: B batch, T time in this process, c = T / 2 in a part, H heads, G heads of keys, D width.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from attention.cache import Context, heads_of
from attention.fast import in_rows, recompute
from attention.forms import Heads
from attention.scores import plain_form
from attention.sums import linear_attention
from errors import UserError, refuse
from model import GPT, CausalSelfAttention
from training.distributed import rank

QUERIES = 512  # of long heads at a time: a mask of all would take too much memory


class Gather(torch.autograd.Function):
    """The tensors x of all processes of a group, stacked: (n, ...). Gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        of_all = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather([*of_all], x, group=group)
        return of_all

    @staticmethod
    def backward(ctx, dy):
        dy = dy.contiguous()
        dist.all_reduce(dy, group=ctx.group)
        return dy[dist.get_rank(ctx.group)], None


def halves(x: Tensor) -> tuple:
    """The two parts of a process's x (..., T, D)."""
    return x.chunk(2, -2)


def is_row_local(heads: Heads) -> bool:
    """Whether an attention gives a few queries at a time what it gives all queries at once.

    Tried on random numbers.
    """
    x = torch.randn(1, 1, 64, 16)
    attend = plain_form(heads.definition)
    try:
        return torch.allclose(attend(x, x, x), in_rows(attend, x, x, x, 7), atol=1e-4)
    except Exception:  # an attention that needs as many queries as keys
        return False


class Parts(Context):
    """The context of one of n processes that share their sequences. parts: which ones it has.

    Raises UserError for a model whose sequences cannot be cut.
    """

    def __init__(self, n: int, model: GPT):
        super().__init__()
        self.group, _ = dist.new_subgroups(n)
        self.n_parts = 2 * n
        p = rank % n
        self.parts = p, self.n_parts - 1 - p
        config = model.config.resolved()
        self.c, rest = divmod(config.block_size, self.n_parts)

        # attentions whose rows depend on each other, and layers that may ignore their context
        not_local = {heads.name for heads in heads_of(model) if not is_row_local(heads)}
        own = [
            b.attn
            for b in model.transformer.h
            if type(b.attn).forward != CausalSelfAttention.forward
        ]

        # what cannot be cut
        refuse([
            (rest,
             f"block_size={config.block_size} must be a multiple of {self.n_parts}, twice "
             "the processes"),
            (max(config.window or 0, config.conv - 1) > self.c,
             f"a part of {self.c} tokens is shorter than a window: use fewer processes"),
            (config.attn_dropout,
             "--parallel=context drops no attention weights: --attn_dropout=0"),
            (not_local,
             f"--parallel=context cannot cut {', '.join(not_local)}: a query's output depends on "
             "other queries, or on T (docs/attention.md, The one rule)"),
            (own,
             f"--parallel=context cannot cut {', '.join({type(x).__name__ for x in own})}, "
             "a layer with a forward of its own"),
            (GPT.forward.__module__ != "model", "--parallel=context cuts no packed documents"),
        ])  # fmt: skip

    def mine(self, x: Tensor) -> Tensor:
        """This process's two parts of x (..., n T / 2), side by side: (..., T)."""
        parts = x.chunk(self.n_parts, -1)
        return torch.cat([parts[i] for i in self.parts], -1)

    def in_order(self, two: tuple) -> list[Tensor]:
        """What all processes have of their two parts, in the order of the parts."""
        of_all = Gather.apply(torch.stack(two), self.group)  # (n / 2, 2, ...)
        return [*of_all[:, 0], *of_all[:, 1].flip(0)]

    def with_rows_before(self, x: Tensor, n: int) -> list[Tensor]:
        """The two parts of x, each after the n rows before it: zeros before the first part."""
        parts = halves(x)
        ends = self.in_order([part[..., self.c - n :, :] for part in parts])
        ends.insert(0, torch.zeros_like(ends[0]))
        return [torch.cat((ends[i], part), -2) for i, part in zip(self.parts, parts, strict=True)]

    # -------------------------------------------------------------------------
    # as a Context

    @property
    def state(self) -> dict:
        raise UserError("this layer keeps a state, which --parallel=context cannot cut")

    def positions(self, x):
        return self.mine(torch.arange(self.n_parts * self.c, device=x.device))

    def placed(self, scheme, q, k, heads) -> tuple:
        """Each part at its own place."""
        turned = [
            scheme(q, k, heads, self.c * i)
            for q, k, i in zip(halves(q), halves(k), self.parts, strict=True)
        ]
        qs, ks, (arguments, _) = zip(*turned, strict=True)
        return torch.cat(qs, -2), torch.cat(ks, -2), arguments

    def earlier(self, module: nn.Module, x: Tensor, n: int) -> list[Tensor]:
        """As Context.earlier."""
        parts = torch.stack(self.with_rows_before(x, n), 1)  # (B, 2, n + c, C)
        return [parts[:, :, n - offset : -offset].flatten(1, 2) for offset in range(1, n + 1)]

    def attend(self, heads: Heads, q, k, v, **settings) -> Tensor:
        """y (B, H, T, D) of some heads."""
        form = self.long
        if heads.window is not None:
            form = self.short
        elif heads.sums:
            form = self.by_sums
        return torch.cat(form(heads, halves(q), k, v, settings), -2)

    def long(self, heads, qs, k, v, settings) -> list[Tensor]:
        """Each part's queries, with the keys up to its end."""
        k, v = (heads.expand(torch.cat(self.in_order(halves(x)), -2)) for x in (k, v))
        run = partial(recompute, heads.run, **settings)  # no masks
        ends = [self.c * (i + 1) for i in self.parts]
        return [
            in_rows(run, q, k[..., :end, :], v[..., :end, :], QUERIES)
            for q, end in zip(qs, ends, strict=True)
        ]

    def short(self, heads, qs, k, v, settings) -> list[Tensor]:
        """Each part with the window before it, whose own outputs are left out."""
        n = heads.window
        ks, vs = (self.with_rows_before(heads.expand(x), n) for x in (k, v))
        outputs = []
        for i, q, k, v in zip(self.parts, qs, ks, vs, strict=True):
            rows = n if i else 0  # nothing is before part 0
            q = F.pad(q, (0, 0, rows, 0))
            y = heads.run(q, k[..., n - rows :, :], v[..., n - rows :, :], **settings)
            outputs.append(y[..., rows:, :])
        return outputs

    def by_sums(self, heads, qs, k, v, settings) -> list[Tensor]:
        """Each part after the sums of all parts before it."""
        run = partial(linear_attention, heads.sums)
        ks, vs = halves(heads.expand(k)), halves(heads.expand(v))
        # views would keep the memory of both parts, and be copied again
        parts = [[x.contiguous() for x in part] for part in zip(qs, ks, vs, strict=True)]
        # no features are kept
        own = [recompute(run, q[..., :0, :], k, v, **settings)[1] for q, k, v in parts]
        of_all = self.in_order(own)

        # before the parts 0, 1, ...; sums fade over a part as over one token of another decay
        none = [torch.zeros_like(x[:, :, :1]) for x in parts[0]]
        fade = {"decay": self.c * settings["decay"]} if "decay" in settings else {}
        before = [torch.zeros_like(of_all[0])]
        for sums in of_all:
            before.append(run(*none, state=before[-1], **fade)[1] + sums)
        return [
            run(*part, state=before[i], **settings)[0]
            for i, part in zip(self.parts, parts, strict=True)
        ]
