"""BERT: a masked language model, trained on Tiny Shakespeare or another prepared data set (Devlin et al. 2018).

    python -m lab.examples.bert
    python -m lab.examples.bert --attention=laser --seed=2

The model is a GPT whose tokens see the tokens on both sides. It gets a text in which some tokens are hidden, and has to
say what they are. The result is its error: the share of the hidden tokens of the validation text that it gets wrong
(LASER paper, section 4.2). At the end it fills in gaps of that text.
"""

import torch
from torch import Tensor, nn

from choices import NORM
from configurator import at_least_one, configure, pick_device, user_errors
from lab.examples.attention import Bidirectional, Encoder
from lab.examples.common import Training, fit, generator, gpt_config, result
from model import GPTConfig
from text.dataset import Tokens, folder_of, prepare_shakespeare
from text.tokenizers import tokenizer

# What is it trained on, and how long?
dataset = "shakespeare_char"  # a prepared data set: the name of a folder in data/, or the path of a folder
steps = 2500  # training steps
batch_size = 16  # sequences of a step
learning_rate = 2e-3  # the highest learning rate
eval_batches = 40  # batches of the validation text
seed = 1  # decides all random numbers
device = "auto"  # auto, cpu, cuda, cuda:0 or mps
# What is the model? (fields of GPTConfig that have another default here)
block_size = 64  # tokens that the model sees at once
n_layer = 4  # number of blocks
n_head = 4  # attention heads per layer
n_embd = 128  # width of the residual stream
position = "rope"  # a name in positions.POSITION; with BERT's own, learned, the error falls many times more slowly
where = "post"  # where a block has its norms: a name in choices.WHERE
mlp = "gelu_exact"  # activation of the MLP: a name in choices.ACTIVATION
norm_eps = 1e-12  # a small number that is added to the variance in a norm


class Bert(Encoder):
    """A GPT whose tokens see both sides, with BERT's two additions: a norm after the embeddings, and a dense layer with
    a norm before the output. BERT's sentence A and B are left out: there is one kind of text.
    """

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        c = config.resolved()
        self.transformer.drop = nn.Sequential(NORM[c.norm](c, c.n_embd), self.transformer.drop)
        dense, output = nn.Linear(c.n_embd, c.n_embd), nn.Linear(c.n_embd, c.vocab_size)
        self.lm_head = nn.Sequential(dense, nn.GELU(), NORM[c.norm](c, c.n_embd), output)
        self.lm_head.apply(self._init_weights)
        if c.tied:
            output.weight = self.transformer.wte.weight

    def forward(self, idx: Tensor, targets: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(logits (B, T, V), loss). idx, targets (B, T): -1 where nothing is asked. seen (B, T): False at padding."""
        return self.predict(self.hidden(idx, Bidirectional(seen)), targets)


def hide(x: Tensor, mask: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(input, targets) for token ids x (B, T): 15% of the tokens are targets, the others -1 (Devlin et al., 3.1).

    Of these 15%, 80% become the token `mask`, 10% become a random token, and 10% stay as they are.
    """
    asked = torch.rand(x.shape, generator=g) < 0.15
    kind = torch.rand(x.shape, generator=g)
    random = torch.randint(mask, x.shape, generator=g)
    asked[0, 0] |= ~asked.any()  # a loss needs a target
    hidden = torch.where(kind < 0.8, mask, torch.where(kind < 0.9, random, x))
    return torch.where(asked, hidden, x), torch.where(asked, x, -1)


@torch.no_grad()
def evaluate(bert: Bert, data: Tokens, mask: int) -> tuple[float, float]:
    """(error, loss in nats) over the hidden tokens of the validation text, the same ones for equal flags."""
    g, wrong, loss, n = torch.Generator().manual_seed(0), 0, 0.0, 0
    for x, _ in data.eval_batches(eval_batches, batch_size):
        x, targets = (t.to(device) for t in hide(x, mask, g))
        logits, mean = bert(x, targets)
        asked = targets != -1
        wrong += (logits.argmax(-1) != targets)[asked].sum().item()
        loss += mean.item() * asked.sum().item()
        n += asked.sum().item()
    return wrong / n, loss / n


if __name__ == "__main__":
    config, given = configure(globals(), GPTConfig, Training)
    globals().update(config)
    with user_errors():
        device = pick_device(device, "float32")[0]
        prepare_shakespeare(dataset)
        train, val = (Tokens(folder_of(dataset), split, block_size) for split in ("train", "val"))
        tok, mask = tokenizer(train.meta["tokenizer"]), train.meta["vocab_size"]  # the mask is one more token
        c = gpt_config(config, given, vocab_size=mask + 1)
        at_least_one(eval_batches=eval_batches)
        torch.manual_seed(seed)
        bert = Bert(c).to(device)

        def batch(step: int) -> tuple[Tensor, Tensor]:
            return hide(train.batch(step, batch_size, seed=seed)[0], mask, generator(seed, step))

        fit(bert, batch, config, device)
        error, loss = evaluate(bert, val, mask)
        result(c, seed, f"error of hidden tokens {error:.4f}, loss {loss:.4f}")
        gaps = torch.from_numpy(val.ids[None, :block_size].astype(int)).to(device)
        gaps[:, 4::5] = mask
        text = "".join("_" if i == mask else tok.decode([i]) for i in gaps[0].tolist())
        best = bert.lm_head(bert.hidden(gaps, Bidirectional()))[..., :mask].argmax(-1)  # the mask itself is no answer
        print(text, tok.decode(torch.where(gaps == mask, best, gaps)[0].tolist()), sep="\n\n")
