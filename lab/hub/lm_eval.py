"""Evaluates a model on tasks with lm-eval, the Language Model Evaluation Harness (pip install lm_eval).

    python -m lab.hub.lm_eval --out_dir=out-shakespeare-char-cpu --tasks=lab/hub/tasks/line_ends.yaml
    python -m lab.hub.lm_eval --init_from=gpt2 --tasks=hellaswag,piqa --limit=100
    python -m lab.hub.lm_eval --out_dir=out --tasks=laser --num_fewshot=1

A task is a name that lm-eval knows, or the path of a YAML file of your own. lm-eval downloads the data of its tasks; a
task of your own needs no network. Texts are truncated, cut into windows and scored as lm-eval's own models do it.
"""

import contextlib
import difflib
import functools
import json
import os
import random
from typing import Literal

from configurator import at_least_one, check_writable, configure, pick_device, user_errors
from errors import NotFinite, UserError, first_line, note, optional

# isort: split
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from text.sampling import stream
from text.tokenizers import Tokenizer, hub_args
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

# The 16 tasks of the LASER paper's table 2, in its order, and ArcE of tables 6 and 7. Three are not quite the paper's:
# - WSC: the paper's percentages are multiples of 1/285; lm-eval has SuperGLUE's validation set of 104 questions.
# - StoryCloze: lm-eval's storycloze_2016 needs data from its authors; xstorycloze_en was made from these data.
# - RaceM: lm-eval's race is RaceH. race_middle.yaml is ours.
LASER = ["wsc", "winogrande", "wsc273", "wic", "xstorycloze_en", "sglue_rte", "record",
         os.path.join(os.path.dirname(__file__), "tasks", "race_middle.yaml"), "race", "piqa", "openbookqa", "multirc",
         "hellaswag", "copa", "cb", "boolq", "arc_easy"]  # fmt: skip
USER = "lab/hub/lm_eval.py"
GENERATION = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}  # a task's settings, as known here
SEED = 1234  # lm-eval's: it decides which solved examples stand before a question


def adapter(model: torch.nn.Module, tok: Tokenizer, batch_size: int, device: str, amp: object) -> object:
    """A GPT in the form that lm-eval evaluates. It gives what lm-eval's HFLM gives for a model of transformers."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm

    def tensor(rows: list) -> torch.Tensor:
        return torch.tensor(rows, device=device)

    class Adapter(TemplateLM):
        max_length = model.config.block_size
        eot_token_id = tok.eot

        @functools.cached_property
        def prefix_token_id(self) -> int:
            """The token before a text without a context: bos, else eot, else a line end, as sample.py's --start."""
            if tok.bos is None and tok.eot is None:
                note("the vocabulary has no boundary of documents: texts without a context begin after a line end")
                return tok.encode("\n")[0]
            return tok.eot if tok.bos is None else tok.bos

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
            return tok.encode(string)

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, **_) -> list[tuple[float, bool]]:
            """(log p, whether it is the greedy one) of each continuation. What does not fit is cut from the left."""
            rows, answers = [], [None] * len(requests)
            for i, (_, context, continuation) in enumerate(requests):
                if not 1 <= len(continuation) <= self.max_length:
                    most = f"1 to block_size={self.max_length}"
                    raise UserError(f"an answer of the task has {len(continuation)} tokens; this model takes {most}")
                rows.append(((context + continuation)[-self.max_length - 1 :], len(continuation), i))
            rows.sort(key=lambda row: len(row[0]))  # little padding
            for at in tqdm(range(0, len(rows), batch_size), "log p", disable=disable_tqdm):
                batch = rows[at : at + batch_size]
                for (_, _, i), answer in zip(batch, self.scored(batch), strict=True):
                    answers[i] = answer
            return answers

        def scored(self, rows: list[tuple[list[int], int, int]]) -> list[tuple[float, bool]]:
            """The same for a batch of (ids, how many of them are the answer's, _)."""
            sizes = [n for _, n, _ in rows]
            targets = tensor([token for ids, n, _ in rows for token in ids[-n:]])
            with amp:
                h = model.hidden(pad_sequence([tensor(ids[:-1]) for ids, _, _ in rows], batch_first=True))
                h = torch.cat([x[len(ids) - n - 1 : len(ids) - 1] for x, (ids, n, _) in zip(h, rows, strict=True)])
                logits = model.predict(h[None], targets[None])[0][0].float()
            if not logits.isfinite().all():
                raise NotFinite("the model's logits are not finite; has its training diverged?")
            log_p = (-F.cross_entropy(logits, targets, reduction="none")).split(sizes)
            greedy = (logits.argmax(-1) == targets).split(sizes)
            return [(p.sum().item(), g.all().item()) for p, g in zip(log_p, greedy, strict=True)]

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
            """log p of whole texts, in windows of block_size tokens; each token is predicted once."""
            windows, owners = [], []
            for i, (text,) in enumerate(request.args for request in requests):
                ids, first = tok.encode(text), self.prefix_token_id
                pairs = get_rolling_token_windows(ids, first, self.max_length, context_len=1)
                windows += [(None, *make_disjoint_window(pair)) for pair in pairs]
                owners += [i] * (len(windows) - len(owners))
            sums = [0.0] * len(requests)
            for i, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
                sums[i] += log_p
            return sums

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
            """What the model writes after each context. Those of one length share a batch: a cache has one length."""
            groups, texts = {}, [""] * len(requests)
            for i, (context, given) in enumerate(request.args for request in requests):
                settings = normalize_gen_kwargs(given, 256)  # as HFLM
                if unknown := set(settings) - GENERATION:
                    known = ", ".join(sorted(GENERATION))
                    raise UserError(f"the task's generation_kwargs have {unknown.pop()!r}; known here are {known}")
                if (room := self.max_length - (most := settings["max_gen_toks"])) < 1:
                    why = f"block_size={self.max_length} leaves no room for the question"
                    raise UserError(f"the task takes answers of {most} tokens (max_gen_toks): {why}")
                prompt = (tok.encode(context) or [self.prefix_token_id])[-room:]
                groups.setdefault((len(prompt), repr(settings)), []).append((i, prompt, settings))
            groups = [g[at : at + batch_size] for g in groups.values() for at in range(0, len(g), batch_size)]
            for group in tqdm(groups, "texts", disable=disable_tqdm):
                numbers, prompts, (settings, *_) = zip(*group, strict=True)
                for i, text in zip(numbers, self.written(prompts, settings), strict=True):
                    texts[i] = text
            return texts

        def written(self, prompts: tuple[list[int], ...], settings: dict) -> list[str]:
            """The texts after prompts of one length, up to one of `until`, the end of the text or max_gen_toks."""
            # as HFLM: greedy, unless the task says more; top_k is 50 in transformers, and 0 means all tokens
            sampling = settings.get("temperature", 0.0), settings.get("top_k", 50) or None, settings.get("top_p")
            limits = {"stop": tok.eot, "vocab_size": tok.n_vocab}
            rows, until = [[] for _ in prompts], [stop for stop in settings["until"] if stop]

            def ended(row: list[int]) -> bool:
                return tok.eot in row or any(stop in tok.decode(row) for stop in until)

            with amp:
                for tokens in stream(model, tensor(prompts), settings["max_gen_toks"], *sampling, **limits):
                    for row, token in zip(rows, tokens[:, 0].tolist(), strict=True):
                        row.append(token)
                    if all(map(ended, rows)):
                        break
            texts = [tok.decode(row[: row.index(tok.eot)] if tok.eot in row else row) for row in rows]
            return [postprocess_generated_text(text, until, None) for text in texts]

    return Adapter()


