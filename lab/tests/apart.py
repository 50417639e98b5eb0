"""The attentions of lab/ideas, taken out of the tables of the core.

An import of any file of lab/ideas adds them, and other tests, which may run in the same process, do
not know them. The fixture `ideas` of conftest.py puts them back for a test.
"""

import lab.ideas.after
import lab.ideas.differential
import lab.ideas.entmax
import lab.ideas.recent  # noqa: F401
from attention.forms import FORM
from model import ATTENTION

FILES = [f"lab.ideas.{name}" for name in "scores entmax recent after differential".split()]
ADDED = {name: f for name, f in ATTENTION.items() if f.__module__ in FILES}
NEW = {name: f for name, f in ADDED.items() if not isinstance(f, type)}  # functions of scores
FORMS = {name: form for name, form in FORM.items() if name in NEW}
TABLES = [(ATTENTION, ADDED), (FORM, FORMS)]
for table, added in TABLES:
    for name in added:
        del table[name]
