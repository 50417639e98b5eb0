"""The tables of compare.py: which rows, and which flags of train.py each row changes."""

from dataclasses import dataclass, field

CPU = "config/train_shakespeare_char_cpu.py"
NOVELS = "config/train_pg19_ls.py"


@dataclass
class Table:
    rows: dict[str, dict]  # {name: flags of train.py}
    file: str = CPU  # the config file of every run; or the file of an example, which is run instead of train.py
    flags: dict = field(default_factory=dict)  # flags of every run
    against: dict[str, str] = field(default_factory=dict)  # which row a row is compared with; otherwise the first one
    loss: str = "val"  # which validation loss counts: val (the last) or best (the lowest)
    steps: int | None = None  # of a run; rows are also compared in the time that the row they are compared with takes
    tune: tuple[float, ...] = ()  # learning rates to try for each row, with other seeds
    seeds: int = 3  # runs of each row
    keep: tuple[str, ...] = ()  # curves to keep, see runs.result_of
    vocab_size: int = 65  # of the data set, for times


LASER = {"attention": "laser"}
SHORT = {"heads": "SSSL", "window": 16}
CORES = {"softmax": {}, "LASER": LASER, "beta": {"attention": "beta"}, "LS": SHORT, "LASER + LS": LASER | SHORT}
VARIANTS = {  # and the table differential, at tuned rates
    "": {},
    " + temperature": {"temperature": 0.7},  # the paper tunes it, and does not name what it found
    " + temperature per dimension": {"per_dim_temperature": True},
    " + QK-norm": {"qk_norm": "layernorm"},
}
CHOICES = {  # docs/choices.md has each row's paper, and where the choice is made
    "GPT-2": {},
    # positions
    **{x: {"position": x} for x in ("none", "sinusoidal", "relative", "t5", "alibi", "rope")},
    "rope S/S/L": {"heads": "S/S/L", "window": 16, "position": "rope"},
    "rope S/S/L nope_long": {"heads": "S/S/L", "window": 16, "position": "rope", "nope_long": True},
    "decay alibi": {"decay": "alibi"},
    "decay learned": {"decay": "learned"},
    "conv 4": {"conv": 4},
    # norms
    "bias": {"bias": True},
    "rmsnorm": {"norm": "rmsnorm"},
    **{x: {"where": x} for x in ("post", "sandwich", "olmo2")},
    # blocks
    "parallel": {"block": "parallel"},
    **{x: {"mlp": x} for x in "gelu_exact relu relu2 swish elu selu sigmoid softplus".split()},
    **{x: {"mlp": x} for x in "glu reglu geglu swiglu liglu".split()},
    # depth and width, with as many weights
    "1 x 164": {"n_layer": 1, "n_embd": 164, "n_head": 4},
    "6 x 68": {"n_layer": 6, "n_embd": 68, "n_head": 4},
    "12 x 48": {"n_layer": 12, "n_embd": 48, "n_head": 4},
    # heads
    "GQA 2": {"n_kv_head": 2},
    "MQA": {"n_kv_head": 1},
    "head_dim 32": {"head_dim": 32},
    "dropout": {"dropout": 0.1},
    "dropout of weights alone": {"attn_dropout": 0.1},
    # stability
    **{f"qk_norm {x}": {"qk_norm": x} for x in ("layernorm", "rmsnorm", "l2")},
    "softcap": {"attention": "softcap"},
    "logit_softcap 15": {"logit_softcap": 15},
    "z_loss": {"z_loss": 1e-4},
    "zero_init": {"zero_init": True},
    "untied": {"tied": False},
    # training
    "muon": {"optimizer": "muon"},
    "lamb": {"optimizer": "lamb", "learning_rate": 1e-2},
    "nadamw": {"optimizer": "nadamw"},
    "adam_eps 1e-24": {"adam_eps": 1e-24},
    "weight_decay 0": {"weight_decay": 0.0},
    "label_smoothing 0.1": {"label_smoothing": 0.1},
    "wsd": {"schedule": "wsd"},
    "constant": {"schedule": "constant"},
}
SPEEDRUN = {  # one choice of the config changed in each row
    "speedrun": {},
    "learned positions": {"position": "learned", "rope_base": None},
    "rope_base 10000": {"rope_base": 10000.0},
    "no QK-norm": {"qk_norm": "none"},
    "qk_norm rmsnorm": {"qk_norm": "rmsnorm"},
    "3 layers": {"n_layer": 3},
    "4 layers": {"n_layer": 4},
    "96 wide": {"n_embd": 96, "n_hidden": 288},
    "tied": {"tied": True},
    "muon_beta 0.95": {"muon_beta": 0.95},
    "AdamW": {"optimizer": "adamw", "learning_rate": 6e-3},
}
SPEEDRUN_MORE = {  # what the config does not choose; and as many steps as take a larger model's time
    "speedrun": {},
    **{f"{n} steps": {"max_iters": n, "lr_decay_iters": n} for n in (430, 540, 590)},
    "logit_softcap 15": {"logit_softcap": 15},
    "bias": {"bias": True},
    "rmsnorm": {"norm": "rmsnorm"},
    "1 head": {"n_head": 1},
    "4 heads": {"n_head": 4},
    "parallel": {"block": "parallel"},
    "SL": {"heads": "SL", "window": 16},
    "weight_decay 0": {"weight_decay": 0.0},
    "swiglu": {"mlp": "swiglu", "n_hidden": 128},
    "gelu": {"mlp": "gelu"},
}
WARMUP = {
    f"{where} {rate:g} warm-up {n}": {"where": where, "learning_rate": rate, "warmup_iters": n}
    for rate in (6e-3, 1e-3)
    for where in ("pre", "post")
    for n in (100, 0, 500)
}
NARANG = {  # rows of Narang et al.'s table that no flag of train.py has
    "GPT-2": {},
    "rezero": {"variant": "rezero"},
    "rezero + LayerNorm": {"variant": "rezero_norm"},
    "rezero + RMSNorm": {"variant": "rezero_norm", "norm": "rmsnorm"},
    "fixup": {"variant": "fixup"},
    "block sharing": {"variant": "shared"},
    "block sharing + factorised embedding": {"variant": "factorised,shared", "tied": False},
    "block sharing + factorised and shared embedding": {"variant": "factorised,shared"},
    "factorised embedding": {"variant": "factorised", "tied": False},
    "factorised and shared embedding": {"variant": "factorised"},
    **{f"synthesizer {x}": {"variant": f"synthesizer_{x.replace(' ', '_')}"}
       for x in ("dense", "dense plus", "random", "random plus")},
}  # fmt: skip
MAPS = {"beta": {}, **{f"beta_{x}": {"variant": f"beta_{x}"} for x in ("unit", "root", "l1", "max")}}
QKV = {
    f"{name}{more}": flags | variant
    for name, flags in (("muon", CHOICES["muon"]), ("lamb", CHOICES["lamb"]))
    for more, variant in (("", {}), (", q k v apart", {"variant": "qkv_apart"}))
}

