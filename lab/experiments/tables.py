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
    file: str = CPU  # the config file of every run
    flags: dict = field(default_factory=dict)  # flags of every run
    # {row: the row that it is compared with}; rows that are not here: the first one
    against: dict = field(default_factory=dict)
    steps: int | None = None  # of a run; a number: rows are compared in equal time as well
    tune: tuple[float, ...] = ()  # learning rates to try for each row, with other seeds
    seeds: int = 3  # runs of each row
    first_seed: int = 1
    keep: tuple[str, ...] = ()  # curves to store, see runs.result_of
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


def steps_of(n: int, evaluations: int = 1) -> dict:
    """The flags of a run of n steps."""
    return {"max_iters": n, "lr_decay_iters": n, "eval_interval": n // evaluations}


# the paper tunes the temperature, and does not name what it found
LASER_VARIANTS = rows_of("""
softmax:
LASER: --attention=laser
softmax + temperature: --temperature=0.7
LASER + temperature: --attention=laser --temperature=0.7
softmax + temperature per dimension: --import=lab.ideas.temperature --qk_norm=per_dim
LASER + temperature per dimension: --attention=laser --import=lab.ideas.temperature \
--qk_norm=per_dim
softmax + QK-norm: --qk_norm=layernorm
LASER + QK-norm: --attention=laser --qk_norm=layernorm
""")
# docs/choices.md has each row's paper, and where the choice is made
CHOICES = rows_of("""
GPT-2:
# positions
none: --position=none
sinusoidal: --import=lab.ideas.positions --position=sinusoidal
relative: --import=lab.ideas.positions --position=relative
t5: --import=lab.ideas.positions --position=t5
alibi: --position=alibi
rope: --position=rope
rope S/S/L: --heads=S/S/L --window=16 --position=rope
rope S/S/L nope_long: --heads=S/S/L --window=16 --position=rope --nope_long
decay alibi: --decay=alibi
decay learned: --import=lab.ideas.positions --decay=learned
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
swish: --import=lab.ideas.activations --mlp=swish
elu: --import=lab.ideas.activations --mlp=elu
selu: --import=lab.ideas.activations --mlp=selu
sigmoid: --import=lab.ideas.activations --mlp=sigmoid
softplus: --import=lab.ideas.activations --mlp=softplus
glu: --import=lab.ideas.activations --mlp=glu
reglu: --import=lab.ideas.activations --mlp=reglu
geglu: --mlp=geglu
swiglu: --mlp=swiglu
liglu: --import=lab.ideas.activations --mlp=liglu
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
qk_norm l2: --import=lab.ideas.norms --qk_norm=l2
softcap: --attention=softcap
logit_softcap 15: --logit_softcap=15
z_loss: --z_loss=0.0001
zero_init: --zero_init
untied: --tied=False
# training
muon: --optimizer=muon
lamb: --import=lab.ideas.lamb --optimizer=lamb --learning_rate=0.01
nadamw: --import=lab.ideas.lamb --optimizer=nadamw
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
WARMUP = rows_of("""
pre 0.006 warm-up 100: --where=pre --learning_rate=0.006 --warmup_iters=100
pre 0.006 warm-up 0: --where=pre --learning_rate=0.006 --warmup_iters=0
pre 0.006 warm-up 500: --where=pre --learning_rate=0.006 --warmup_iters=500
post 0.006 warm-up 100: --where=post --learning_rate=0.006 --warmup_iters=100
post 0.006 warm-up 0: --where=post --learning_rate=0.006 --warmup_iters=0
post 0.006 warm-up 500: --where=post --learning_rate=0.006 --warmup_iters=500
pre 0.001 warm-up 100: --where=pre --learning_rate=0.001 --warmup_iters=100
pre 0.001 warm-up 0: --where=pre --learning_rate=0.001 --warmup_iters=0
pre 0.001 warm-up 500: --where=pre --learning_rate=0.001 --warmup_iters=500
post 0.001 warm-up 100: --where=post --learning_rate=0.001 --warmup_iters=100
post 0.001 warm-up 0: --where=post --learning_rate=0.001 --warmup_iters=0
post 0.001 warm-up 500: --where=post --learning_rate=0.001 --warmup_iters=500
""")
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
""")
MAPS = rows_of("""
beta:
beta_unit: --variant=beta_unit
beta_root: --variant=beta_root
beta_l1: --variant=beta_l1
beta_max: --variant=beta_max
""")

LINEAR = rows_of("""
softmax:
softmax, conv: --conv=4
softmax, learned decay, conv: --import=lab.ideas.positions --decay=learned --conv=4
LS: --heads=SSSL --window=16
LS, conv: --heads=SSSL --window=16 --conv=4
beta: --attention=beta
beta, decay: --attention=beta --decay=alibi
beta, learned decay: --attention=beta --import=lab.ideas.positions --decay=learned
beta, conv: --attention=beta --conv=4
beta, learned decay, conv: --attention=beta --import=lab.ideas.positions --decay=learned --conv=4
beta_squared, conv: --attention=beta_squared --conv=4
beta_squared, learned decay, conv: --attention=beta_squared --import=lab.ideas.positions \
--decay=learned --conv=4
softmax short, beta long, conv: --short_attention=softmax --heads=SSSL --window=16 \
--attention=beta --conv=4
softmax short, beta_squared long: --short_attention=softmax --heads=SSSL --window=16 \
--attention=beta_squared
softmax short, beta_squared long, conv: --short_attention=softmax --heads=SSSL --window=16 \
--attention=beta_squared --conv=4
""")
LINEAR_256 = (
    "softmax",
    "softmax, conv",
    "softmax, learned decay, conv",
    "LS, conv",
    "beta, learned decay, conv",
    "softmax short, beta long, conv",
    "softmax short, beta_squared long, conv",
)
LINEAR_NOVELS = rows_of("""
softmax:
softmax, conv: --conv=4
beta, learned decay, conv: --attention=beta --import=lab.ideas.positions --decay=learned --conv=4
softmax short, beta long, conv: --short_attention=softmax --heads=SSSL --window=50 \
--attention=beta --conv=4
softmax short, beta_squared long, conv: --short_attention=softmax --heads=SSSL --window=50 \
--attention=beta_squared --conv=4
""")
AT_256 = {"block_size": 256, "batch_size": 3, "eval_iters": 145}
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
}

