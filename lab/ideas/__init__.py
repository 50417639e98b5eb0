"""Ideas of papers, and a few of ours, that a flag --import adds to the tables of the core.

    python train.py config/train_shakespeare_char_cpu.py --import=lab.ideas --attention=sink

scores.py          attentions that are functions of scores, and a pair of heads: --import=lab.ideas
recent.py          LUCID, and XSA with a learned strength: --import=lab.ideas.recent
entmax.py          the attention entmax15: --import=lab.ideas.entmax
gated_delta.py     Gated DeltaNet, a layer of its own: --import=lab.ideas.gated_delta
positions.py       Shaw's and T5's positions: --import=lab.ideas.positions
lamb.py            the optimizers LAMB and NAdamW: --import=lab.ideas.lamb
stick_breaking.py  the fast form of stick-breaking, which scores.py imports

Python imports this file before any other of the folder, so each of these flags adds what scores.py
adds as well.
"""

from lab.ideas.scores import *  # noqa: F403
