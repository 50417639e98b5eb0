"""What a definition does, and whether a model sees later tokens: found out by trying.

Definitions are tried on fixed inputs, in float64 on the CPU; a model on its device, in float32.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from attention.fast import CHUNK, in_blocks
from attention.scores import learned_of, of_token, plain_form

WINDOW = 20  # of the short heads that are tried
LEAK = 1e-4  # see change_by_later_tokens
# Short heads are compared for so many queries: a definition may need T x T numbers for each.
LAST = 16


def fixed_inputs(tokens: int, definition: Callable) -> tuple:
    """q, k (1, 2, T, 4) and v (1, 2, T, 3) in float64, random. Scores go up to 50 or so.

    T: tokens, but enough for blocks, and 1024 at most. k has the definition's numbers of tokens.
    """
    T = max(2 * CHUNK + 2, min(tokens, 1024))
    random = torch.Generator("cpu").manual_seed(0)
    n = 2 * len(learned_of(definition, of_token))
    shape = (1, 2, T, 4 + 4 + 3 + n)
    x = torch.randn(shape, dtype=torch.float64, device="cpu", generator=random)
    q, v, k = x.split((4, 3, 4 + n), dim=-1)
    return 10 * q, k, v


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal but for the rounding of float64."""
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-9 * b.abs().max().clamp(min=1))


@functools.cache
def is_row_local(definition: Callable, tokens: int) -> bool:
    """Whether an output depends only on its query and on the keys and values that the query sees.

    It is tried with a part of the queries, and without all later tokens, for several cuts.
    """
    plain = plain_form(definition)
    q, k, v = fixed_inputs(tokens, definition)
    T = q.shape[2]
    y = plain(q, k, v)
    for cut in (25, T // 2, *range(T - 8, T)):
        rows = slice(max(0, cut - CHUNK), cut)  # the last queries before the cut
        if not alike(plain(q[:, :, rows], k[:, :, :cut], v[:, :, :cut]), y[:, :, rows]):
            return False
    return True


@functools.cache
def works_in_blocks(definition: Callable, tokens: int) -> bool:
    """Whether short heads in blocks of a text give the same as short heads on the whole text."""
    plain = plain_form(definition)
    q, k, v = fixed_inputs(tokens, definition)
    expected = plain(q[:, :, -LAST:], k, v, window=WINDOW)
    return alike(in_blocks(plain)(q, k, v, window=WINDOW)[:, :, -LAST:], expected)


@torch.no_grad()
def change_by_later_tokens(model: nn.Module) -> float:
    """How far a GPT's logits change with later tokens, as a share of their spread.

    The tokens from a cut on are replaced by others, in each row from another cut, up to 32 cuts if
    the model is small; the first cut leaves all tokens but the last. Above LEAK the model sees
    later tokens; below it is rounding. NaN counts as infinite.
    """
    T = model.config.block_size
    V = model.config.vocab_size
    device = next(model.parameters()).device
    work = 4 * T * sum(p.numel() for p in model.parameters())  # FLOPs of a row
    affordable = (2e11 if device.type == "cpu" else 2e13) / work  # a second or so
    n = max(1, int(min(T - 1, 32, affordable, 2**27 / (T * V))))
    random = torch.Generator("cpu").manual_seed(0)
    x = torch.randint(V, (n, T), generator=random).to(device)
    step = torch.randint(1, max(2, V), (n, T), generator=random).to(device)
    cuts = T - 1 - torch.arange(n, device=device)[:, None] * (T - 1) // n
    is_later = torch.arange(T, device=device) >= cuts
    other = (x + is_later * step) % V

    was_training = model.training
    model.eval()
    logits = model(x, x)[0]
    change = (model(other, x)[0] - logits).abs() / logits.std()
    model.train(was_training)
    change = change.amax(-1).masked_fill(is_later, 0.0)  # (n, T)
    return change.nan_to_num(math.inf).max().item()