# With RoPE, unless a row says something else; lab/ideas/scores.py and after.py have the papers.
# Differential V2 has twice the heads.
IDEAS = rows_of("""
softmax:
LS: --heads=SSSL --window=16
stick-breaking: --attention=stick_breaking
stick-breaking, no positions: --attention=stick_breaking --position=none
stick-breaking, LASER's log: --attention=stick_laser
differential V2: --import=lab.ideas.after --attention=differential_v2 \
--n_head=12 --head_dim=16 --n_kv_head=6
stick-breaking, differential V2: --import=lab.ideas.after \
--attention=stick_breaking_differential_v2 --n_head=12 --head_dim=16 --n_kv_head=6
stick-breaking, differential V2, no positions: --import=lab.ideas.after \
--attention=stick_breaking_differential_v2 --n_head=12 --head_dim=16 --n_kv_head=6 --position=none
stick-breaking, LASER's log, differential V2: --import=lab.ideas.after \
--attention=stick_laser_differential_v2 --n_head=12 --head_dim=16 --n_kv_head=6
delta rule: --attention=delta_rule
gate: --import=lab.ideas.after --attention=gate
gate per head: --import=lab.ideas.after --attention=gate_head
XSA: --import=lab.ideas.after --attention=xsa
XSA, learned strength: --import=lab.ideas.after --attention=xsa_learned
LUCID: --import=lab.ideas.recent --attention=lucid
stick-breaking, gate: --import=lab.ideas.after --attention=stick_breaking_gate
sink: --attention=sink
SSMax: --attention=ssmax
softpick: --attention=softpick
top 8: --attention=top_k
LASER: --attention=laser
LASER, learned temperature: --attention=laser_temperature
beta: --attention=beta
beta, learned number: --attention=beta_learned
beta, gate: --import=lab.ideas.after --attention=beta_gate
beta_squared: --attention=beta_squared
beta_squared, learned number: --attention=beta_squared_learned
beta_squared, gate: --import=lab.ideas.after --attention=beta_squared_gate
softmax short, beta_squared long: --short_attention=softmax --heads=SSSL --window=16 \
--attention=beta_squared
softmax short, beta_squared long, gate: --short_attention=softmax --heads=SSSL --window=16 \
--attention=beta_squared --variant=after_gate
softmax short, beta_squared long, differential V2: --short_attention=softmax --heads=SSSL \
--window=16 --attention=beta_squared --variant=after_differential_v2 \
--n_head=12 --head_dim=16 --n_kv_head=6
""")
BEST = (
    "softmax",
    "stick-breaking",
    "stick-breaking, no positions",
    "differential V2",
    "stick-breaking, differential V2",
)
IMPORT = {"import": "lab.ideas"}
ROPE = IMPORT | {"position": "rope"}


