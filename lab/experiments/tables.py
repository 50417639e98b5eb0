"""The tables of compare.py: their rows, and the flags of train.py that each row changes."""

import re
import shlex
from dataclasses import dataclass, field

from errors import UserError
from lab.experiments.runs import flags_of

CPU = "config/train_shakespeare_char_cpu.py"
NOVELS = "config/train_pg19_ls.py"


@dataclass
class Table:
    rows: dict  # {name: flags of train.py}
    file: str = CPU  # the config file of every run; or an example's file: the example runs
    flags: dict = field(default_factory=dict)  # flags of every run
    # {row: the row that it is compared with}; rows that are not here: the first one
    against: dict = field(default_factory=dict)
    steps: int | None = None  # of a run; a number: rows are compared in equal time as well
    tune: tuple[float, ...] = ()  # learning rates to try for each row, with other seeds
    seeds: int = 3  # runs of each row
    first_seed: int = 1
    keep: tuple[str, ...] = ()  # curves to store, see runs.result_of
    vocab_size: int = 65  # of the data set, for times
    name: str = ""  # its key in TABLES

    def base(self, row: str) -> str:
        """The row that a row is compared with."""
        return self.against.get(row, next(iter(self.rows)))


def rows_of(text: str) -> dict[str, dict]:
    """{name: flags of train.py} of rows "name: --flag=value --other", on lines or between ";".

    A line that begins with # is a comment. Raises UserError for what is no row.
    """
    rows = {}
    for line in re.split("[;\n]", text):
        name, _, words = line.strip().partition(":")
        words = shlex.split(words)
        if not all(word.startswith("--") for word in words):
            raise UserError(f'{line.strip()!r} is no row, such as "name: --flag=value"')
        if name and not name.startswith("#"):
            rows[name] = flags_of(words)
    return rows


def each(flag: str, values: str, prefix: str = "") -> dict[str, dict]:
    """A row for each value of a flag; its name is the value."""
    return {prefix + value: {flag: value} for value in values.split()}


