"""Prepares prompts and answers, to fine-tune a model on a task. Writes train.bin, val.bin and meta.json.

    python -m lab.hub.prepare_answers --source=endings --init_from=out-books --out_dir=data/endings
    python -m lab.hub.finetune lab/hub/finetune_task.py --init_from=out-books --dataset=endings

The source is a folder with train.jsonl, val.jsonl and maybe test.jsonl. Each line is an example:
{"prompt": "The capital of France is", "answer": " Paris"}. The model sees the prompt and, directly after it, the
answer. In training only the answer's tokens are targets. The tokens are those of the model that will be fine-tuned.
"""

from configurator import configure, user_errors  # first: from here on Ctrl-C prints a sentence
from errors import UserError
from lab.hub.answers import prepare
from text.tokenizers import tokenizer
from training.pretrained import GPT2, tokens_of

# Which examples, for which model?
source: str | None = None  # a folder with train.jsonl and val.jsonl
init_from = "gpt2"  # the model to fine-tune: a run's folder, gpt2, gpt2-medium, ...
# Where do they go?
out_dir = "data/answers"  # the folder for train.bin, val.bin and meta.json

if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        if source is None:
            raise UserError("--source= says which examples: a folder with train.jsonl and val.jsonl")
        meta = tokens_of(init_from)
        if meta is None:
            raise UserError(f"--init_from={init_from} is no folder of a run, nor one of {', '.join(GPT2)}")
        for name, entry in prepare(out_dir, source, tokenizer(meta))["files"].items():
            print(f"{out_dir}/{name}: {entry['documents']:,} examples, {entry['tokens']:,} tokens")
