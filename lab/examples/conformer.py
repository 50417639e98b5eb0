"""Conformer: attention and convolution together. Who speaks? (Gulati et al. 2020)

    python -m lab.examples.conformer
    python -m lab.examples.conformer --attention=laser --heads=SL --window=4 --kernel=5

The data are the Japanese vowels of the UCI archive: nine men said /ae/, 640 times in all. A
recording is 7 to 29 frames of 12 numbers, which describe the spectrum of the sound. The model is a
GPT with a Conformer's blocks; each frame sees all frames. The result is its error: the share of the
370 test recordings for which it names another man.
"""

from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lab.ideas.activations  # noqa: F401, adds swish
from errors import optional
from lab.examples.attention import Bidirectional, Encoder
from lab.examples.common import fit, generator, gpt_config, padded, result, run_example
from model import MLP, CausalSelfAttention, GPTConfig
from parts import NORM

# How long is it trained?
steps = 500  # training steps
batch_size = 32  # recordings of a step
learning_rate = 1e-3  # the highest learning rate
seed = 1  # decides all random numbers
device = "auto"  # auto, cpu, cuda, cuda:0 or mps
# What does the convolution see?
kernel = 7  # frames that the depthwise convolution sees at once
# What is the model? (fields of GPTConfig that have another default here)
n_layer = 2  # number of blocks
n_head = 4  # attention heads per layer
n_embd = 64  # width of the residual stream
position = "rope"  # a name in parts.POSITION; the paper has Transformer-XL's relative ones
mlp = "swish"  # activation of the MLPs: a name in parts.ACTIVATION
dropout = 0.1  # dropout probability of frames and of attention's, convolution's and MLPs' outputs
attn_dropout = 0.0  # dropout probability of attention weights, which LASER cannot have


class Convolution(nn.Module):
    """The convolution module (section 2.2): mixes each frame with its neighbours, not with padding.

    Its norm is the configuration's. The means of the paper's BatchNorm would count the padding.
    """

    def __init__(self, c: GPTConfig, kernel: int):
        super().__init__()
        C = c.n_embd
        self.gated = nn.Linear(C, 2 * C, bias=c.bias)  # a pointwise convolution is a Linear
        self.depthwise = nn.Conv1d(C, C, kernel, padding="same", groups=C, bias=c.bias)
        self.norm = NORM[c.norm](c, C)
        self.c_proj = nn.Linear(C, C, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, seen):
        """x (B, T, C) -> (B, T, C). seen (B, T): False where a frame is padding."""
        x = F.glu(self.gated(x), dim=-1)
        x = x * seen[..., None]  # padding is 0, as are the frames before the first one
        x = self.depthwise(x.mT).mT
        return self.dropout(self.c_proj(F.silu(self.norm(x))))


class ConformerBlock(nn.Module):
    """Attention and a convolution between two halves of an MLP (section 2.4, equation 1)."""

    def __init__(self, c: GPTConfig, layer: int, kernel: int):
        super().__init__()
        self.norms = nn.ModuleList([NORM[c.norm](c, c.n_embd) for _ in range(5)])
        self.mlp_before = MLP(c)
        self.mlp_after = MLP(c)
        self.attn = CausalSelfAttention(c, layer)
        self.conv = Convolution(c, kernel)

    def forward(self, x, context: Bidirectional):
        x = x + self.mlp_before(self.norms[0](x)) / 2
        x = x + self.attn(self.norms[1](x), context)
        x = x + self.conv(self.norms[2](x), context.seen)
        x = x + self.mlp_after(self.norms[3](x)) / 2
        return self.norms[4](x)


class Conformer(Encoder):
    """A GPT of ConformerBlocks, with Linears as its token embedding and as its output."""

    def __init__(self, config: GPTConfig, inputs: int, kernel: int):
        with mock.patch("model.Block", partial(ConformerBlock, kernel=kernel)):
            super().__init__(config)
        self.transformer.wte = nn.Linear(inputs, config.n_embd)
        self.transformer.ln_f = nn.Identity()  # a block ends with a norm
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
        self._init_weights(self.transformer.wte)
        self._init_weights(self.lm_head)

    def forward(self, frames, seen, labels):
        """(logits (B, 1, classes), loss) of frames (B, T, inputs) and labels (B).

        seen (B, T): False at padding.
        """
        x = self.hidden(frames, Bidirectional(seen)) * seen[..., None]
        mean = x.sum(1, keepdim=True) / seen.sum(1)[:, None, None]
        return self.predict(mean, labels[:, None])


def vowels(split: str) -> tuple[list[Tensor], Tensor]:
    """The recordings of a split, (frames, 12) each, and their speakers, from 0 to 8."""
    load = optional("sktime.datasets", "conformer.py").load_japanese_vowels
    recordings, labels = load(split, return_X_y=True, return_type="df-list")
    frames = [torch.tensor(recording.values, dtype=torch.float32) for recording in recordings]
    return frames, torch.tensor(labels.astype(int)) - 1


def main(config: dict, given: dict) -> None:
    # each of the 12 numbers gets mean 0 and standard deviation 1
    train, speakers = vowels("train")
    test, truth = vowels("test")
    std, mean = torch.std_mean(torch.cat(train), dim=0)
    train = [(recording - mean) / std for recording in train]
    test = [(recording - mean) / std for recording in test]

    c = gpt_config(
        config,
        given,
        unused=("where", "block"),
        block_size=max(map(len, train + test)),
        vocab_size=int(speakers.max()) + 1,
        tied=False,
    )

    torch.manual_seed(seed)
    conformer = Conformer(c, len(mean), kernel).to(device)

    def batch(step: int) -> tuple:
        rows = torch.randint(len(train), (batch_size,), generator=generator(seed, step))
        return *padded([train[i] for i in rows]), speakers[rows]

    fit(conformer, batch, config)

    frames, seen = padded(test)
    with torch.no_grad():
        logits, loss = conformer(frames.to(device), seen.to(device), truth.to(device))
    error = (logits[:, 0].argmax(-1).cpu() != truth).float().mean()
    result(c, seed, f"error on {len(test)} test recordings {error:.4f}, loss {loss:.4f}")


if __name__ == "__main__":
    run_example(globals(), GPTConfig)
