"""Writes a checkpoint as a model of Hugging Face's transformers library: config.json and model.safetensors.

    python scripts/export_hf.py --out_dir=out-shakespeare-char --to=exported
    python -c "from transformers import AutoModelForCausalLM as M; M.from_pretrained('exported')"

The model becomes a GPT-2, Llama, Mistral or Qwen 3. If it has a choice that none of them has, the script names the
choice and writes nothing. The tokenizer is not exported: tokens mean what they mean in the data set. For data in
GPT-2's tokens, the tokenizer is "gpt2" on the hub.
"""

import os
import sys
from typing import Literal

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from configurator import configure, user_errors
from errors import UserError
from training import checkpoint
from training.pretrained import export

# What is exported, and where does it go?
out_dir = "out"  # the folder of a run of train.py
to = "exported"  # the new folder
which: Literal["best", "latest"] = "best"  # best: best.pt, or ckpt.pt if there is no best.pt; latest: ckpt.pt


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
