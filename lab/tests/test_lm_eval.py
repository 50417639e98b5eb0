"""lab/hub/lm_eval.py: log p and texts computed by hand, an exported folder, tasks, mistakes."""

import itertools
import json
import os
import sys

import pytest
import torch
from harness import write

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from errors import UserError
from lab.hub import lm_eval as script
from model import GPT, GPTConfig
from text.tokenizers import END, ByteTokenizer, CharTokenizer
from training.checkpoint import open_model


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test asks the hub. (The environment's HF_HUB_OFFLINE would be read once, for the tests of other files too.)"""
    for holder in (pytest.importorskip("huggingface_hub").constants, pytest.importorskip("datasets").config):
        monkeypatch.setattr(holder, "HF_HUB_OFFLINE", True)


LETTERS = "\n abcdefghi."
TOK = CharTokenizer(LETTERS, eot=True)
T = 16
CASES = {
    "softmax": {},
    "laser": {"attention": "laser", "position": "rope", "heads": "SL", "window": 5},
    "beta": {"attention": "beta", "position": "none", "differential": True, "heads": "SSLL/L"},
}


def gpt(tok=TOK, **choices) -> GPT:
    """A small model with weights so large that it prefers some tokens to others."""
    torch.manual_seed(1)
    sizes = {"block_size": T, "vocab_size": tok.n_vocab, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**sizes | choices)).eval()
    for p in model.parameters():
        p.data *= 4 if p.dim() > 1 else 1
    return model


def requests(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


@torch.no_grad()
def log_probs(model: GPT, seen: list[int]) -> torch.Tensor:
    """log p of every next token, by a forward pass over the last block_size tokens of what was seen."""
    return model(torch.tensor([seen[-model.config.block_size :]]))[0][0, -1].log_softmax(-1)


def by_hand(model: GPT, context: list[int], answer: list[int]) -> tuple[float, bool]:
    """(log p, greedy) of an answer, token by token. What does not fit is cut from the left of the whole, once."""
    context = context[max(0, len(context) + len(answer) - model.config.block_size - 1) :]
    total, greedy = 0.0, True
    for i, token in enumerate(answer):
        log_p = log_probs(model, context + answer[:i])
        total, greedy = total + log_p[token].item(), greedy and log_p.argmax().item() == token
    return total, greedy


def written_by_hand(model: GPT, prompt: list[int], n: int) -> list[int]:
    ids = [*prompt]
    for _ in range(n):
        ids.append(log_probs(model, ids)[: TOK.n_vocab].argmax().item())
    return ids[len(prompt) :]


# -----------------------------------------------------------------------------
# by hand


@pytest.mark.parametrize("case", CASES)
def test_log_p_of_answers(case):
    """In float32 and bfloat16. A text without a context begins at its boundary; lm-eval moves spaces to the answer."""
    model = gpt(**CASES[case])
    contexts = ["abc", "abc", "a", "abcdefghi abcdef", "abcdefghi abcdefgh. abcdefgh", "abcd", "abcd", "abc "]
    answers = [" defg", " d.", "b", " ab", " abc def", "e", "f", "de"]
    pairs = [*zip(contexts, answers, strict=True), ("abcd", TOK.decode(written_by_hand(model, TOK.encode("abcd"), 3)))]
    asked = requests("loglikelihood", ("", "abc"), *pairs)
    got = script.adapter(model, TOK, 4).loglikelihood(asked, disable_tqdm=True)
    for (context, answer), (log_p, greedy) in zip([(END, "abc"), *pairs], got, strict=True):
        n = len(context.rstrip(" "))
        expected = by_hand(model, TOK.encode(context[:n]), TOK.encode(context[n:] + answer))
        assert log_p == pytest.approx(expected[0], abs=1e-4) and greedy == expected[1], (context, answer)
    assert got[-1][1] and not all(greedy for _, greedy in got)
    half = script.adapter(model, TOK, 4, "bfloat16").loglikelihood(asked, disable_tqdm=True)
    assert [p for p, _ in half] != [p for p, _ in got]
    assert [p for p, _ in half] == pytest.approx([p for p, _ in got], abs=0.3, rel=0.02)


@pytest.mark.parametrize("case", CASES)
def test_texts(case):
    """Greedy by default; contexts of several lengths; one is too long: its last T - max_gen_toks tokens are seen."""
    model, n = gpt(**CASES[case], vocab_size=TOK.n_vocab + 9), 7  # ids that mean nothing are not written
    contexts = ["abc", "abd", "a", "abcdefghi abcdefghi. abcdef", "abe", "i"]
    whole = [TOK.decode(written_by_hand(model, TOK.encode(context)[-(T - n) :], n)) for context in contexts]
    stop = next(text[3:5] for text in whole if len(set(text[:5])) > 1)
    lm = script.adapter(model, TOK, 3)
    for until in ([], stop, ["\n\n\n", stop]):
        asked = requests("generate_until", *[(context, {"until": until, "max_gen_toks": n}) for context in contexts])
        expected = [text.split(END)[0].split(stop if until else "\0")[0] for text in whole]
        assert lm.generate_until(asked, disable_tqdm=True) == expected and any(expected)


# -----------------------------------------------------------------------------
# tasks

ENDS = [(" and", " of"), (" R", " no")]
ROWS = [
    {"prompt": f"the lord of {a}", "answer": b, "choices": [b, c] if i % 3 else [c, b]}
    for i, (a, (b, c)) in enumerate(itertools.product(("all", "noble", "Rome!", "and the lord speaks: "), ENDS))
]
KINDS = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": "choices",
                "doc_to_target": "{{choices.index(answer)}}", "metric_list": [{"metric": "acc"}]},
    "greedy": {"output_type": "loglikelihood", "doc_to_target": "answer",
               "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}]},
    "write": {"output_type": "generate_until", "doc_to_target": "answer", "metric_list": [{"metric": "exact_match"}],
              "generation_kwargs": {"until": ["a"], "max_gen_toks": 6, "do_sample": False}},
}  # fmt: skip