def load(names: list[str], num_fewshot: int | None) -> dict:
    """lm-eval's tasks of these names and paths, with their data."""
    datasets, tasks = optional("datasets", USER), optional("lm_eval.tasks", USER)
    known = [name for name in names if not name.endswith((".yaml", ".yml"))]
    manager = tasks.TaskManager(include_defaults=bool(known))  # the index of all tasks takes seconds
    for name in names:
        if name in known and name not in manager.task_index:
            near = difflib.get_close_matches(name, manager.all_tasks, 1)
            raise UserError(f"lm-eval has no task {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if name not in known and not os.path.isfile(name):
            raise UserError(f"there is no file {name}")
    if known and hub_args("gpt2"):  # no hub answers: for each task `datasets` would try for 23 s
        optional("huggingface_hub", USER).constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    found = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        folder, file = (".", name) if name in known else os.path.split(os.path.abspath(name))
        try:
            with contextlib.chdir(folder):  # a YAML file names the files beside it
                more = manager.load([file])
        except Exception as error:  # the classes of several libraries
            raise UserError(f"cannot load the task {name}: {type(error).__name__}: {first_line(error)}") from error
        if twice := set(found["tasks"]) & set(more["tasks"]):
            raise UserError(f"--tasks names the task {twice.pop()} twice")
        found = {key: found[key] | more[key] for key in found}
    for name, task in found["tasks"].items():  # as lm-eval: --num_fewshot changes no task that says 0
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            raise UserError(f"the task {name} runs code that the model writes, or shows it more than text: not here")
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
    device, _, amp = pick_device(config["device"], config["dtype"])
    evaluate, utils = optional("lm_eval", USER).evaluate, optional("lm_eval.utils", USER)
    model, tok, _, about = open_model(init_from, out_dir, which)
    print(about)
    model.eval().to(device)
    loaded = load(names, num_fewshot)
    random.seed(0)
    torch.manual_seed(SEED)
    results = evaluate(adapter(model, tok, batch_size, device, amp), loaded, limit=limit, log_samples=False)
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