# as many steps as fit into softmax's time; with a shorter rise of the rate some seeds fail
EQUAL_256 = rows_of("""
softmax: --max_iters=800 --lr_decay_iters=800 --eval_interval=800 --warmup_iters=160
LS: --heads=SSSL --window=16 \
--max_iters=825 --lr_decay_iters=825 --eval_interval=825 --warmup_iters=165
stick-breaking: --attention=stick_breaking --position=none \
--max_iters=405 --lr_decay_iters=405 --eval_interval=405 --warmup_iters=81
both: --attention=stick_breaking --position=none --heads=SSSL --window=16 \
--max_iters=504 --lr_decay_iters=504 --eval_interval=504 --warmup_iters=100
""")
EQUAL_NOVELS = rows_of("""
softmax: --max_iters=400 --lr_decay_iters=400 --eval_interval=400 --warmup_iters=80
LS: --heads=SSSL --window=50 \
--max_iters=480 --lr_decay_iters=480 --eval_interval=480 --warmup_iters=96
stick-breaking: --attention=stick_breaking --position=none \
--max_iters=420 --lr_decay_iters=420 --eval_interval=420 --warmup_iters=84
both: --attention=stick_breaking --position=none --heads=SSSL --window=50 \
--max_iters=416 --lr_decay_iters=416 --eval_interval=416 --warmup_iters=83
""")
# LASER against softmax at two sizes: what is tuned is the learning rate of each row
SETTLED = rows_of("""
softmax, 3 x 96: --n_layer=3 --n_head=6 --n_embd=96
LASER, 3 x 96: --n_layer=3 --n_head=6 --n_embd=96 --attention=laser
softmax, 4 x 128: --n_layer=4 --n_head=8 --n_embd=128
LASER, 4 x 128: --n_layer=4 --n_head=8 --n_embd=128 --attention=laser
""")
AT_1000 = steps_of(1000, 10) | {"eval_iters": 73, "min_lr": 0.0}
# at the rates that laser_settled and laser.py have found, with seeds that they have not
FRESH = rows_of("""
softmax, 4 x 128: --n_layer=4 --n_head=8 --n_embd=128 --learning_rate=0.005
LASER, 4 x 128: --n_layer=4 --n_head=8 --n_embd=128 --learning_rate=0.005 --attention=laser
softmax, 5 x 192: --n_layer=5 --n_head=12 --n_embd=192 --learning_rate=0.002
LASER, 5 x 192: --n_layer=5 --n_head=12 --n_embd=192 --learning_rate=0.002 --attention=laser
""")
# as many weights
ASPECT = rows_of("""
3 x 96: --n_layer=3 --n_embd=96 --n_head=6
1 x 164: --n_layer=1 --n_embd=164 --n_head=4
6 x 68: --n_layer=6 --n_embd=68 --n_head=4
12 x 48: --n_layer=12 --n_embd=48 --n_head=4
""")
NOVELS_1024 = rows_of("""
softmax:
LASER: --attention=laser
LS: --heads=SSSL --window=50
stick-breaking, no positions: --import=lab.ideas --attention=stick_breaking --position=none
the same in softmax's time: --import=lab.ideas --attention=stick_breaking --position=none \
--max_iters=373 --lr_decay_iters=373 --eval_interval=373
differential V2: --import=lab.ideas.after --attention=differential_v2 \
--n_head=16 --head_dim=16 --n_kv_head=8
""")
HYBRIDS = rows_of("""
softmax:
LS: --heads=SSSL --window=16
beta, hybrid: --attention=beta --heads=L/L/L/S --short_attention=softmax --window=255
beta_squared, hybrid: --attention=beta_squared --heads=L/L/L/S --short_attention=softmax \
--window=255
gated delta rule, hybrid: --import=lab.ideas.gated_delta --attention=gated_delta \
--heads=L/L/L/S --short_attention=softmax --window=255
softmax short, beta_squared long: --short_attention=softmax --heads=SSSL --window=16 \
--attention=beta_squared
""")


