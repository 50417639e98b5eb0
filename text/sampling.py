"""From a model's logits to the next token, and on to a text."""

from collections.abc import Iterator

import torch

from errors import NotFinite, UserError


class Sampler:
    """Draws one token per row: sampler(logits (B, V)) -> (B, 1).

    temperature: 0 is greedy. top_k: sample from the k most likely tokens. top_p: from the fewest that together have
    this probability. vocab_size: the tokenizer's; ids past it (padding) are never sampled. seed: of a generator of its
    own; None draws from torch's. Raises UserError for an impossible argument, NotFinite for logits that are not finite.
    """

    def __init__(self, device, temperature=1.0, top_k=None, top_p=None, *, vocab_size=None, seed=None):
        if not temperature >= 0 or not (top_k is None or top_k >= 1) or not (top_p is None or 0 < top_p <= 1):
            got = f"{temperature}, {top_k}, {top_p}"
            raise UserError(f"sampling needs temperature >= 0, top_k >= 1 and 0 < top_p <= 1; got {got}")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.vocab_size = vocab_size
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()[:, : self.vocab_size]
        if not logits.isfinite().all():
            raise NotFinite("the model's logits are not finite; has its training diverged?")
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        # A smaller temperature would be 0 where denormal numbers are flushed. After the shift logits are at most 0.
        temperature = max(self.temperature, torch.finfo(logits.dtype).tiny)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[:, [-1]]
            logits = logits.masked_fill(logits < least, -torch.inf)
        probs = logits.softmax(-1)
        if self.top_p is not None:
            ranked, order = probs.sort(descending=True)
            beyond = ranked.cumsum(-1) - ranked >= self.top_p  # the likelier tokens already have top_p
            probs = probs.scatter(-1, order, ranked.masked_fill(beyond, 0.0))
        return torch.multinomial(probs, 1, generator=self.generator)


@torch.no_grad()
def stream(model, idx, n: int, *sampling, use_cache=True, endless=False, **more) -> Iterator[torch.Tensor]:
    """Yields the next token of each of the prompts idx (B, T), as (B, 1), up to n times.

    model: a GPT. sampling and more: temperature, top_k, top_p, vocab_size, seed (Sampler). use_cache: reuse what
    was computed for earlier tokens; without it the text is the same, but slower. After block_size tokens the window
    slides: every token changes its position, so the cache is useless, and each step is a whole forward pass. endless:
    go on with the cache instead, as in a longer text. Raises UserError for a model whose cache cannot go on.
    """
    if endless and not use_cache:
        raise UserError("endless decoding goes on with the cache: it needs use_cache")
    block_size = model.config.block_size
    sampler = Sampler(idx.device, *sampling, **more)
    length = idx.shape[1] + n
    cache = model.new_cache(length if endless else min(block_size, length)) if use_cache else None
    new = idx
    for _ in range(n):
        if idx.shape[1] > block_size and not endless:
            cache, idx = None, idx[:, -block_size:]
        with torch.inference_mode():
            logits, _ = model(idx if cache is None else new, cache=cache)  # (B, 1, V)
        new = sampler(logits[:, -1])
        if not endless:
            idx = torch.cat((idx, new), dim=1)
        yield new