CONV, LEARNED = {"conv": 4}, {"decay": "learned"}
BETA, SQUARED = {"attention": "beta"}, {"attention": "beta_squared"}
MIXED = {"short_attention": "softmax"} | SHORT
LINEAR = {
    "softmax": {},
    "softmax, conv": CONV,
    "softmax, learned decay, conv": LEARNED | CONV,
    "LS": SHORT,
    "LS, conv": SHORT | CONV,
    "beta": BETA,
    "beta, decay": BETA | {"decay": "alibi"},
    "beta, learned decay": BETA | LEARNED,
    "beta, conv": BETA | CONV,
    "beta, learned decay, conv": BETA | LEARNED | CONV,
    "beta_squared, conv": SQUARED | CONV,
    "beta_squared, learned decay, conv": SQUARED | LEARNED | CONV,
    "softmax short, beta long, conv": MIXED | BETA | CONV,
    "softmax short, beta_squared long": MIXED | SQUARED,
    "softmax short, beta_squared long, conv": MIXED | SQUARED | CONV,
}
AT_256 = {"block_size": 256, "batch_size": 3, "eval_iters": 145}
FAST = ("beta, learned decay, conv", "softmax short, beta long, conv", "softmax short, beta_squared long, conv")
LONG = {"n_layer": 4, "n_head": 8, "n_embd": 128, "heads": "L", "batch_size": 1, "gradient_accumulation_steps": 1}
LONG |= {"learning_rate": 3e-3, "min_lr": 3e-4, "warmup_iters": 50, "eval_iters": 40, "log_logits": False}


