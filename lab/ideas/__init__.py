"""Ideas of papers, and a few of ours, that a flag --import adds to the tables of the core.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas --attention=sink

Attentions, for --attention=
scores.py          functions of scores: --import=lab.ideas
recent.py          LUCID: --import=lab.ideas.recent
entmax.py          entmax15: --import=lab.ideas.entmax
differential.py    differential attention, a layer: --import=lab.ideas.differential
after.py           NAME_gate, NAME_xsa, NAME_differential_v2 and others, layers of any attention
                   NAME: --import=lab.ideas.after
gated_delta.py     Gated DeltaNet and Kimi Delta Attention, layers: --import=lab.ideas.gated_delta
sparse.py          moba, nsa, selective: --import=lab.ideas.sparse
mixing.py          mta, talking_heads, iha: --import=lab.ideas.mixing
fading.py          wall, log_linear: --import=lab.ideas.fading
stick_breaking.py  the fast code of stick-breaking, which scores.py imports

How queries, keys and values are made
qkv.py             --qkv=mla, gta, tpa, tied, value_residual or cla: --import=lab.ideas.qkv

Other choices
positions.py       --position=relative, t5 or sinusoidal, and --decay=learned:
                   --import=lab.ideas.positions
temperature.py     --qk_norm=per_dim: --import=lab.ideas.temperature
norms.py           --qk_norm=l2: --import=lab.ideas.norms
activations.py     --mlp=elu, reglu and others: --import=lab.ideas.activations
lamb.py            --optimizer=lamb or nadamw: --import=lab.ideas.lamb
packed.py          no token sees another document of its window: --import=lab.ideas.packed
documents.py       the windows of several documents that packed.py trains on

Python imports this file before any other of the folder, so each of these flags adds what scores.py
adds as well.
"""

from lab.ideas.scores import *  # noqa: F403
