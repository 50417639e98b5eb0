"""Decoding past block_size with a cache that does not grow: stream(endless=True), --endless."""

import torch
from harness import done, parametrize, refusal, refused
from reference import shaken

from model import GPT, GPTConfig

V, T, LONG = 29, 32, 130
SHORT = {"short_attention": "softmax", "heads": "SSSL", "window": 9, "position": "rope"}
ENDLESS = [
    {"attention": "beta", "position": "rope", "conv": 1},
    {"attention": "beta", "position": "none", "decay": "alibi", "n_kv_head": 2},
    SHORT | {"attention": "beta_squared", "conv": 4},
    SHORT | {"attention": "beta_squared", "short_attention": "laser", "nope_long": True},
    {"attention": "laser", "heads": "S", "window": 9, "position": "none", "decay": "alibi"},
]


def config(block_size, **choices):
    return GPTConfig(block_size, V, n_layer=2, n_head=4, n_embd=32, **choices)


def model(**choices):
    return shaken(config(T, **choices), 0.1, torch.float64)


@parametrize("choices", ENDLESS, ids=str)
@parametrize("prompt", [3, T + 20])
def test_the_text_is_that_of_a_model_with_a_long_context(choices, prompt):
    gpt = model(**choices)
    long = GPT(config(LONG, **choices)).double().eval()
    long.load_state_dict(gpt.state_dict())
    x = torch.randint(V, (2, prompt))
    options = {"temperature": 0.8, "seed": 3}
    text = gpt.generate(x, LONG - prompt, **options, endless=True)
    assert torch.equal(text, long.generate(x, LONG - prompt, **options))
    if choices.get("heads") != "S":  # otherwise all that can matter is in block_size tokens
        sliding = gpt.generate(x, LONG - prompt, **options)
        assert not torch.equal(text, sliding)


@parametrize("choices", ENDLESS, ids=str)
def test_the_cache_does_not_grow(choices):
    gpt = model(**choices)
    cache = gpt.new_cache(10**9)
    sizes = set()
    for n in (T, 1, 500, 1):
        gpt(torch.randint(V, (1, n)), cache=cache)
        sizes.add(cache.nbytes)
    assert len(sizes) == 1
    assert cache.length > 10 * T


KEEPS_ALL = "long heads of attention='{}' keep all keys and values"
ENDS = [
    ({"attention": "softmax", "position": "rope"}, KEEPS_ALL.format("softmax")),
    (SHORT | {"attention": "laser", "short_attention": "beta"}, KEEPS_ALL.format("laser")),
    ({"attention": "beta"}, "position='learned' is not for endless texts"),
]


@parametrize("choices, says", ENDS)
def test_a_cache_that_cannot_go_on_says_why(choices, says):
    gpt = model(**choices)
    x = torch.zeros(1, 3, dtype=torch.long)
    with refusal(f"this model ends at block_size={T}, because .*{says}"):
        gpt.new_cache(T + 1)
    with refusal("a cache of 43 tokens"):
        gpt.generate(x, 40, endless=True)
    assert gpt.generate(x, 10, endless=True).shape == (1, 13)  # within block_size


def test_the_script(train, run, tmp_path):
    """Trained and sampled past block_size."""
    done(
        train(
            "--attention=beta_squared --short_attention=softmax --heads=SSSL --window=8",
            "--position=rope --conv=4 --decay=alibi --dropout=0.1 --attn_dropout=0",
        )
    )
    flags = f"--out_dir={tmp_path / 'out'} --device=cpu --num_samples=1 --which=latest"
    prompt = "the lord of all speaks: noble Rome!"
    start = (f"--start={prompt}", "--max_new_tokens=200")

    def sample(*more):
        return run("sample.py", *flags.split(), *start, *more)

    text = done(sample("--endless")).partition("\n")[2]
    assert text.startswith(prompt)
    assert len(text.removesuffix("\n---------------\n")) == 200 + len(prompt)
    done(sample())
    refused(sample("--endless", "--no-use_cache"), "use_cache")