def save_task(folder, kind: str) -> str:
    """The path of a YAML file in folder, beside its JSONL."""
    with open(os.path.join(folder, "rows.jsonl"), "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in ROWS)
    task = {"task": f"mine_{kind}", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
            "test_split": "test", "doc_to_text": "prompt", "target_delimiter": ""}  # fmt: skip
    path = os.path.join(folder, f"{kind}.yaml")
    with open(path, "w") as f:
        json.dump(task | KINDS[kind], f)  # JSON is YAML
    return path


@pytest.fixture
def data(tmp_path, text) -> str:
    """A data set whose characters have a boundary of documents."""
    tok = CharTokenizer("".join(sorted(set(text))), eot=True)
    n = int(len(text) * 0.9)
    write(tmp_path / "data", tok, {"train": text[:n], "val": text[n:]}, {"from": "words"})
    return str(tmp_path / "data")


def test_an_exported_folder_has_the_same_numbers(train, run, tmp_path):
    """In lm-eval's own model of the exported folder."""
    from lm_eval.models.huggingface import HFLM

    folder = str(tmp_path / "exported")
    assert train("--max_iters=30", "--attention=laser", "--heads=SSSL", "--window=4", "--position=rope")[0] == 0
    assert run("lab/hub/export.py", f"--out_dir={tmp_path / 'out'}", f"--to={folder}", "--custom")[0] == 0
    theirs = HFLM(pretrained=folder, device="cpu", batch_size=3, dtype="float32", trust_remote_code=True)
    model, tok, _, _ = open_model("resume", str(tmp_path / "out"), "best")
    ours = script.adapter(model, tok, 3)
    assert theirs.max_length == ours.max_length and theirs.prefix_token_id == ours.prefix_token_id
    answers = requests("", ("the lord", " of"), ("noble Rome!", " and the lord of all"))
    for one, other in zip(ours.loglikelihood(answers), theirs.loglikelihood(answers), strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    write = requests("", ("the lord", {"until": ["a"], "max_gen_toks": 9}))
    assert ours.generate_until(write) == theirs.generate_until(write)


# -----------------------------------------------------------------------------
# the script


def test_a_task_of_ones_own(train, run, tmp_path, monkeypatch):
    """A YAML beside its JSONL, from another folder: the accuracy is the one that log p by hand gives."""
    assert train("--max_iters=20")[0] == 0
    paths = [save_task(tmp_path, kind) for kind in ("choices", "greedy")]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    where = [f"--out_dir={tmp_path / 'out'}", f"--out={tmp_path / 'r.json'}", f"--tasks={','.join(paths)}"]
    code, out, err = run("lab/hub/lm_eval.py", *where, "--device=cpu")
    assert code == 0, err
    model, tok, _, about = open_model("resume", str(tmp_path / "out"), "best")
    scores = {}  # {question: what by_hand gives for its choices, the answer first}
    for i, row in enumerate(ROWS):
        choices = sorted(row["choices"], key=lambda choice: choice != row["answer"])
        scores[i] = [by_hand(model.eval(), tok.encode(row["prompt"]), tok.encode(choice)) for choice in choices]
    acc = sum(answer[0] > other[0] for answer, other in scores.values()) / len(ROWS)
    greedy = sum(answer[1] for answer, _ in scores.values()) / len(ROWS)
    results = json.load(open(tmp_path / "r.json"))
    assert results["results"]["mine_choices"]["acc,none"] == pytest.approx(acc)
    assert results["results"]["mine_greedy"]["acc,none"] == pytest.approx(greedy)
    assert results["config"]["model"] == about and about in out and "|mine_choices|" in out


class FewTasks(TaskManager):
    """lm-eval's index of all its tasks takes seconds to make; this one has some folders."""

    def __init__(self, include_defaults: bool):
        names = ("super_glue", "winogrande", "wsc273", "xstorycloze", "race", "piqa", "openbookqa", "hellaswag", "arc")
        here = os.path.dirname(sys.modules["lm_eval.tasks"].__file__)
        super().__init__(include_defaults=False, include_path=[f"{here}/{name}" for name in names if include_defaults])


def test_the_tasks_of_the_laser_paper(monkeypatch):
    """17 different ones: lm-eval knows 16 names; the other one is a file of ours, for the hub's data as they are."""
    names = [name for name in script.LASER if not name.endswith(".yaml")]
    assert len(set(script.LASER)) == 17 and len(names) == 16
    assert set(names) <= set(FewTasks(True).all_subtasks)
    import datasets

    row = {"example_id": "middle1.txt", "article": "Tom has a dog.", "answer": "B", "question": "What has Tom?",
           "options": ["A cat", "A dog", "Two", "None"]}  # fmt: skip
    asked, rows = [], datasets.Dataset.from_list([row])
    splits = dict.fromkeys(("train", "validation", "test"), rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda **args: asked.append(args) or splits)
    (path,) = set(script.LASER) - set(names)
    (task,) = script.load([path], num_fewshot=None)["tasks"].values()
    assert asked == [{"path": "ehovy/race", "name": "middle"}]
    assert task.doc_to_text(row) == "Article: Tom has a dog.\n\nQuestion: What has Tom?\nAnswer:"
    assert task.doc_to_choice(row)[int(task.doc_to_target(row))] == "A dog"


@pytest.fixture
def mistake(run, tmp_path, monkeypatch):
    """mistake(what it says, *flags): the script says a sentence and exits with 2."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", FewTasks)

    def mistake(says: str, *flags: str) -> None:
        code, _, err = run("lab/hub/lm_eval.py", f"--out_dir={tmp_path / 'out'}", "--device=cpu", *flags)
        assert code == 2 and says in err and "Traceback" not in err, err

    return mistake


def test_mistakes(train, mistake, run, tmp_path, monkeypatch):
    mistake("there is no checkpoint", "--tasks=piqa")
    assert train("--max_iters=1")[0] == 0
    mistake("--tasks= names no task")
    mistake("cannot load the task none.yaml: KeyError", "--tasks=none.yaml")
    mistake("'hellaswg' is not a registered task", "--tasks=hellaswg")
    path = save_task(tmp_path, "choices")
    mistake("--limit=0 must be at least 1", "--limit=0", f"--tasks={path}")
    mistake("no file can be written there", f"--out={tmp_path}", f"--tasks={path}")
    with open(tmp_path / "rows.jsonl", "a") as f:
        f.write(json.dumps({"prompt": "the cäsar", "answer": "a", "choices": ["a", "the"]}) + "\n")
    mistake("the text holds 'ä'", f"--tasks={path}")
    (tmp_path / "rows.jsonl").unlink()
    mistake(f"cannot load the task {path}: FileNotFoundError", f"--tasks={path}")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    mistake("lab/hub/lm_eval.py needs lm_eval: pip install lm_eval", f"--tasks={path}")


def test_what_does_not_fit():
    lm = script.adapter(gpt(), TOK, 4)
    with pytest.raises(UserError, match=r"has 17 tokens; this model takes 1 to block_size=16"):
        lm.loglikelihood(requests("", ("a", "b" * 17)))
    with pytest.raises(UserError, match="the text holds 'z'"):
        lm.loglikelihood(requests("", ("a", "z")))


def test_the_token_before_a_text(capsys):
    assert script.adapter(gpt(), TOK, 4).prefix_token_id == TOK.eot
    assert script.adapter(gpt(ByteTokenizer()), ByteTokenizer(), 4).prefix_token_id == 255
    tok = CharTokenizer(LETTERS)
    assert script.adapter(gpt(tok), tok, 4).prefix_token_id == tok.encode("\n")[0]
    assert "no boundary of documents" in capsys.readouterr().err
    with pytest.raises(UserError):
        script.adapter(gpt(), CharTokenizer("abc"), 4)
