"""Writes a checkpoint as a model of Hugging Face's transformers: config.json and model.safetensors.

    python scripts/export_hf.py --out_dir=out-shakespeare-char --to=exported
    python -c "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('exported'))"

A model with choices that none of GPT-2, Llama, Mistral and Qwen 3 has is refused, with the choices named.
The tokens stay those of the data set: GPT-2's own tokenizer is "gpt2" on the hub.
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import UserError, configure, user_errors
from training import checkpoint
from training.pretrained import export

out_dir = "out"  # the run's folder
to = "exported"  # the folder that is written
which: Literal["best", "latest"] = "best"  # best.pt, or ckpt.pt where there is none; or ckpt.pt


def main() -> None:
    if not to or (os.path.exists(to) and (not os.path.isdir(to) or os.listdir(to))):
        raise UserError(f"--to={to} must name a folder that is empty or not there yet")
    path = checkpoint.path_of(out_dir, which)
    theirs = export(checkpoint.model_of(checkpoint.load(path)))
    theirs.save_pretrained(to)
    print(f"{path} is {to}: {type(theirs).__name__}, {theirs.num_parameters():,} parameters")


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
