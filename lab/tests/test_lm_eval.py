"""lab/hub/lm_eval.py: log p and texts computed by hand, tasks, mistakes."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from harness import done, parametrize, refusal, refused

pytest.importorskip("lm_eval")
import lm_eval.tasks
from lm_eval.api.instance import Instance

from errors import UserError
from lab.hub import lm_eval as script
from model import GPT, GPTConfig
from text.tokenizers import END, ByteTokenizer, CharTokenizer
from training.checkpoint import open_model

LETTERS = "\n abcdefghi."
TOK = CharTokenizer(LETTERS, eot=True)
T = 16
SHORT_LASER = {"attention": "laser", "position": "rope", "heads": "SL", "window": 5}
BETA = {"attention": "beta", "position": "none", "differential": True, "heads": "SSLL/L"}
choices = parametrize("choices", [{}, SHORT_LASER, BETA], ids=str)


def gpt(tok=TOK, **choices):
    """A small model with weights so large that it prefers some tokens to others."""
    torch.manual_seed(1)
    sizes = {"block_size": T, "vocab_size": tok.n_vocab, "n_layer": 2, "n_head": 4, "n_embd": 32}
    model = GPT(GPTConfig(**sizes | choices)).eval()
    for p in model.parameters():
        p.data *= 4 if p.dim() > 1 else 1
    return model


def requests(*arguments):
    return [Instance("", {}, args, i) for i, args in enumerate(arguments)]


@torch.no_grad()
def log_probs(model, seen):
    """log p of every next token, by a forward pass over the last block_size tokens of `seen`."""
    return model(torch.tensor([seen[-model.config.block_size :]]))[0][0, -1].log_softmax(-1)


def by_hand(model, context, answer):
    """(log p, greedy) of an answer, token by token; first the left of a long context is cut off."""
    context = context[max(0, len(context) + len(answer) - model.config.block_size - 1) :]
    total = 0.0
    greedy = True
    for token in answer:
        log_p = log_probs(model, context)
        total += log_p[token].item()
        greedy &= log_p.argmax().item() == token
        context = [*context, token]
    return total, greedy


def written_by_hand(model, prompt, n):
    ids = [*prompt]
    for _ in range(n):
        ids.append(log_probs(model, ids)[: TOK.n_vocab].argmax().item())
    return TOK.decode(ids[len(prompt) :])


# -----------------------------------------------------------------------------
# by hand

ANSWERS = [
    ("", "abc"),
    ("abc", " defg"),
    ("abc", " d."),
    ("abcdefghi abcdef", " ab"),
    ("abcdefghi abcdefgh. abcdefgh", " abc def"),
    ("abc ", "de"),  # lm-eval moves the space to the answer
]


@choices
def test_log_p_of_answers(choices):
    """In float32 and bfloat16. A text without a context begins at its boundary."""
    model = gpt(**choices)
    pairs = [*ANSWERS, ("abcd", written_by_hand(model, TOK.encode("abcd"), 3))]
    asked = requests(*pairs)
    answers = script.adapter(model, TOK, 4).loglikelihood(asked)
    for (context, answer), (log_p, is_greedy) in zip(pairs, answers, strict=True):
        n = len(context.rstrip(" "))
        before = TOK.encode(context[:n] or END)
        expected = by_hand(model, before, TOK.encode(context[n:] + answer))
        assert (log_p, is_greedy) == pytest.approx(expected, abs=1e-4), (context, answer)
    assert answers[-1][1] and not all(is_greedy for _, is_greedy in answers)

    half = script.adapter(model, TOK, 4, "bfloat16").loglikelihood(asked)
    assert half != answers
    for (log_p_half, _), (log_p, _) in zip(half, answers, strict=True):
        assert log_p_half == pytest.approx(log_p, abs=0.3, rel=0.02)


@choices
def test_texts(choices):
    """Greedy by default. Of a long context, the last T - max_gen_toks tokens are seen."""
    model = gpt(**choices, vocab_size=TOK.n_vocab + 9)  # 9 ids mean nothing: none is written
    n = 7
    contexts = ["abc", "abd", "a", "abcdefghi abcdefghi. abcdef", "abe", "i"]
    whole = [written_by_hand(model, TOK.encode(text)[-(T - n) :], n) for text in contexts]
    stop = next(text[3:5] for text in whole if len(set(text[:5])) > 1)
    lm = script.adapter(model, TOK, 3)
    for until in ([], stop, ["\n\n\n", stop]):
        settings = {"until": until, "max_gen_toks": n}
        asked = requests(*((context, settings) for context in contexts))
        expected = [text.split(END)[0].split(stop if until else "\0")[0] for text in whole]
        assert any(expected)
        assert lm.generate_until(asked) == expected


def test_what_does_not_fit():
    lm = script.adapter(gpt(), TOK, 4)
    with refusal(r"has 17 tokens; this model takes 1 to block_size=16", UserError):
        lm.loglikelihood(requests(("a", "b" * 17)))
    with refusal("the text holds 'z'", UserError):
        lm.loglikelihood(requests(("a", "z")))


def test_the_token_before_a_text(capsys):
    assert script.adapter(gpt(), TOK, 4).prefix_token_id == TOK.eot
    assert script.adapter(gpt(ByteTokenizer()), ByteTokenizer(), 4).prefix_token_id == 255
    tok = CharTokenizer(LETTERS)
    assert script.adapter(gpt(tok), tok, 4).prefix_token_id == tok.encode("\n")[0]
    assert "no boundary of documents" in capsys.readouterr().err
    with pytest.raises(UserError):
        script.adapter(gpt(), CharTokenizer("abc"), 4)


# -----------------------------------------------------------------------------
# tasks


def test_the_tasks_of_the_laser_paper():
    """17 different ones: lm-eval knows 16 names, and one is a file of ours."""
    names = [name for name in script.LASER if not name.endswith(".yaml")]
    assert len(set(script.LASER)) == 17 and len(names) == 16
    files = Path(lm_eval.tasks.__file__).parent.rglob("*.yaml")
    lines = "".join(file.read_text("utf-8") for file in files)  # its own index takes 18 seconds
    assert {*names} <= {*re.findall(r"task: \W?(\w+)", lines)}


PROMPTS = ("all", "noble", "Rome!", "and the lord speaks: ")
CHOICES = ([" and", " of"], [" R", " no"], [" of", " and"])  # the first one is right
ROWS = [
    {"prompt": f"the lord of {prompt}", "answer": choices[0], "choices": sorted(choices)}
    for prompt in PROMPTS
    for choices in CHOICES
]


def save_task(folder, rows):
    """The path of a task: line_ends.yaml, copied and renamed as its comment says, and its rows."""
    text = Path("lab/hub/tasks/line_ends.yaml").read_text()
    (folder / "mine.yaml").write_text(text.replace("line_ends", "mine"))
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "mine.yaml")


# -----------------------------------------------------------------------------
# the script


def test_a_task_of_ones_own(train, run, tmp_path, monkeypatch):
    """A YAML beside its JSONL, from another folder: the accuracy that log p by hand gives."""
    done(train("--max_iters=20"))
    trained = str(tmp_path / "out")
    flags = f"--out_dir={trained} --tasks={save_task(tmp_path, ROWS)} --out=r.json --device=cpu"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    flags = [*flags.split(), "--which=latest"]
    out = done(run("lab/hub/lm_eval.py", *flags, "--limit=7"))

    model, tok, _, about = open_model("resume", trained, "latest")
    model.eval()
    right = 0
    for row in ROWS[:7]:
        prompt = tok.encode(row["prompt"])
        scores = {text: by_hand(model, prompt, tok.encode(text)) for text in row["choices"]}
        right += max(scores, key=scores.get) == row["answer"]
    results = json.loads(Path("r.json").read_text())
    assert results["results"]["mine"]["acc,none"] == pytest.approx(right / 7)
    assert about in out and "|mine " in out
    out = done(run("lab/hub/lm_eval.py", *flags, "--num_fewshot=2"))
    assert json.loads(Path("r.json").read_text())["n-shot"] == {"mine": 2}


def test_mistakes(train, run, tmp_path, monkeypatch):
    """The script says a sentence and exits with 2."""

    def mistake(says, *flags):
        trained = f"--out_dir={tmp_path / 'out'}"
        refused(run("lab/hub/lm_eval.py", trained, "--device=cpu", *flags), says)

    mistake("there is no checkpoint", "--tasks=piqa")
    done(train("--max_iters=1"))
    mistake("--tasks= names no task")
    mistake("cannot load the task none.yaml: KeyError", "--tasks=none.yaml")
    tasks = f"--tasks={save_task(tmp_path, ROWS)}"
    mistake("--limit=0 must be at least 1", "--limit=0", tasks)
    mistake("no file can be written there", f"--out={tmp_path}", tasks)
    save_task(tmp_path, [{"prompt": "the cäsar", "answer": "a", "choices": ["a", "the"]}])
    mistake("the text holds 'ä'", tasks)
    (tmp_path / "mine.jsonl").unlink()
    mistake("mine.yaml: FileNotFoundError", tasks)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    mistake("lab/hub/lm_eval.py needs lm_eval: pip install lm_eval", tasks)
