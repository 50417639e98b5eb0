"""BERT: a masked language model, trained on Tiny Shakespeare or another prepared data set.

    python -m lab.examples.bert
    python -m lab.examples.bert --attention=laser --seed=2

The model (Devlin et al. 2018) is a GPT whose tokens see the tokens on both sides. It gets a text in
which some tokens are hidden, and has to name them. The result is its error: the share of the hidden
tokens of the validation text that it gets wrong (LASER paper, section 4.2). At the end it fills in
gaps of that text.
"""

import torch
from torch import Tensor, nn

from lab.examples.attention import Bidirectional, Encoder
from lab.examples.common import fit, generator, gpt_config, result, run_example
from model import GPTConfig
from parts import NORM
from text.dataset import Tokens, folder_of, prepare_small
from text.tokenizers import tokenizer

# What is it trained on, and how long?
dataset = "shakespeare_char"  # a prepared data set: a folder in data/, or the path of a folder
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
position = "rope"  # a name in parts.POSITION; learned, BERT's own, needs many more steps
where = "post"  # where a block has its norms: a name in parts.WHERE
mlp = "gelu_exact"  # activation of the MLP: a name in parts.ACTIVATION
norm_eps = 1e-12  # a small number that is added to the variance in a norm


class Bert(Encoder):
    """A GPT whose tokens see both sides, with two additions of BERT.

    A norm follows the embeddings; a dense layer and a norm stand before the output. BERT's sentence
    A and B are left out: the texts here have no parts.
    """

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        c = config.resolved()

        # a norm after the embeddings
        self.transformer.drop = nn.Sequential(NORM[c.norm](c, c.n_embd), self.transformer.drop)

        # a dense layer and a norm before the output
        dense = nn.Linear(c.n_embd, c.n_embd)
        output = nn.Linear(c.n_embd, c.vocab_size)
        self.lm_head = nn.Sequential(dense, nn.GELU(), NORM[c.norm](c, c.n_embd), output)
        self.lm_head.apply(self._init_weights)
        if c.tied:
            output.weight = self.transformer.wte.weight

    def forward(self, idx, targets, seen=None):
        """(logits (B, T, V), loss) of token ids idx (B, T).

        targets (B, T): -1 where the model has to name nothing. seen (B, T): False at padding.
        """
        return self.predict(self.hidden(idx, Bidirectional(seen)), targets)


def hide(x: Tensor, mask: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """(input, targets) for token ids x (B, T): 15% are targets, the others -1 (Devlin et al., 3.1).

    Of these 15%, 80% become the token `mask`, 10% become a random token, and 10% stay as they are.
    """
    asked = torch.rand(x.shape, generator=g) < 0.15
    chance = torch.rand(x.shape, generator=g)
    random = torch.randint(mask, x.shape, generator=g)
    asked[0, 0] |= ~asked.any()  # a loss needs a target
    hidden = torch.where(chance < 0.9, random, x)
    hidden = torch.where(chance < 0.8, mask, hidden)
    return torch.where(asked, hidden, x), torch.where(asked, x, -1)


@torch.no_grad()
def evaluate(bert: Bert, data: Tokens, mask: int) -> tuple[float, float]:
    """(error, loss in nats) over the validation text's hidden tokens: equal flags hide the same."""
    g = torch.Generator().manual_seed(0)
    wrong = loss = total = 0
    for x, _ in data.eval_batches(eval_batches, batch_size):
        x, targets = hide(x, mask, g)
        targets = targets.to(device)
        logits, mean = bert(x.to(device), targets)

        asked = targets != -1
        n = asked.sum().item()
        wrong += (logits.argmax(-1) != targets)[asked].sum().item()
        loss += mean.item() * n
        total += n
    return wrong / total, loss / total


def main(config: dict, given: dict) -> None:
    prepare_small(dataset)
    folder = folder_of(dataset)
    train = Tokens(folder, "train", block_size)
    val = Tokens(folder, "val", block_size)
    tok = tokenizer(train.meta["tokenizer"])

    # the mask is one more token
    mask = train.meta["vocab_size"]
    c = gpt_config(config, given, vocab_size=mask + 1)

    torch.manual_seed(seed)
    bert = Bert(c).to(device)

    def batch(step: int) -> tuple:
        x, _ = train.batch(step, batch_size, seed=seed)
        return hide(x, mask, generator(seed, step))

    fit(bert, batch, config)
    error, loss = evaluate(bert, val, mask)
    result(c, seed, f"error of hidden tokens {error:.4f}, loss {loss:.4f}")

    # the beginning of the validation text, with each fifth token hidden
    gaps = torch.from_numpy(val.ids[None, :block_size].astype(int)).to(device)
    gaps[:, 4::5] = mask
    text = "".join("_" if i == mask else tok.decode([i]) for i in gaps[0].tolist())

    logits = bert.lm_head(bert.hidden(gaps, Bidirectional()))
    best = logits[..., :mask].argmax(-1)  # the mask itself is no answer
    filled = torch.where(gaps == mask, best, gaps)
    print(text, tok.decode(filled[0].tolist()), sep="\n\n")


if __name__ == "__main__":
    run_example(globals(), GPTConfig)
