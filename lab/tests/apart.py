"""What lab/ideas adds, taken out of the tables of the core.

An import of any file of lab/ideas adds it, and other tests, which may run in the same process, do
not know it. The fixture `ideas` of conftest.py puts it back for a test.
"""

import torch
from harness import assert_equal
from torch import Tensor

import lab.ideas.after
import lab.ideas.differential
import lab.ideas.entmax
import lab.ideas.fading
import lab.ideas.gated_delta
import lab.ideas.mixing
import lab.ideas.qkv
import lab.ideas.recent
import lab.ideas.sparse  # noqa: F401
from attention.forms import FORM
from lab.ideas.documents import Documents
from model import ATTENTION, GPT
from parts import POSITION, QKV

ADDED = {name: f for name, f in ATTENTION.items() if f.__module__.startswith("lab.ideas.")}
FILES = [f"lab.ideas.{name}" for name in "scores entmax recent after differential".split()]
# functions of scores, for long and short heads
NEW = {
    name: f for name, f in ADDED.items() if f.__module__ in FILES and not isinstance(f, type)
} | {"mta": ATTENTION["mta"]}
FORMS = {name: form for name, form in FORM.items() if name in NEW}
MADE = {name: f for name, f in QKV.items() if name != "linear"}
TABLES = [
    (ATTENTION, ADDED),
    (FORM, FORMS),
    (QKV, MADE),
    (POSITION, {"half_rope": POSITION["half_rope"]}),
]
for table, added in TABLES:
    for name in added:
        del table[name]


def assert_packed_documents_are_alone(gpt: GPT, x: Tensor, n: int, tolerance: float) -> None:
    """A window of documents of n tokens, of which the last is cut, has their logits."""
    pos = torch.arange(x.shape[1]).expand(2, -1) % n
    packed = gpt.predict(gpt.hidden(x, Documents(pos)), x)[0]
    alone = [gpt(part, part)[0] for part in x.split(n, dim=1)]
    assert_equal(packed, torch.cat(alone, dim=1), tolerance)