def linear(steps: int, *positions: str, only: tuple = tuple(LINEAR), window: int = 16, **other: object) -> Table:
    """A table of rows of LINEAR. Each is compared with softmax that has the same positions."""
    rows = {f"{row} ({p})": LINEAR[row] | {"position": p} for p in positions for row in only}
    rows = {row: flags | ({"window": window} if "window" in flags else {}) for row, flags in rows.items()}
    return Table(
        rows, steps=steps, against={row: f"softmax ({flags['position']})" for row, flags in rows.items()}, **other
    )


STICK, V2 = {"attention": "stick_breaking"}, {"after": "differential_v2", "n_head": 12, "head_dim": 16, "n_kv_head": 6}
NOWHERE = {"position": "none"}
IDEAS = {  # with RoPE, unless a row says something else; lab/ideas.py has the papers
    "softmax": {},
    "LS": SHORT,
    "stick-breaking": STICK,
    "stick-breaking, no positions": STICK | NOWHERE,
    "stick-breaking, LASER's log": {"attention": "stick_laser"},
    "differential V2": V2,
    "stick-breaking, differential V2": STICK | V2,
    "stick-breaking, differential V2, no positions": STICK | V2 | NOWHERE,
    "stick-breaking, LASER's log, differential V2": {"attention": "stick_laser"} | V2,
    "delta rule": {"attention": "delta_rule"},
    "gate": {"after": "gate"},
    "gate per head": {"after": "gate_head"},
    "XSA": {"after": "xsa"},
    "stick-breaking, gate": STICK | {"after": "gate"},
    "sink": {"attention": "sink"},
    "SSMax": {"attention": "ssmax"},
    "softpick": {"attention": "softpick"},
    "top 8": {"attention": "top_k"},
    "LASER": LASER,
    "LASER, learned temperature": {"attention": "laser_temperature"},
    "beta": BETA,
    "beta, learned number": {"attention": "beta_learned"},
    "beta, gate": BETA | {"after": "gate"},
    "beta_squared": SQUARED,
    "beta_squared, learned number": {"attention": "beta_squared_learned"},
    "beta_squared, gate": SQUARED | {"after": "gate"},
    "softmax short, beta_squared long": MIXED | SQUARED,
    "softmax short, beta_squared long, gate": MIXED | SQUARED | {"after": "gate"},
    "softmax short, beta_squared long, differential V2": MIXED | SQUARED | V2,
}
BEST = ["softmax", "stick-breaking", "stick-breaking, no positions", "differential V2"]
BEST += ["stick-breaking, differential V2"]
ROPE = {"import": "lab.ideas", "position": "rope"}

# LASER against softmax at two sizes: what is tuned is the learning rate of each row
SIZES = {"3 x 96": {"n_layer": 3, "n_head": 6, "n_embd": 96}, "4 x 128": {"n_layer": 4, "n_head": 8, "n_embd": 128}}
SETTLED = {f"{name}, {size}": flags | x for size, flags in SIZES.items() for name, x in list(CORES.items())[:2]}
ASPECT = {
    f"{n} x {C}": {"n_layer": n, "n_embd": C, "n_head": H}
    for n, C, H in ((3, 96, 6), (1, 164, 4), (6, 68, 4), (12, 48, 4))
}
TWO = {"softmax": {}, "LASER": LASER}


