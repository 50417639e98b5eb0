"""Evaluates a model on tasks with lm-eval, the Language Model Evaluation Harness (pip install lm_eval).

    python -m lab.hub.lm_eval --out_dir=out-laser --tasks=lab/hub/tasks/line_ends.yaml
    python -m lab.hub.lm_eval --init_from=gpt2 --tasks=hellaswag,piqa --limit=100
    python -m lab.hub.lm_eval --out_dir=out --tasks=laser --num_fewshot=1

A task is a name that lm-eval knows, or the path of a YAML file of your own. lm-eval downloads the data of its tasks; a
task of your own needs no network. The model is scored by HFLM, lm-eval's class for the models of transformers.
"""

import contextlib
import json
import logging
import os
import random
from typing import Literal

from configurator import at_least_one, configure, pick_device, user_errors
from errors import UserError, first_line, note, optional
from lab.experiments.results import check_writable

# isort: split
import torch

from text.tokenizers import HubTokenizer, Tokenizer
from training.checkpoint import open_model

# Which model?
init_from = "resume"  # resume: the checkpoint in out_dir; or gpt2, gpt2-xl, ..., a model of the hub, a local folder
out_dir = "out"  # the folder of a run of train.py
which: Literal["best", "latest"] = "best"  # the checkpoint with the lowest validation loss, or the latest one
# Which tasks?
tasks = ""  # lm-eval's names or paths of YAML files, with commas; laser: the 17 tasks of the LASER paper's tables
num_fewshot: int | None = None  # solved examples before each question, 1 in the LASER paper; None: as the task says
limit: int | None = None  # only this many questions of each task; None: all
out: str | None = None  # a JSON file for all results
# What does it run on?
batch_size = 8  # texts that are computed together
device = "auto"  # auto (the first of cuda, mps and cpu that there is), cpu, cuda, cuda:0 or mps
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 or float16 on CUDA, else float32

# The 16 tasks of the LASER paper's table 2, in its order, and ArcE of tables 6 and 7 (lab/hub/README.md has the names)
LASER = ["wsc", "winogrande", "wsc273", "wic", "xstorycloze_en", "sglue_rte", "record",
         os.path.join(os.path.dirname(__file__), "tasks", "race_middle.yaml"), "race", "piqa", "openbookqa", "multirc",
         "hellaswag", "copa", "cb", "boolq", "arc_easy"]  # fmt: skip
USER = "lab/hub/lm_eval.py"
SEED = 1234  # lm-eval's: it decides which solved examples stand before a question


def adapter(model: torch.nn.Module, tok: Tokenizer, batch_size: int, dtype: str = "float32") -> object:
    """lm-eval's HFLM of a GPT, with our tokenizer."""
    optional("accelerate", USER)
    HFLM = optional("lm_eval.models.huggingface", USER).HFLM
    from lab.hub.modeling_nanoattn import NanoattnForCausalLM
    from lab.hub.tokenizer_json import fast

    class Adapter(HFLM):
        def tok_encode(self, string: str, *_, left_truncate_len: int | None = None, **more) -> list[int]:
            return tok.encode(string)[-(left_truncate_len or 0) :]

        def tok_decode(self, tokens: int | list[int] | None, *_, **more) -> str | None:
            if tokens is None or isinstance(tokens, int):  # the token of the end; it may be missing
                return tokens if tokens is None else tok.decode([tokens])
            return tok.decode(tokens[: (tokens + [tok.eot]).index(tok.eot)])

        def _loglikelihood_tokens(self, requests: list, *args, **more) -> list[tuple[float, bool]]:
            sizes = [len(answer) for _, _, answer in requests]
            for size in (size for size in sizes if not 1 <= size <= self.max_length):
                most = f"1 to block_size={self.max_length}"
                raise UserError(f"an answer of the task has {size} tokens; this model takes {most}")
            return super()._loglikelihood_tokens(requests, *args, **more)

    theirs = NanoattnForCausalLM.of(model).eval().to(model.lm_head.weight.device)
    padding = range(tok.n_vocab, model.config.vocab_size)  # ids that mean nothing are not written
    theirs.generation_config.suppress_tokens = [*padding] or None
    their_tok = tok._tok if isinstance(tok, HubTokenizer) else fast(tok, model.config.block_size)
    if their_tok.pad_token is None:
        their_tok.pad_token = tok.decode([0])
    bos = their_tok.bos_token_id
    first = tok.eot if bos is None else bos  # the token before a text without a context
    if first is None:
        note("the vocabulary has no boundary of documents: texts without a context begin after a line end")
        (first,) = tok.encode("\n")
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)  # it would warn of a model that is no name
    # logits_cache would give a wrong log p for one text that is cut at two places (lm-eval 0.4.13)
    settings = {"backend": "causal", "batch_size": batch_size, "prefix_token_id": first, "logits_cache": False}
    settings |= {"mixed_precision_dtype": None if dtype == "float32" else dtype}
    return Adapter(theirs, tokenizer=their_tok, max_length=model.config.block_size, **settings)


def load(names: list[str], num_fewshot: int | None) -> dict:
    """lm-eval's tasks of these names and paths, with their data."""
    tasks = optional("lm_eval.tasks", USER)
    known = [name for name in names if not name.endswith((".yaml", ".yml"))]
    manager = tasks.TaskManager(include_defaults=bool(known))  # the index of all tasks takes seconds
    found = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        folder, file = (".", name) if name in known else os.path.split(os.path.abspath(name))
        try:
            with contextlib.chdir(folder):  # a YAML file names the files beside it
                more = manager.load([file])
        except Exception as error:  # the classes of several libraries
            raise UserError(f"cannot load the task {name}: {type(error).__name__}: {first_line(error)}") from error
        found = {key: found[key] | more[key] for key in found}
    for task in found["tasks"].values():  # as lm-eval: --num_fewshot changes no task that says 0
        said = task.get_config("num_fewshot")
        if said is None or (num_fewshot is not None and said != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=SEED)
    return found


def main() -> None:
    at_least_one(batch_size=batch_size, limit=1 if limit is None else limit)
    given = [name.strip() for name in tasks.split(",") if name.strip()]
    names = [name for one in given for name in (LASER if one == "laser" else [one])]
    if not names:
        raise UserError("--tasks= names no task: give lm-eval's names, paths of YAML files, or laser")
    if out is not None:
        check_writable(out)
    device, dtype, _ = pick_device(config["device"], config["dtype"])
    evaluate, utils = optional("lm_eval", USER).evaluate, optional("lm_eval.utils", USER)
    model, tok, _, about = open_model(init_from, out_dir, which)
    print(about)
    model.eval().to(device)
    loaded = load(names, num_fewshot)
    random.seed(0)
    torch.manual_seed(SEED)
    results = evaluate(adapter(model, tok, batch_size, dtype), loaded, limit=limit, log_samples=False)
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