def steps_of(n: int, evaluations: int = 1) -> dict:
    """The flags of a run of n steps."""
    return {"max_iters": n, "lr_decay_iters": n, "eval_interval": n // evaluations}


LASER = {"attention": "laser"}
BETA = {"attention": "beta"}
SQUARED = {"attention": "beta_squared"}
SHORT = {"heads": "SSSL", "window": 16}
MIXED = {"short_attention": "softmax"} | SHORT
CONV = {"conv": 4}
LEARNED = {"decay": "learned"}
GATE = {"after": "gate"}
TWO = {"softmax": {}, "LASER": LASER}
VARIANTS = {  # and the table differential, at tuned rates
    "": {},
    " + temperature": {"temperature": 0.7},  # the paper tunes it, and does not name what it found
    " + temperature per dimension": {"per_dim_temperature": True},
    " + QK-norm": {"qk_norm": "layernorm"},
}
# docs/choices.md has each row's paper, and where the choice is made
CHOICES = rows_of("""
GPT-2:
# positions
none: --position=none
sinusoidal: --position=sinusoidal
relative: --import=lab.ideas.positions --position=relative
t5: --import=lab.ideas.positions --position=t5
alibi: --position=alibi
rope: --position=rope
rope S/S/L: --heads=S/S/L --window=16 --position=rope
rope S/S/L nope_long: --heads=S/S/L --window=16 --position=rope --nope_long
decay alibi: --decay=alibi
decay learned: --decay=learned
conv 4: --conv=4
# norms
bias: --bias
rmsnorm: --norm=rmsnorm
post: --where=post
sandwich: --where=sandwich
olmo2: --where=olmo2
# blocks
parallel: --block=parallel
gelu_exact: --mlp=gelu_exact
relu: --mlp=relu
relu2: --mlp=relu2
swish: --mlp=swish
elu: --mlp=elu
selu: --mlp=selu
sigmoid: --mlp=sigmoid
softplus: --mlp=softplus
glu: --mlp=glu
reglu: --mlp=reglu
geglu: --mlp=geglu
swiglu: --mlp=swiglu
liglu: --mlp=liglu
# depth and width, with as many weights
1 x 164: --n_layer=1 --n_embd=164 --n_head=4
6 x 68: --n_layer=6 --n_embd=68 --n_head=4
12 x 48: --n_layer=12 --n_embd=48 --n_head=4
# heads
GQA 2: --n_kv_head=2
MQA: --n_kv_head=1
head_dim 32: --head_dim=32
dropout: --dropout=0.1
dropout of weights alone: --attn_dropout=0.1
# stability
qk_norm layernorm: --qk_norm=layernorm
qk_norm rmsnorm: --qk_norm=rmsnorm
qk_norm l2: --qk_norm=l2
softcap: --attention=softcap
logit_softcap 15: --logit_softcap=15
z_loss: --z_loss=0.0001
zero_init: --zero_init
untied: --tied=False
# training
muon: --optimizer=muon
lamb: --optimizer=lamb --learning_rate=0.01
nadamw: --optimizer=nadamw
adam_eps 1e-24: --adam_eps=1e-24
weight_decay 0: --weight_decay=0.0
label_smoothing 0.1: --label_smoothing=0.1
wsd: --schedule=wsd
constant: --schedule=constant
""")
# one choice of the config changed in each row
SPEEDRUN = rows_of("""
speedrun:
learned positions: --position=learned --rope_base=None
rope_base 10000: --rope_base=10000.0
no QK-norm: --qk_norm=none
qk_norm rmsnorm: --qk_norm=rmsnorm
3 layers: --n_layer=3
4 layers: --n_layer=4
96 wide: --n_embd=96 --n_hidden=288
tied: --tied
muon_beta 0.95: --muon_beta=0.95
AdamW: --optimizer=adamw --learning_rate=0.006
""")
# what the config does not choose; and steps in which a larger model's time ends
SPEEDRUN_MORE = rows_of("""
speedrun:
430 steps: --max_iters=430 --lr_decay_iters=430
540 steps: --max_iters=540 --lr_decay_iters=540
590 steps: --max_iters=590 --lr_decay_iters=590
logit_softcap 15: --logit_softcap=15
bias: --bias
rmsnorm: --norm=rmsnorm
1 head: --n_head=1
4 heads: --n_head=4
parallel: --block=parallel
SL: --heads=SL --window=16
weight_decay 0: --weight_decay=0.0
swiglu: --mlp=swiglu --n_hidden=128
gelu: --mlp=gelu
""")
# the runs of docs/speedrun.md, track 1
RECORDS = rows_of("""
Muon: --max_iters=330 --lr_decay_iters=330
stick-breaking: --import=lab.ideas --attention=stick_breaking --position=none --rope_base=None \
--conv=4 --mlp=swiglu --n_hidden=128 --max_iters=210 --lr_decay_iters=210
""")
# track 2, and the run of nanoGPT's README, whose time it has
IN_NANOGPTS_TIME = rows_of("""
stick-breaking, 950 steps: --n_layer=3 --n_head=3 --n_embd=96 --block_size=128 --batch_size=16 \
--muon_beta=0.9 --import=lab.ideas --attention=stick_breaking --position=none --rope_base=None \
--conv=4 --mlp=swiglu --n_hidden=192 --max_iters=950 --lr_decay_iters=950
""")
NANOGPT = rows_of("""
nanoGPT's flags: --device=cpu --eval_iters=146 --eval_interval=2000 --log_interval=100 \
--block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 \
--lr_decay_iters=2000 --dropout=0.0 --sample_tokens=0
""")
WARMUP = {
    f"{where} {rate:g} warm-up {n}": {"where": where, "learning_rate": rate, "warmup_iters": n}
    for rate in (6e-3, 1e-3)
    for where in ("pre", "post")
    for n in (100, 0, 500)
}
# rows of Narang et al.'s table that no flag of train.py has
NARANG = rows_of("""
GPT-2:
rezero: --variant=rezero
rezero + LayerNorm: --variant=rezero_norm
rezero + RMSNorm: --variant=rezero_norm --norm=rmsnorm
fixup: --variant=fixup
block sharing: --variant=shared
block sharing + factorised embedding: --variant=factorised,shared --tied=False
block sharing + factorised and shared embedding: --variant=factorised,shared
factorised embedding: --variant=factorised --tied=False
factorised and shared embedding: --variant=factorised
synthesizer dense: --variant=synthesizer_dense
synthesizer dense plus: --variant=synthesizer_dense_plus
synthesizer random: --variant=synthesizer_random
synthesizer random plus: --variant=synthesizer_random_plus
""")
MAPS = rows_of("""
beta:
beta_unit: --variant=beta_unit
beta_root: --variant=beta_root
beta_l1: --variant=beta_l1
beta_max: --variant=beta_max
""")
QKV = rows_of("""
muon: --optimizer=muon
muon, q k v apart: --optimizer=muon --variant=qkv_apart
lamb: --optimizer=lamb --learning_rate=0.01
lamb, q k v apart: --optimizer=lamb --learning_rate=0.01 --variant=qkv_apart
""")

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
FAST = (
    "beta, learned decay, conv",
    "softmax short, beta long, conv",
    "softmax short, beta_squared long, conv",
)
LONG = {
    "n_layer": 4,
    "n_head": 8,
    "n_embd": 128,
    "heads": "L",
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 3e-3,
    "min_lr": 3e-4,
    "warmup_iters": 50,
    "eval_iters": 40,
    "log_logits": False,
}


def linear(steps: int, only: tuple = tuple(LINEAR), window: int = 16, **other: object) -> Table:
    """A table of rows of LINEAR, with RoPE."""
    rows = {}
    for name in only:
        flags = LINEAR[name] | {"position": "rope"}
        if "window" in flags:
            flags["window"] = window
        rows[name] = flags
    return Table(rows, steps=steps, **other)


STICK = {"attention": "stick_breaking"}
STICK_LASER = {"attention": "stick_laser"}
V2 = {"after": "differential_v2", "n_head": 12, "head_dim": 16, "n_kv_head": 6}
NOWHERE = {"position": "none"}
RECENT = {"import": "lab.ideas.recent"}
HYBRID = {"heads": "L/L/L/S", "short_attention": "softmax", "window": 255}  # sees all of 256
IDEAS = {  # with RoPE, unless a row says something else; lab/ideas/scores.py has the papers
    "softmax": {},
    "LS": SHORT,
    "stick-breaking": STICK,
    "stick-breaking, no positions": STICK | NOWHERE,
    "stick-breaking, LASER's log": STICK_LASER,
    "differential V2": V2,
    "stick-breaking, differential V2": STICK | V2,
    "stick-breaking, differential V2, no positions": STICK | V2 | NOWHERE,
    "stick-breaking, LASER's log, differential V2": STICK_LASER | V2,
    "delta rule": {"attention": "delta_rule"},
    "gate": GATE,
    "gate per head": {"after": "gate_head"},
    "XSA": {"after": "xsa"},
    "XSA, learned strength": {"after": "xsa_learned"} | RECENT,
    "LUCID": {"attention": "lucid"} | RECENT,
    "stick-breaking, gate": STICK | GATE,
    "sink": {"attention": "sink"},
    "SSMax": {"attention": "ssmax"},
    "softpick": {"attention": "softpick"},
    "top 8": {"attention": "top_k"},
    "LASER": LASER,
    "LASER, learned temperature": {"attention": "laser_temperature"},
    "beta": BETA,
    "beta, learned number": {"attention": "beta_learned"},
    "beta, gate": BETA | GATE,
    "beta_squared": SQUARED,
    "beta_squared, learned number": {"attention": "beta_squared_learned"},
    "beta_squared, gate": SQUARED | GATE,
    "softmax short, beta_squared long": MIXED | SQUARED,
    "softmax short, beta_squared long, gate": MIXED | SQUARED | GATE,
    "softmax short, beta_squared long, differential V2": MIXED | SQUARED | V2,
}
BEST = (
    "softmax",
    "stick-breaking",
    "stick-breaking, no positions",
    "differential V2",
    "stick-breaking, differential V2",
)
IMPORT = {"import": "lab.ideas"}
ROPE = IMPORT | {"position": "rope"}


def in_time(*steps: int, window: int = 16) -> dict[str, dict]:
    """Softmax, LS, stick-breaking without positions, and both: so many steps of each."""
    short = SHORT | {"window": window}
    stick = STICK | NOWHERE
    rows = {"softmax": {}, "LS": short, "stick-breaking": stick, "both": stick | short}
    # with a shorter rise of the rate some seeds fail at high rates
    each = zip(rows, steps, strict=True)
    return {row: rows[row] | steps_of(n) | {"warmup_iters": n // 5} for row, n in each}


# LASER against softmax at two sizes: what is tuned is the learning rate of each row
SIZES = {
    "3 x 96": {"n_layer": 3, "n_head": 6, "n_embd": 96},
    "4 x 128": {"n_layer": 4, "n_head": 8, "n_embd": 128},
}
AT_1000 = steps_of(1000, 10) | {"eval_iters": 73, "min_lr": 0.0}
SETTLED = {f"{name}, {size}": SIZES[size] | flags for size in SIZES for name, flags in TWO.items()}
FRESH = {  # at the rates that laser_settled and laser.py have found, with seeds that they have not
    "4 x 128": SIZES["4 x 128"] | {"learning_rate": 5e-3},
    "5 x 192": {"n_layer": 5, "n_head": 12, "n_embd": 192, "learning_rate": 2e-3},
}
ASPECT = {  # as many weights
    "3 x 96": {"n_layer": 3, "n_embd": 96, "n_head": 6},
    "1 x 164": CHOICES["1 x 164"],
    "6 x 68": CHOICES["6 x 68"],
    "12 x 48": CHOICES["12 x 48"],
}
LASER_VARIANTS = {
    f"{attention}{change}": flags | more
    for change, more in VARIANTS.items()
    for attention, flags in TWO.items()
}
SHORT_50 = {"heads": "SSSL", "window": 50}
NOVELS_1024 = {
    "softmax": {},
    "LASER": LASER,
    "LS": SHORT_50,
    "stick-breaking, no positions": STICK | NOWHERE | IMPORT,
    "the same in softmax's time": STICK | NOWHERE | IMPORT | steps_of(373),
    "differential V2": V2 | {"n_head": 16, "n_kv_head": 8} | IMPORT,
}


TABLES = {
    "laser": Table(  # the LASER paper's tables 2, 4, 5 and 7
        LASER_VARIANTS,
        flags=steps_of(1500),
        against={f"LASER{change}": f"softmax{change}" for change in VARIANTS},
    ),
    "laser_settled": Table(
        SETTLED,
        flags=AT_1000,
        against={
            "LASER, 3 x 96": "softmax, 3 x 96",
            "LASER, 4 x 128": "softmax, 4 x 128",
            "softmax, 4 x 128": "softmax, 4 x 128",
        },
        tune=(2.5e-3, 5e-3, 1e-2, 2e-2),
        seeds=8,
        keep=("val_loss",),
    ),
    "laser_fresh": Table(
        {f"{name}, {size}": FRESH[size] | flags for size in FRESH for name, flags in TWO.items()},
        flags=AT_1000,
        against={f"{name}, {size}": f"softmax, {size}" for size in FRESH for name in TWO},
        seeds=8,
        first_seed=9,
        keep=("val_loss",),
    ),
    "differential": Table(
        TWO, flags={"differential": True} | steps_of(1500), tune=(1.5e-3, 3e-3, 6e-3), seeds=5
    ),
    "long_short": Table(  # as long_short.py has them
        {"long": {"heads": "L"}, "LS": {"heads": "SSSSSL", "window": 50}},
        flags=steps_of(400, 8) | {"eval_iters": 20, "block_size": 2048, "batch_size": 1},
        tune=(3e-3, 6e-3, 1.2e-2, 2.4e-2),
        seeds=5,
        keep=("val_loss",),
    ),
    "aspect": Table(ASPECT, flags=steps_of(1000), tune=(3e-3, 6e-3, 1.2e-2)),
    "choices": Table(CHOICES, flags=steps_of(1000)),  # docs/choices.md
    "speedrun": Table(SPEEDRUN, "config/speedrun_shakespeare_char_cpu.py"),
    "speedrun_more": Table(SPEEDRUN_MORE, "config/speedrun_shakespeare_char_cpu.py"),
    "records": Table(RECORDS, "config/speedrun_shakespeare_char_cpu.py", seeds=10),
    "in_nanogpts_time": Table(IN_NANOGPTS_TIME, "config/speedrun_shakespeare_char_cpu.py"),
    "nanogpt": Table(NANOGPT, "config/train_shakespeare_char.py"),
    "warmup": Table(WARMUP, flags=steps_of(1000)),
    "narang": Table(NARANG, flags=steps_of(1000)),
    "maps": Table(MAPS, flags=BETA | {"position": "rope"} | steps_of(1000)),
    "qkv": Table(QKV, flags=steps_of(1000), against={row: row.split(",")[0] for row in QKV}),
    # the LASER paper's models
    "bert": Table(TWO, "lab/examples/bert.py", {"steps": 1000}, tune=(1e-3, 2e-3, 4e-3), seeds=8),
    "vit": Table(TWO | {"beta": BETA}, "lab/examples/vit.py"),
    "conformer": Table(TWO, "lab/examples/conformer.py"),
    "before_attention": Table(
        each("attention", "mean bahdanau lecture"),
        "lab/examples/before_attention.py",
        {"picture": ""},
    ),
    "64": linear(1500),  # attention in linear time, contexts of 64 and of 256
    "256": linear(
        1500,
        only=("softmax", "softmax, conv", "softmax, learned decay, conv", "LS, conv", *FAST),
        flags=AT_256,
    ),
    "ideas": Table(IDEAS, flags=ROPE, steps=1500),
    "ideas_conv": Table(IDEAS, flags=ROPE | CONV, steps=1500),
    "ideas_256": Table({row: IDEAS[row] for row in BEST}, flags=ROPE | AT_256, steps=1500),
    "novels": linear(  # n = 2048, after data/pg19/prepare.py
        400,
        only=("softmax", "softmax, conv", *FAST),
        window=50,
        file=NOVELS,
        flags=LONG,
        vocab_size=10000,
    ),
    "novels_1024": Table(
        NOVELS_1024,
        NOVELS,
        LONG | steps_of(400) | {"block_size": 1024, "batch_size": 2, "position": "rope"},
        vocab_size=10000,
    ),
    "hybrids": Table(  # softmax in one layer of four
        {
            "softmax": {},
            "LS": SHORT,
            "beta, hybrid": BETA | HYBRID,
            "beta_squared, hybrid": SQUARED | HYBRID,
            "gated delta rule, hybrid": {"attention": "gated_delta"}
            | HYBRID
            | {"import": "lab.ideas.gated_delta"},
            "softmax short, beta_squared long": MIXED | SQUARED,
        },
        flags=AT_256 | CONV | {"n_layer": 4, "position": "rope"} | steps_of(1000),
    ),
    "differential_3e-3": Table(  # the table differential tunes the rate of each
        {
            "softmax": {},
            "differential": {"differential": True},
            "differential, LASER": {"differential": True} | LASER,
        },
        flags={"learning_rate": 3e-3} | steps_of(1500),
        seeds=5,
    ),
    "equal_256": Table(  # each in softmax's time, at tuned rates
        in_time(800, 825, 405, 504),
        flags=ROPE | AT_256 | {"min_lr": 0.0},
        tune=(3e-3, 6e-3, 1.2e-2, 2.4e-2),
        seeds=8,
    ),
    "equal_novels": Table(
        in_time(400, 480, 420, 416, window=50),
        NOVELS,
        LONG | IMPORT | {"block_size": 1024, "position": "rope", "min_lr": 0.0},
        tune=(1.5e-3, 3e-3, 6e-3),
        seeds=5,
        vocab_size=10000,
    ),
}

for name, table in TABLES.items():
    table.name = name