def steps_of(n: int, evaluations: int = 1) -> dict:
    """The flags of a run of n steps."""
    return {"max_iters": n, "lr_decay_iters": n, "eval_interval": n // evaluations}


TABLES = {
    "cores": Table(CORES, loss="best"),  # the README's first table
    "laser": Table(  # the LASER paper's tables 2, 4, 5 and 7
        {name + more: flags | x for more, x in VARIANTS.items() for name, flags in (("softmax", {}), ("LASER", LASER))},
        flags=steps_of(1500),
        against={f"LASER{more}": f"softmax{more}" for more in VARIANTS},
    ),
    "laser_settled": Table(
        SETTLED,
        flags=steps_of(1000, 10) | {"eval_iters": 73, "min_lr": 0.0},
        against={f"LASER, {size}": f"softmax, {size}" for size in SIZES} | {"softmax, 4 x 128": "softmax, 4 x 128"},
        tune=(2.5e-3, 5e-3, 1e-2, 2e-2),
        seeds=8,
        keep=("val_loss",),
    ),
    "differential": Table(TWO, flags={"differential": True} | steps_of(1500), tune=(1.5e-3, 3e-3, 6e-3), seeds=5),
    "long_short": Table(  # as long_short.py has them
        {"long": {"heads": "L"}, "LS": {"heads": "SSSSSL", "window": 50}},
        flags=steps_of(400, 8) | {"eval_iters": 20, "block_size": 2048, "batch_size": 1},
        tune=(3e-3, 6e-3, 1.2e-2),
        seeds=5,
        keep=("val_loss",),
    ),
    "aspect": Table(ASPECT, flags=steps_of(1000), tune=(3e-3, 6e-3, 1.2e-2)),  # as many weights
    "choices": Table(CHOICES, flags=steps_of(1000)),  # docs/choices.md
    "speedrun": Table(SPEEDRUN, "config/speedrun_shakespeare_char_cpu.py"),
    "speedrun_more": Table(SPEEDRUN_MORE, "config/speedrun_shakespeare_char_cpu.py"),
    "warmup": Table(WARMUP, flags=steps_of(1000)),
    "narang": Table(NARANG, flags=steps_of(1000)),
    "maps": Table(MAPS, flags={"attention": "beta", "position": "rope"} | steps_of(1000)),
    "qkv": Table(QKV, flags=steps_of(1000), against={row: row.split(",")[0] for row in QKV}),
    "bert": Table(
        TWO, "lab/examples/bert.py", {"steps": 1000}, tune=(1e-3, 2e-3, 4e-3), seeds=8
    ),  # the LASER paper's models
    "vit": Table(TWO | {"beta": {"attention": "beta"}}, "lab/examples/vit.py"),
    "conformer": Table(TWO, "lab/examples/conformer.py"),
    "before_attention": Table(
        {x: {"attention": x} for x in ("mean", "bahdanau", "lecture")},
        "lab/examples/before_attention.py",
        {"picture": ""},
    ),
    "64": linear(1500, "learned", "rope"),  # attention in linear time, at contexts of 64 and of 256
    "256": linear(
        1500,
        "rope",
        only=("softmax", "softmax, conv", "softmax, learned decay, conv", "LS, conv", *FAST),
        flags=AT_256,
    ),
    "ideas": Table(IDEAS, flags=ROPE, steps=1500),
    "ideas_conv": Table(IDEAS, flags=ROPE | CONV, steps=1500),
    "ideas_256": Table({row: IDEAS[row] for row in BEST}, flags=ROPE | AT_256, steps=1500),
    "novels": linear(  # n = 2048, after data/pg19/prepare.py
        400, "rope", only=("softmax", "softmax, conv", *FAST), window=50, file=NOVELS, flags=LONG, vocab_size=10000
    ),
    "novels_1024": Table(
        {
            "softmax": {},
            "LASER": LASER,
            "LS": {"heads": "SSSL", "window": 50},
            "stick-breaking, no positions": STICK | NOWHERE | {"import": "lab.ideas"},
            "the same in softmax's time": STICK | NOWHERE | {"import": "lab.ideas"} | steps_of(373),
            "differential V2": V2 | {"n_head": 16, "n_kv_head": 8, "import": "lab.ideas"},
        },
        NOVELS,
        LONG | steps_of(400) | {"block_size": 1024, "batch_size": 2, "position": "rope"},
        vocab_size=10000,
    ),
}
