"""Prepares prompts and answers, to fine-tune a model on a task. Writes train.bin, val.bin and meta.json.

    python -m lab.hub.prepare_answers --source=endings --init_from=out-books --out_dir=data/endings
    python train.py lab/hub/finetune_task.py --init_from=out-books --dataset=endings

The source is a folder with train.jsonl, val.jsonl and maybe test.jsonl. Each line is an example:
{"prompt": "The capital of France is", "answer": " Paris"}. The model sees the prompt and, directly after it, the
answer. In training only the answer's tokens are targets. The tokens are those of the model that will be fine-tuned.
"""

import os

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from errors import UserError
from text import corpus, examples, tokenizers
from training.pretrained import GPT2, tokens_of

# Which examples, for which model?
source: str | None = None  # a folder with train.jsonl and val.jsonl
init_from = "gpt2"  # the model to fine-tune: a run's folder, a folder of lab/hub/export.py, gpt2, gpt2-medium, ...
# Where does it go?
out_dir = os.path.dirname(os.path.abspath(__file__))  # the folder for train.bin, val.bin and meta.json

config, _ = configure(globals())
globals().update(config)
with user_errors():
    if source is None:
        raise UserError("--source= says which examples: a folder with train.jsonl and val.jsonl")
    meta = tokens_of(init_from)
    if meta is None:
        raise UserError(f"--init_from={init_from} is no folder of a run or an export, nor one of {', '.join(GPT2)}")
    corpus.report(examples.prepare(out_dir, source, tokenizers.tokenizer(meta)))
