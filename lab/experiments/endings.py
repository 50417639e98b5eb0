"""Fine-tuning on a task: which of two endings is the true one? Softmax against LASER, as in the LASER paper's table 3.

    python -m lab.experiments.endings --source=books     # a folder of novels, a .txt file for each

It needs lm_eval. An example is a passage of a novel (some 50 words), the next sentence, and another sentence of the
same novel. The novels are divided: most are for training from scratch, the rest for the task's examples (train, val,
test). For each attention and seed: train.py trains a small model on the novels, then lab/hub/finetune.py
fine-tunes it on the task's true endings, and lab/hub/lm_eval.py says how often the passage points at the true
ending, before and after. Finished runs are skipped.
"""

import json
import os
import random
import re
import subprocess
import sys

from configurator import at_least_one
from errors import UserError
from lab.experiments.results import difference, measured, saved, show_table, spread, start
from lab.experiments.runs import finished, last

# Which text, and how many runs?
source = "books"  # a folder of novels, one .txt file for each; every fourth one is for the task
seeds = 3  # runs per attention, with the seeds 1, 2, ...
out = "lab/experiments/endings.json"  # the results
out_dir = "out-endings"  # the folder for the data and the runs
# How large is the task?
n_train = 3000  # examples to fine-tune on
n_test = 1000  # examples to measure with; a fifth as many are for validation
# How long is the training?
max_iters = 1500  # steps of training from scratch
task_iters = 300  # steps of fine-tuning

ATTENTIONS = {"softmax": [], "LASER": ["--attention=laser"]}
MODEL = "--n_layer=4 --n_head=4 --n_embd=128 --block_size=128 --batch_size=16 --position=rope".split()
YAML = """task: endings
dataset_path: json
dataset_kwargs: {data_files: {test: test.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
target_delimiter: ""
doc_to_choice: "{{choices}}"
doc_to_target: "{{choices.index(answer)}}"
metric_list: [{metric: acc_mutual_info, aggregation: mean, higher_is_better: true}]
"""


def examples(text: str, n: int, rng: random.Random) -> list[dict]:
    """n examples from a novel: {"prompt": a passage, "answer": the next sentence, "choices": it and another one}."""
    sentences = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    short = [i for i, s in enumerate(sentences) if 6 <= len(s.split()) <= 20]
    found = []
    for i in rng.sample(short, len(short)):
        prompt, first = [], i
        while first > 0 and len(prompt) < 40:
            first -= 1
            prompt = sentences[first].split() + prompt
        if not 40 <= len(prompt) <= 70:
            continue
        other = sentences[rng.choice([j for j in short if not first <= j <= i])]
        answer, wrong = f" {sentences[i]}", f" {other}"
        choices = rng.sample([answer, wrong], 2)
        found.append({"prompt": " ".join(prompt), "answer": answer, "choices": choices})
        if len(found) == n:
            return found
    raise UserError(f"a novel of {len(text):,} characters has only {len(found)} examples; {n} are needed")


