"""Fine-tune a model on prompts and answers: train.py, with batches of prepare_answers.py.

    python -m lab.hub.finetune lab/hub/finetune_task.py --init_from=out-books --dataset=endings

The flags are train.py's. The validation loss is the mean over the answers' tokens.
"""

import os
import runpy
import sys
from unittest import mock

from configurator import ROOT
from lab.hub.prepare_answers import open_split

if __name__ == "__main__":
    sys.argv[0] = os.path.join(ROOT, "train.py")
    with mock.patch("text.dataset.Tokens", open_split):  # train.py imports Tokens from there
        runpy.run_path(sys.argv[0], run_name="__main__")
