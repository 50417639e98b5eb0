"""Fine-tunes a model on prompts and answers (lab/hub/prepare_answers.py): train.py, with batches of them.

    python -m lab.hub.finetune lab/hub/finetune_task.py --init_from=out-books --dataset=endings --out_dir=out-endings

The flags are train.py's. The validation loss is the mean over the answers' tokens.
"""

import os
import runpy
import sys

import text.dataset
from lab.hub.prepare_answers import open_split

if __name__ == "__main__":
    text.dataset.Tokens = open_split  # train.py imports it from there
    sys.argv[0] = os.path.join(text.dataset.ROOT, "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
