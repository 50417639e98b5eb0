"""The ideas, taken out of the tables of the core.

An import of any file of lab/ideas adds them, and the core's tests, which may run in the same
process, do not know them. test_ideas.py puts them back.
"""

import lab.ideas.entmax
import lab.ideas.recent  # noqa: F401
from attention.forms import FORM
from choices import AFTER
from model import ATTENTION

FILES = ("lab.ideas.scores", "lab.ideas.entmax", "lab.ideas.recent")
NEW = {name: f for name, f in ATTENTION.items() if f.__module__ in FILES}
FORMS = {name: form for name, form in FORM.items() if name in NEW}
NEXT = {name: AFTER[name] for name in ("differential_v2", "xsa_learned")}
TABLES = [(ATTENTION, NEW), (FORM, FORMS), (AFTER, NEXT)]
for table, added in TABLES:
    for name in added:
        del table[name]
