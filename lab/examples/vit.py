"""ViT: a vision transformer that says which digit an image shows (Dosovitskiy et al. 2021).

    python -m lab.examples.vit
    python -m lab.examples.vit --attention=laser --patch_size=4 --seed=2

The model is a GPT whose tokens are the patches of an image, and each sees all others. One more token stands before the
patches, the class token: the model answers there. The result is its error: the share of the test images that it gets
wrong. The images are scikit-learn's 1797 digits, 8 x 8 pixels each; a quarter of them are the test.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configurator import at_least_one, configure, pick_device, user_errors
from errors import optional, refuse
from lab.examples.attention import Bidirectional, Encoder
from lab.examples.common import Training, fit, generator, gpt_config, result
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
mlp = "gelu_exact"  # activation of the MLP: a name in choices.ACTIVATION
norm_eps = 1e-6  # a small number that is added to the variance in a norm


class Patches(nn.Module):
    """Makes the tokens (B, 1 + patches, C) of images (B, channels, S, S): the class token, then the patches by rows."""

    def __init__(self, channels: int, size: int, width: int):
        super().__init__()
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.projection = nn.Conv2d(channels, width, size, stride=size)  # one Linear for the pixels of every patch

    def forward(self, images: Tensor) -> Tensor:
        patches = self.projection(images).flatten(2).mT
        return torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1)


class ViT(Encoder):
    """A GPT with Patches in the place of its token embedding, and a Linear to the classes in the place of its head."""

    def __init__(self, config: GPTConfig, channels: int, patch_size: int):
        super().__init__(config)
        self.transformer.wte = Patches(channels, patch_size, config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        """In the place of GPT-2's std of 0.02, with which a ViT as small as this one takes several times the steps."""
        super()._init_weights(module)
        if isinstance(module, (nn.Linear, nn.Embedding)):  # the Embedding: the learned positions
            nn.init.normal_(module.weight, std=module.in_features**-0.5 if isinstance(module, nn.Linear) else 1.0)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(logits (B, 1, classes), loss) of images (B, channels, S, S) with pixels from 0 to 255, and labels (B)."""
        pos = torch.arange(self.config.block_size, device=images.device)[None]
        x = self.hidden(images / 127.5 - 1, Bidirectional(), pos)
        return self.predict(x[:, :1], labels[:, None])


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (N, 1, 8, 8) with pixels from 0 to 255, and their labels: for training; for the test, always the same."""
    found = optional("sklearn.datasets", "vit.py").load_digits()
    x, y = torch.tensor(found.images * 255 / 16).byte()[:, None], torch.tensor(found.target)
    test, train = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).tensor_split([len(x) // 4])
    return x[train], y[train], x[test], y[test]


def moved(x: Tensor, g: torch.Generator) -> Tensor:
    """Images, each moved up or down and left or right by up to `shift` pixels. Their borders are continued."""
    n, at = x.shape[-1], torch.randint(2 * shift + 1, (len(x), 2), generator=g).tolist()
    x = F.pad(x, [shift] * 4, mode="replicate")
    return torch.stack([image[:, i : i + n, j : j + n] for image, (i, j) in zip(x, at, strict=True)])


if __name__ == "__main__":
    config, given = configure(globals(), GPTConfig, Training)
    globals().update(config)
    with user_errors():
        device = pick_device(device, "float32")[0]
        at_least_one(patch_size=patch_size)
        refuse([
            (8 % patch_size > 0, f"--patch_size={patch_size}: images have 8 x 8 pixels, not a multiple"),
            (shift < 0, f"--shift={shift} must not be negative"),
        ])  # fmt: skip
        x, y, *test = digits()
        sizes = {"vocab_size": 10, "block_size": 1 + (8 // patch_size) ** 2}
        c = gpt_config(config, given, ["zero_init"], **sizes, tied=False)
        torch.manual_seed(seed)
        vit = ViT(c, 1, patch_size).to(device)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            g = generator(seed, step)
            rows = torch.randint(len(x), (batch_size,), generator=g)
            return moved(x[rows].float(), g), y[rows]

        fit(vit, batch, config, device)
        with torch.no_grad():
            labels = test[1].to(device)
            wrong = (vit(test[0].to(device), labels)[0][:, 0].argmax(-1) != labels).sum().item()
        result(c, seed, f"error on {len(labels)} test images {wrong / len(labels):.4f}")
