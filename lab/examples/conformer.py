"""Conformer: attention and convolution together, for recordings of men: who speaks? (Gulati et al. 2020)

    python -m lab.examples.conformer
    python -m lab.examples.conformer --attention=laser --heads=SL --window=4 --kernel=5

The data are the Japanese vowels of the UCI archive: nine men said /ae/, 640 times in all. A recording is 7 to 29 frames
of 12 numbers, which describe the spectrum of the sound. The model is a GPT with a Conformer's blocks; each frame
sees all frames. The result is its error: the share of the 370 test recordings where it names another man.
"""

from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from choices import NORM
from configurator import configure, pick_device, user_errors
from errors import optional, refuse
from lab.examples.attention import Bidirectional, Encoder
from lab.examples.common import Training, fit, generator, gpt_config, padded, result
from model import MLP, CausalSelfAttention, GPTConfig

# How long is it trained?
steps = 500  # training steps
batch_size = 32  # recordings of a step
learning_rate = 1e-3  # the highest learning rate
seed = 1  # decides all random numbers
device = "auto"  # auto, cpu, cuda, cuda:0 or mps
# What is the model? (kernel, and fields of GPTConfig that have another default here)
kernel = 7  # frames that the depthwise convolution sees at once: an odd number
n_layer = 2  # number of blocks
n_head = 4  # attention heads per layer
n_embd = 64  # width of the residual stream
position = "rope"  # in the paper relative positions, as in Transformer-XL: a name in positions.POSITION
mlp = "swish"  # activation of the MLPs: a name in choices.ACTIVATION
dropout = 0.1  # dropout on the frames and on the outputs of attention, convolution and MLPs: the probability
attn_dropout = 0.0  # dropout on attention weights, which LASER cannot have


class Convolution(nn.Module):
    """The convolution module (section 2.2): each frame gets something of its neighbours, and nothing of the padding.

    Its norm is the configuration's and not the paper's BatchNorm, whose means over a batch would count the padding.
    """

    def __init__(self, c: GPTConfig, kernel: int):
        super().__init__()
        self.gated = nn.Linear(c.n_embd, 2 * c.n_embd, bias=c.bias)  # a pointwise convolution is a Linear
        self.depthwise = nn.Conv1d(c.n_embd, c.n_embd, kernel, padding=kernel // 2, groups=c.n_embd, bias=c.bias)
        self.norm = NORM[c.norm](c, c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """x (B, T, C); seen (B, T): False where a frame is padding."""
        x = F.glu(self.gated(x), dim=-1) * seen[..., None]  # padding is 0, as are the frames before the first one
        x = self.depthwise(x.mT).mT
        return self.dropout(self.c_proj(F.silu(self.norm(x))))


class ConformerBlock(nn.Module):
    """Attention and a convolution between two halves of an MLP (section 2.4, equation 1)."""

    def __init__(self, c: GPTConfig, layer: int, shared_position: nn.Module | None, kernel: int):
        super().__init__()
        self.norms = nn.ModuleList([NORM[c.norm](c, c.n_embd) for _ in range(5)])
        self.mlp_before, self.mlp_after = MLP(c), MLP(c)
        self.attn = CausalSelfAttention(c, layer, shared_position)
        self.conv = Convolution(c, kernel)

    def forward(self, x: Tensor, context: Bidirectional) -> Tensor:
        x = x + self.mlp_before(self.norms[0](x)) / 2
        x = x + self.attn(self.norms[1](x), context)
        x = x + self.conv(self.norms[2](x), context.seen)
        x = x + self.mlp_after(self.norms[3](x)) / 2
        return self.norms[4](x)


class Conformer(Encoder):
    """A GPT with a Linear in the place of its token embedding, ConformerBlocks, and a Linear to the classes."""

    def __init__(self, config: GPTConfig, inputs: int, kernel: int):
        with mock.patch("model.Block", partial(ConformerBlock, kernel=kernel)):  # the GPT's blocks
            super().__init__(config)
        self.transformer.wte = nn.Linear(inputs, config.n_embd)
        self.transformer.ln_f = nn.Identity()  # a block ends with a norm
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
        for new in (self.transformer.wte, self.lm_head):
            self._init_weights(new)

    def forward(self, frames: Tensor, seen: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(logits (B, 1, classes), loss) of frames (B, T, inputs); seen (B, T): False at padding; labels (B)."""
        pos = torch.arange(frames.shape[1], device=frames.device)[None]
        x = self.hidden(frames, Bidirectional(seen), pos) * seen[..., None]
        mean = x.sum(1, keepdim=True) / seen.sum(1)[:, None, None]
        return self.predict(mean, labels[:, None])


def vowels(split: str) -> tuple[list[Tensor], Tensor]:
    """The recordings of a split, (frames, 12) each, and who said them, from 0 to 8."""
    load = optional("sktime.datasets", "conformer.py").load_japanese_vowels
    recordings, labels = load(split, return_X_y=True, return_type="df-list")
    frames = [torch.tensor(recording.values, dtype=torch.float32) for recording in recordings]
    return frames, torch.tensor(labels.astype(int)) - 1


if __name__ == "__main__":
    config, given = configure(globals(), GPTConfig, Training)
    globals().update(config)
    with user_errors():
        device = pick_device(device, "float32")[0]
        refuse([(kernel < 1 or kernel % 2 == 0, f"--kernel={kernel} must be odd: as many frames before as after one")])
        (train, speakers), (test, truth) = vowels("train"), vowels("test")
        std, mean = torch.std_mean(torch.cat(train), dim=0)
        train, test = ([(recording - mean) / std for recording in recordings] for recordings in (train, test))
        sizes = {"block_size": max(map(len, train + test)), "vocab_size": int(speakers.max()) + 1, "tied": False}
        c = gpt_config(config, given, ("where", "block"), **sizes)
        torch.manual_seed(seed)
        conformer = Conformer(c, len(mean), kernel).to(device)

        def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
            rows = torch.randint(len(train), (batch_size,), generator=generator(seed, step))
            return *padded([train[i] for i in rows]), speakers[rows]

        fit(conformer, batch, config, device)
        with torch.no_grad():
            logits, loss = conformer(*(x.to(device) for x in (*padded(test), truth)))
        error = (logits[:, 0].argmax(-1).cpu() != truth).float().mean()
        result(c, seed, f"error on {len(test)} test recordings {error:.4f}, loss {loss:.4f}")
