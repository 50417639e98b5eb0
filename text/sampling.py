"""From a model's logits to the next token, and on to a text. Read stream first."""

from collections.abc import Iterator

import torch

from errors import NotFinite, UserError


def stream(
    model: torch.nn.Module,
    idx: torch.Tensor,
    n: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    *,
    vocab_size: int | None = None,
    seed: int | None = None,
    use_cache: bool = True,
    endless: bool = False,
) -> Iterator[torch.Tensor]:
    """Yield the next token of each of the prompts idx (B, T), as (B, 1), n times.

    model: a GPT. temperature, top_k, top_p: see _draw. vocab_size: the tokenizer's; ids from
    vocab_size on (padding) are never drawn. seed: for a new generator; None takes torch's own.

    use_cache: reuse what was computed for earlier tokens. Without the cache the text is the same,
    but slower. After block_size tokens the window slides: each token changes its position, so the
    cache is useless, and each step is a whole forward pass. endless: go on with the cache instead,
    as in a longer text.

    Raises UserError for an impossible argument, and with endless for a model whose cache cannot go
    on; NotFinite for logits that are not finite.
    """
    wrong_k = top_k is not None and top_k < 1
    wrong_p = top_p is not None and not 0 < top_p <= 1
    if not temperature >= 0 or wrong_k or wrong_p:
        raise UserError(
            "sampling needs temperature >= 0, top_k >= 1 and 0 < top_p <= 1; "
            f"these are {temperature}, {top_k} and {top_p}"
        )
    if endless and not use_cache:
        raise UserError("endless decoding goes on with the cache: it needs use_cache")
    generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)
    block_size = model.config.block_size
    cache = None
    if use_cache:
        length = idx.shape[1] + n
        cache = model.new_cache(length if endless else min(length, block_size))
    unseen = idx  # what the cache has not seen yet
    for _ in range(n):
        if idx.shape[1] > block_size and not endless:
            cache = None
            idx = idx[:, -block_size:]
        with torch.inference_mode():
            logits, _ = model(idx if cache is None else unseen, cache=cache)  # (B, 1, V)
        unseen = _draw(logits[:, -1, :vocab_size], temperature, top_k, top_p, generator)
        if not endless:
            idx = torch.cat((idx, unseen), dim=1)
        yield unseen


def _draw(logits, temperature, top_k, top_p, generator):
    """Draw one token for each row of logits (B, V): ids (B, 1).

    temperature: 0 takes the most likely token. top_k: draw from the k most likely tokens. top_p:
    draw from the smallest set of the most likely tokens whose probabilities sum to top_p.
    """
    logits = logits.float()
    if not logits.isfinite().all():
        raise NotFinite("the model's logits are not finite; has its training diverged?")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # Where denormal numbers are flushed, a smaller temperature would be 0. The largest logit
    # becomes 0, so no quotient overflows to +inf.
    temperature = max(temperature, torch.finfo(logits.dtype).tiny)
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, [-1]]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(-1)
    if top_p is not None:
        ranked, order = probs.sort(descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # the likelier tokens already sum to top_p
        probs = probs.scatter(-1, order, ranked.masked_fill(beyond, 0.0))
    return torch.multinomial(probs, 1, generator=generator)