TABLES = {
    "laser": Table(  # the LASER paper's tables 2, 4, 5 and 7
        LASER_VARIANTS,
        flags=steps_of(1500),
        against={row: row.replace("LASER", "softmax") for row in LASER_VARIANTS if "LASER" in row},
    ),
    "laser_settled": Table(
        SETTLED,
        flags=AT_1000,
        against={row: row.replace("LASER", "softmax") for row in SETTLED},
        tune=(2.5e-3, 5e-3, 1e-2, 2e-2),
        seeds=8,
        keep=("val_loss",),
    ),
    "laser_fresh": Table(
        FRESH,
        flags=AT_1000,
        against={row: row.replace("LASER", "softmax") for row in FRESH},
        seeds=8,
        first_seed=9,
        keep=("val_loss",),
    ),
    "differential": Table(
        rows_of("softmax: --attention=differential; LASER: --attention=differential_laser"),
        flags={"import": "lab.ideas.differential"} | steps_of(1500),
        tune=(1.5e-3, 3e-3, 6e-3),
        seeds=5,
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
    "maps": Table(MAPS, flags={"attention": "beta", "position": "rope"} | steps_of(1000)),
    # attention in linear time, contexts of 64 and of 256
    "64": Table(LINEAR, flags={"position": "rope"}, steps=1500),
    "256": Table(
        {row: LINEAR[row] for row in LINEAR_256},
        flags=AT_256 | {"position": "rope"},
        steps=1500,
    ),
    "ideas": Table(IDEAS, flags=ROPE, steps=1500),
    "ideas_conv": Table(IDEAS, flags=ROPE | {"conv": 4}, steps=1500),
    "ideas_256": Table({row: IDEAS[row] for row in BEST}, flags=ROPE | AT_256, steps=1500),
    # n = 2048, after data/pg19/prepare.py
    "novels": Table(LINEAR_NOVELS, NOVELS, LONG | {"position": "rope"}, steps=400),
    "novels_1024": Table(
        NOVELS_1024,
        NOVELS,
        LONG | steps_of(400) | {"block_size": 1024, "batch_size": 2, "position": "rope"},
    ),
    "hybrids": Table(  # softmax in one layer of four
        HYBRIDS,
        flags=AT_256 | {"conv": 4, "n_layer": 4, "position": "rope"} | steps_of(1000),
    ),
    "differential_3e-3": Table(  # the table differential tunes the rate of each
        rows_of("""
softmax:
differential: --attention=differential
differential, LASER: --attention=differential_laser
"""),
        flags={"import": "lab.ideas.differential", "learning_rate": 3e-3} | steps_of(1500),
        seeds=5,
    ),
    "equal_256": Table(  # each in softmax's time, at tuned rates
        EQUAL_256,
        flags=ROPE | AT_256 | {"min_lr": 0.0},
        tune=(3e-3, 6e-3, 1.2e-2, 2.4e-2),
        seeds=8,
    ),
    "equal_novels": Table(
        EQUAL_NOVELS,
        NOVELS,
        LONG | IMPORT | {"block_size": 1024, "position": "rope", "min_lr": 0.0},
        tune=(1.5e-3, 3e-3, 6e-3),
        seeds=5,
    ),
}

for name, table in TABLES.items():
    table.name = name
