"""Decoding past block_size with a cache that does not grow: stream(..., endless=True), sample.py --endless."""

import pytest
import torch
from harness import state_of
from reference import shaken

from model import GPT, GPTConfig
from training import checkpoint

V, T, LONG = 29, 32, 130
ENDLESS = [
    {"attention": "beta", "position": "rope", "conv": 1},
    {"attention": "beta", "position": "alibi", "differential": True},
    {"attention": "beta", "position": "none", "decay": "learned", "n_kv_head": 2},
    {"attention": "beta_squared", "short_attention": "softmax", "heads": "SSSL", "position": "rope", "conv": 4},
    {"attention": "beta_squared", "short_attention": "laser", "heads": "SL", "position": "rope", "nope_long": True},
    {"attention": "laser", "heads": "S", "position": "none", "decay": "alibi"},
    {"attention": "softmax", "heads": "S", "position": "alibi"},
]


def sizes(**choices: object) -> GPTConfig:
    window = {"window": 9} if "S" in choices.get("heads", "") else {}
    return GPTConfig(**{"vocab_size": V, "n_layer": 2, "n_head": 4, "n_embd": 32} | window | choices)


@pytest.mark.parametrize("choices", ENDLESS, ids=str)
@pytest.mark.parametrize("prompt", [3, T + 20])
def test_the_text_is_that_of_a_model_with_a_long_context(choices, prompt):
    gpt = shaken(sizes(block_size=T, **choices), 0.1, torch.float64)
    long = GPT(sizes(block_size=LONG, **choices)).double().eval()
    long.load_state_dict(gpt.state_dict())
    x = torch.randint(V, (2, prompt))
    sampling = {"temperature": 0.8, "seed": 3}
    expected = long.generate(x, LONG - prompt, **sampling)
    assert torch.equal(gpt.generate(x, LONG - prompt, endless=True, **sampling), expected)
    if choices.get("heads") != "S":  # otherwise all that can matter is in block_size tokens
        assert not torch.equal(gpt.generate(x, LONG - prompt, **sampling), expected)  # a window that slides


@pytest.mark.parametrize("choices", ENDLESS, ids=str)
def test_the_cache_does_not_grow(choices):
    gpt = shaken(sizes(block_size=T, **choices), 0.1, torch.float64)
    cache, found = gpt.new_cache(10**9), set()
    for n in (T, 1, 500, 1, 1):
        gpt(torch.randint(V, (1, n)), cache=cache)
        found.add(cache.nbytes)
    assert len(found) == 1 and cache.length > 10 * T


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"attention": "softmax", "position": "rope"}, "long heads of attention='softmax' keep all keys and values"),
        (
            {"attention": "laser", "short_attention": "beta", "heads": "SL", "position": "alibi"},
            "attention='laser' keep",
        ),
        ({"attention": "beta", "position": "relative"}, "attention='beta' keep all"),  # its bias needs all keys
        ({"attention": "beta"}, "position='learned' is not for endless texts"),
        ({"attention": "beta", "position": "sinusoidal"}, "position='sinusoidal' is not for endless texts"),
        ({"attention": "softmax", "heads": "S", "position": "t5"}, "position='t5' is not for endless texts"),
    ],
)
def test_a_cache_that_cannot_go_on_says_why(choices, says):
    gpt, x = shaken(sizes(block_size=T, **choices), 0.1, torch.float64), torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError) as error:
        gpt.new_cache(T + 1)
    assert f"this model ends at block_size={T}, because " in str(error.value) and says in str(error.value)
    with pytest.raises(ValueError, match="a cache of 43 tokens"):
        gpt.generate(x, 40, endless=True)
    assert gpt.generate(x, 10, endless=True).shape == (1, 13)  # within block_size


def test_the_script(train, run, tmp_path):
    """Trained and sampled past block_size."""
    choices = ("--attention=beta_squared", "--short_attention=softmax", "--heads=SSSL", "--window=8", "--position=rope")
    choices += ("--conv=4", "--decay=learned", "--dropout=0.1", "--attn_dropout=0")
    code, out, err = train(*choices)
    assert code == 0, err
    flags = (f"--out_dir={tmp_path / 'out'}", "--device=cpu", "--num_samples=1", "--start=the", "--max_new_tokens=200")
    code, out, err = run("sample.py", *flags, "--endless", "--which=latest")
    gpt = checkpoint.model_of(state_of(tmp_path)).eval()
    text = out.split("\n", 1)[1].removesuffix("\n---------------\n")
    assert code == 0 and len(text) == 203 and gpt.config.block_size == T, err
    assert text != run("sample.py", *flags, "--which=latest")[1].split("\n", 1)[1].removesuffix("\n---------------\n")
    prompt = "the lord of all speaks: noble Rome!"
    _, out, _ = run("sample.py", *flags, "--endless", f"--start={prompt}")
    assert prompt in out and "the model sees the last" not in out
    for wrong in ("--no-use_cache", "--plain"):
        code, _, err = run("sample.py", *flags, "--endless", wrong)
        assert code == 2 and "Traceback" not in err and ("use_cache" in err or "keep all keys" in err), err
