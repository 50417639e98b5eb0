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
    is_legal = temperature >= 0 and (top_k or 1) >= 1 and (top_p is None or 0 < top_p <= 1)
    if not is_legal or (endless and not use_cache):
        raise UserError(
            "sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1 "
            f"(not {temperature}, {top_k} and {top_p}); endless needs use_cache"
        )

    # The number of tokens that the model sees at once, and a cache for them
    limit = idx.shape[1] + n
    if not endless:
        limit = min(limit, model.config.block_size)
    cache = model.new_cache(limit) if use_cache else None
    generator = None if seed is None else torch.Generator(idx.device).manual_seed(seed)

    unseen = idx  # what the cache has not seen yet
    for _ in range(n):
        if idx.shape[1] > limit:
            cache = None
            idx = idx[:, -limit:]

        with torch.inference_mode():
            logits, _ = model(idx if cache is None else unseen, cache=cache)  # (B, 1, V)

        unseen = _draw(logits[:, -1, :vocab_size], temperature, top_k, top_p, generator)
        idx = torch.cat((idx, unseen), dim=1)
        yield unseen


def _draw(logits, temperature, top_k, top_p, generator):
    """Draw one token for each row of logits (B, V): ids (B, 1).

    temperature: 0 takes the most likely token. top_k: draw from the k most likely tokens. top_p:
    draw from the smallest set of the most likely tokens whose probabilities sum to top_p. With
    None, or top_k=0, draw from all tokens.
    """
    logits = logits.float()
    if not logits.isfinite().all():
        raise NotFinite("the model's logits are not finite; has its training diverged?")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)

    # The largest logit becomes 0, so no quotient overflows to +inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature

    # All but the k most likely tokens get the probability 0.
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, [-1]]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probs = logits.softmax(-1)

    if top_p:
        ranked, order = probs.sort(descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # the likelier tokens already sum to top_p
        probs = probs.scatter(-1, order, ranked.masked_fill(beyond, 0.0))
    return torch.multinomial(probs, 1, generator=generator)
