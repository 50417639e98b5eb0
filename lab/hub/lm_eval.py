"""Evaluate a model on tasks with lm-eval, the Language Model Evaluation Harness.

    python -m lab.hub.lm_eval --out_dir=out-laser --tasks=lab/hub/tasks/line_ends.yaml
    python -m lab.hub.lm_eval --init_from=gpt2 --tasks=hellaswag,piqa --limit=100
    python -m lab.hub.lm_eval --out_dir=out --tasks=laser --num_fewshot=1

A task is a name that lm-eval knows, or the path of a YAML file of your own. lm-eval downloads the
data of its tasks; a task of your own needs no network. HFLM, lm-eval's class for the models of
transformers, scores the model.
"""

import contextlib
import json
import logging
import os
import random
from pathlib import Path
from typing import Literal

import torch

import lab.hub.families  # noqa: F401 (--init_from= also takes these)
from configurator import at_least_one, configure, pick_device, user_errors
from errors import UserError, first_line, note, optional
from lab.experiments.results import check_writable
from text.tokenizers import HubTokenizer, Tokenizer
from training.checkpoint import open_model

# Which model?
init_from = "resume"  # resume: out_dir's checkpoint; or gpt2, gpt2-xl, ..., a folder, owner/model
out_dir = "out"  # the folder of a run of train.py
which: Literal["best", "latest"] = "best"  # the lowest validation loss, or the latest checkpoint
# Which tasks?
tasks = ""  # lm-eval's names, or paths of YAML files, with commas; laser: the paper's 17 tasks
num_fewshot: int | None = None  # solved examples before each question; None: as the task says
limit: int | None = None  # only this many questions of each task; None: all
out: str | None = None  # a JSON file for all results
# What does it run on?
batch_size = 8  # texts that are computed together
device = "auto"  # auto (the first available of cuda, mps and cpu), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: 16 bits on CUDA alone

# The 16 tasks of the LASER paper's table 2, in its order, and ArcE of its tables 6 and 7.
# lab/hub/README.md has the paper's names.
LASER = [
    "wsc",
    "winogrande",
    "wsc273",
    "wic",
    "xstorycloze_en",
    "sglue_rte",
    "record",
    str(Path(__file__).with_name("tasks") / "race_middle.yaml"),
    "race",
    "piqa",
    "openbookqa",
    "multirc",
    "hellaswag",
    "copa",
    "cb",
    "boolq",
    "arc_easy",
]
USER = "lab/hub/lm_eval.py"
SEED = 1234  # lm-eval's: it decides which solved examples stand before a question


def adapter(
    model: torch.nn.Module, tok: Tokenizer, batch_size: int, dtype: str = "float32"
) -> object:
    """lm-eval's HFLM of a GPT, with our tokenizer."""
    optional("accelerate", USER)
    HFLM = optional("lm_eval.models.huggingface", USER).HFLM
    from lab.hub.modeling_nanoattn import NanoattnForCausalLM
    from lab.hub.tokenizer_json import fast

    class Adapter(HFLM):
        def tok_encode(self, string, *_, left_truncate_len=None, **__):
            return tok.encode(string)[-(left_truncate_len or 0) :]

        def tok_decode(self, tokens, *_, **__):
            if tokens is None:  # there is no token of the end
                return None
            if isinstance(tokens, int):
                return tok.decode([tokens])
            end = [*tokens, tok.eot].index(tok.eot)
            return tok.decode(tokens[:end])

        def _loglikelihood_tokens(self, requests, *args, **kwargs):
            for _, _, answer in requests:
                if not 1 <= len(answer) <= self.max_length:
                    raise UserError(
                        f"an answer of the task has {len(answer)} tokens; "
                        f"this model takes 1 to block_size={self.max_length}"
                    )
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

    block_size = model.config.block_size
    exported = NanoattnForCausalLM.of(model).eval().to(model.lm_head.weight.device)
    without_meaning = list(range(tok.n_vocab, model.config.vocab_size))  # ids that no text has
    exported.generation_config.suppress_tokens = without_meaning or None
    exported_tok = tok._tok if isinstance(tok, HubTokenizer) else fast(tok, block_size)
    if exported_tok.pad_token is None:
        exported_tok.pad_token = tok.decode([0])
    first = tok.eot  # the token before a text without a context
    if exported_tok.bos_token_id is not None:
        first = exported_tok.bos_token_id
    if first is None:
        note(
            "the vocabulary has no boundary of documents: "
            "texts without a context begin after a line end"
        )
        (first,) = tok.encode("\n")
    # no warning that the model is not a name
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
    return Adapter(
        exported,
        tokenizer=exported_tok,
        max_length=block_size,
        backend="causal",
        batch_size=batch_size,
        prefix_token_id=first,
        logits_cache=False,  # lm-eval 0.4.13: wrong log p if one text is cut at two places
        mixed_precision_dtype=None if dtype == "float32" else dtype,
    )


def load(names: list[str], num_fewshot: int | None) -> dict:
    """lm-eval's tasks of these names and paths of YAML files, with their data."""
    paths = [name for name in names if name.endswith((".yaml", ".yml"))]
    # the index of lm-eval's tasks takes seconds
    manager = optional("lm_eval.tasks", USER).TaskManager(include_defaults=paths != names)
    loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        folder, file = os.path.split(os.path.abspath(name)) if name in paths else (".", name)
        try:
            with contextlib.chdir(folder):  # a YAML file names the files beside it
                for key, entries in manager.load([file]).items():
                    loaded[key] |= entries
        except Exception as error:  # of several libraries
            raise UserError(
                f"cannot load the task {name}: {type(error).__name__}: {first_line(error)}"
            ) from error
    for task in loaded["tasks"].values():
        default = task.get_config("num_fewshot")
        # as in lm-eval, --num_fewshot does not change a task whose file says 0
        if default is None or (num_fewshot is not None and default != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=SEED)
    return loaded


def main() -> None:
    at_least_one(batch_size=batch_size, limit=1 if limit is None else limit)
    names = []
    for name in tasks.split(","):
        names += LASER if name.strip() == "laser" else [name.strip()]
    names = [name for name in names if name]
    if not names:
        raise UserError(
            "--tasks= names no task: give lm-eval's names, paths of YAML files, or laser"
        )
    if out is not None:
        check_writable(out)
    device, dtype, _ = pick_device(config["device"], config["dtype"])
    evaluate = optional("lm_eval", USER).evaluate
    utils = optional("lm_eval.utils", USER)
    model, tok, _, about = open_model(init_from, out_dir, which)
    print(about)
    model.eval().to(device)
    loaded = load(names, num_fewshot)
    random.seed(0)
    torch.manual_seed(SEED)
    lm = adapter(model, tok, batch_size, dtype)
    results = evaluate(lm, loaded, limit=limit, log_samples=False)
    results["config"] = config | {"model": about}
    print(utils.make_table(results))
    if results.get("groups"):
        print(utils.make_table(results, "groups"))
    if out is not None:
        with open(out, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=2, default=utils.handle_non_serializable)


if __name__ == "__main__":
    config, _ = configure(globals())
    globals().update(config)
    with user_errors():
        main()
