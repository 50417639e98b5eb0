"""ViT: a vision transformer that says which digit an image shows (Dosovitskiy et al. 2021).

    python -m lab.examples.vit
    python -m lab.examples.vit --attention=laser --patch_size=4 --seed=2

The model is a GPT whose tokens are the patches of an image; each sees all others. One more token
stands before the patches, the class token: its output is the model's answer. The result is the
model's error: the share of the test images that it gets wrong. The images are scikit-learn's 1797
digits, 8 x 8 pixels each; a quarter of them are the test.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from errors import UserError, optional
from lab.examples.attention import Bidirectional, Encoder
from lab.examples.common import fit, generator, gpt_config, result, run_example
from model import GPTConfig

# What is it trained on, and how long?
patch_size = 2  # width and height of a patch, in pixels
shift = 1  # in training an image is moved by up to this many pixels
steps = 1000  # training steps
batch_size = 64  # images of a step
learning_rate = 2e-3  # the highest learning rate
seed = 1  # decides all random numbers, but not which images are the test
device = "auto"  # auto, cpu, cuda, cuda:0 or mps
# What is the model? (fields of GPTConfig that have another default here)
n_layer = 4  # number of blocks
n_head = 4  # attention heads per layer
n_embd = 64  # width of the residual stream
mlp = "gelu_exact"  # activation of the MLP: a name in parts.ACTIVATION
norm_eps = 1e-6  # a small number that is added to the variance in a norm


class Patches(nn.Module):
    """Images (B, channels, S, S) -> tokens (B, 1 + patches, C): the class token, then the patches.

    The patches are read by rows.
    """

    def __init__(self, channels: int, size: int, width: int):
        super().__init__()
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))

        # one Linear for the pixels of every patch
        self.projection = nn.Conv2d(channels, width, size, stride=size)

    def forward(self, images):
        patches = self.projection(images).flatten(2).mT
        return torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1)


class ViT(Encoder):
    """A GPT with Patches as its token embedding, and a Linear to the classes as its output."""

    def __init__(self, config: GPTConfig, channels: int, patch_size: int):
        super().__init__(config)
        self.transformer.wte = Patches(channels, patch_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module):
        """GPT-2's, with larger stds: with 0.02, so small a ViT takes several times the steps."""
        super()._init_weights(module)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, nn.Embedding):  # the learned positions
            nn.init.normal_(module.weight)

    def forward(self, images, labels):
        """(logits (B, 1, classes), loss) of images (B, channels, S, S), 0 to 255, labels (B)."""
        x = self.hidden(images / 127.5 - 1, Bidirectional())
        return self.predict(x[:, :1], labels[:, None])


def digits() -> tuple[Tensor, ...]:
    """(images, labels, test images, test labels): images (N, 1, 8, 8) of pixels from 0 to 255.

    The test images do not depend on --seed.
    """
    data = optional("sklearn.datasets", "vit.py", "scikit-learn").load_digits()
    x = torch.tensor(data.images * 255 / 16).byte()[:, None]
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([len(x) // 4])
    return x[train], y[train], x[test], y[test]


def moved(x: Tensor, g: torch.Generator) -> Tensor:
    """Images, each moved by up to `shift` pixels along both axes. Their borders are continued."""
    n = x.shape[-1]
    corners = torch.randint(2 * shift + 1, (len(x), 2), generator=g).tolist()
    x = F.pad(x, [shift] * 4, mode="replicate")
    images = zip(x, corners, strict=True)
    return torch.stack([image[:, i : i + n, j : j + n] for image, (i, j) in images])


def main(config: dict, given: dict) -> None:
    if patch_size not in (1, 2, 4, 8):
        raise UserError(f"--patch_size={patch_size} must be 1, 2, 4 or 8: images have 8 x 8 pixels")

    x, y, test_x, test_y = digits()
    c = gpt_config(
        config,
        given,
        unused=["zero_init"],
        vocab_size=10,
        block_size=1 + (8 // patch_size) ** 2,
        tied=False,
    )

    torch.manual_seed(seed)
    vit = ViT(c, 1, patch_size).to(device)

    def batch(step: int) -> tuple:
        g = generator(seed, step)
        rows = torch.randint(len(x), (batch_size,), generator=g)
        return moved(x[rows].float(), g), y[rows]

    fit(vit, batch, config)

    with torch.no_grad():
        logits, _ = vit(test_x.to(device), test_y.to(device))
    error = (logits[:, 0].argmax(-1).cpu() != test_y).float().mean()
    result(c, seed, f"error on {len(test_y)} test images {error:.4f}")


if __name__ == "__main__":
    run_example(globals(), GPTConfig)