def write_task(folder: str, paths: list[str]) -> None:
    """Writes train.jsonl, val.jsonl, test.jsonl and endings.yaml; each novel gives examples to one of the three."""
    parts = {"train": paths[2:], "val": paths[:1], "test": paths[1:2]}
    sizes = {"train": n_train, "val": max(1, n_test // 5), "test": n_test}
    rng = random.Random(0)
    os.makedirs(folder, exist_ok=True)
    for split, own in parts.items():
        rows = []
        for path in own:
            with open(path, encoding="utf-8") as f:
                rows += examples(f.read(), -(-sizes[split] // len(own)), rng)
        with open(os.path.join(folder, f"{split}.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    with open(os.path.join(folder, "endings.yaml"), "w", encoding="utf-8") as f:  # the last one: now all are there
        f.write(YAML)


def divided() -> tuple[list[str], list[str]]:
    """The paths of the novels to train on, and of those for the task."""
    names = sorted(name for name in os.listdir(source) if name.endswith(".txt"))
    if len(names) < 16:
        raise UserError(f"--source={source} has {len(names)} .txt files; 16 are needed, a novel in each")
    paths = [os.path.abspath(os.path.join(source, name)) for name in names]
    return [p for i, p in enumerate(paths) if i % 4], paths[::4]


def script(*command: str) -> None:
    """Runs a script of ours. Raises UserError if it fails."""
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f"{ended.stderr}\nthis failed: python {' '.join(command)}")


def accuracy(run: str, task: str, to: str) -> dict:
    """The share of the examples whose passage makes the true ending likelier by more than it does the other one.

    lm-eval compares log p(ending after the passage) - log p(ending alone): the endings differ in length, and in how
    usual their words are.
    """
    flags = [f"--out_dir={run}", f"--tasks={task}/endings.yaml", "--batch_size=32", f"--out={to}"]
    script("-m", "lab.hub.lm_eval", *flags)
    with open(to) as f:
        return {"acc": json.load(f)["results"]["endings"]["acc_mutual_info,none"]}


def main() -> None:
    at_least_one(seeds=seeds, n_train=n_train, n_test=n_test)
    novels, of_task = divided()
    text, data, task = (os.path.join(out_dir, name) for name in ("text", "data", "task"))
    if not os.path.exists(os.path.join(task, "endings.yaml")):
        for i, path in enumerate(novels):
            link = os.path.join(text, "val" if i == 0 else "train", os.path.basename(path))
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.path.lexists(link) or os.symlink(path, link)
        write_task(task, of_task)
    prepare = ["--tokenizer=sentencepiece", "--vocab_size=4000", f"--out_dir={data}"]
    script("data/text/prepare.py", f"--source={text}", *prepare)
    for seed in range(1, seeds + 1):
        for name, flags in ATTENTIONS.items():
            before, after, tokens = (os.path.join(out_dir, f"{name}-{seed}{x}") for x in ("", "-task", "-tokens"))
            more = [f"--dataset={data}", *MODEL, f"--max_iters={max_iters}", f"--lr_decay_iters={max_iters}"]
            more += ["--learning_rate=2e-3", "--eval_interval=500", f"--warmup_iters={max_iters // 30}"]
            more += [f"--seed={seed}", *flags]
            scratch = finished(f"{name}, seed {seed}", ["config/train_shakespeare_char_cpu.py", *more], before)
            if not os.path.exists(os.path.join(tokens, "meta.json")):
                made = f"--source={task}", f"--init_from={before}", f"--out_dir={tokens}"
                script("-m", "lab.hub.prepare_answers", *made)
            more = [f"--init_from={before}", f"--dataset={tokens}", f"--max_iters={task_iters}", f"--seed={seed}"]
            more += [f"--lr_decay_iters={task_iters}", f"--warmup_iters={task_iters // 15}"]
            more = ["lab/hub/finetune_task.py", *more]
            finetune = "-m", "lab.hub.finetune"
            tuned = finished(f"{name}, seed {seed}, fine-tuned", more, after, script=finetune)
            vals = [row["val_loss"] for row in tuned if "val_loss" in row]
            found = {"novels": last(scratch), "first": vals[0], "best": min(vals)}
            measured(out, name, "losses", seed, lambda found=found: found)
            for which, run in (("before", before), ("after", after)):
                to = os.path.join(run, "endings.json")
                measured(out, name, which, seed, lambda run=run, to=to: accuracy(run, task, to))
    show()


def show() -> None:
    """Prints the table of --out."""
    results, rows = saved(out, {}), []
    parts = [("losses", "novels"), ("losses", "first"), ("losses", "best"), ("before", "acc"), ("after", "acc")]
    for name in ATTENTIONS:
        mine, theirs = ([[r[key] for r in results[x][part].values()] for part, key in parts] for x in (name, "softmax"))
        rows.append([name, *map(spread, mine)])
        if name != "softmax":
            rows.append([f"{name} - softmax", *(difference(*pair) for pair in zip(mine, theirs, strict=True))])
    columns = "val loss, novels", "loss of the true endings before", "after", "accuracy before", "after"
    show_table(["", *columns], rows)


if __name__ == "__main__":
    start(globals())
