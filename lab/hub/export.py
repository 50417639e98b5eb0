"""Write a checkpoint as a model of Hugging Face's transformers: config, weights, tokenizer.

    python -m lab.hub.export --out_dir=out-shakespeare-char --to=exported
    python -m lab.hub.export --out_dir=out-laser --to=exported-laser --custom

Without --custom the model becomes a GPT-2. If GPT-2 lacks one of its choices, such as another
attention, the script names the choice and writes nothing. With --custom every model can be
exported. The folder then also has the code of the model. transformers loads it with
trust_remote_code=True, without this repository.
"""

import itertools
import re
from pathlib import Path
from typing import Literal

from configurator import ROOT, run_script

from errors import UserError, note, optional
from lab.hub.gpt2 import USER, exported
from training import checkpoint, origin

# What is exported, and where does it go?
out_dir = "out"  # the folder of a run of train.py
to = "exported"  # the new folder
which: Literal["best", "latest"] = "best"  # best.pt (if there is none, ckpt.pt), or ckpt.pt
custom = False  # also write the model's code: then every attention and choice can be exported

PACKAGE = "lab.hub."
CODE = PACKAGE + "modeling_nanoattn"  # the module that transformers loads
IMPORT = re.compile(r"^( *)from (\S+) import (.*)", re.MULTILINE)


def code_files() -> dict[str, str]:
    """{file name: code} for one flat folder.

    These are CODE, the modules of --import, and every file of ours that they import.
    """
    files = {}
    added = []
    for module in origin.imported():
        packages = itertools.accumulate(module.split("."), "{}.{}".format)
        added += [x for x in packages if path_of(x).exists() and x not in added]
    modules = [CODE, *added]
    for module in modules:  # the list grows in this loop
        code = path_of(module).read_text("utf-8")
        files[f"{flat(module)}.py"] = IMPORT.sub(rewritten, code)
        for indent, imported, _ in IMPORT.findall(code):
            if not indent and imported not in modules and path_of(imported).exists():
                modules.append(imported)
    for module in added:  # it is imported for what it adds to tables
        files[f"{flat(CODE)}.py"] += f"from .{flat(module)} import __name__ as _\n"
    return files


def rewritten(line: re.Match) -> str:
    """An import as it stands in the exported folder: `from .x import y` for a file of ours.

    A module of a package, `from attention import scores`, has a longer name there. Inside a
    function (GPT.from_pretrained) an import becomes an error.
    """
    indent, module, names = line.groups()
    if not path_of(module).exists():
        return line[0]
    if indent:
        return f'{indent}raise NotImplementedError("this needs the repository of the model")'
    if path_of(f"{module}.{names}").exists():
        return f"from . import {flat(module)}_{names} as {names}"
    return f"from .{flat(module)} import {names}"


def flat(module: str) -> str:
    return module.removeprefix(PACKAGE).replace(".", "_")


def path_of(module: str) -> Path:
    path = Path(ROOT, *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def main() -> None:
    folder = Path(to)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--to={to} must name a folder that is empty or does not exist yet")
    optional("transformers", USER)

    # the model
    from lab.hub.modeling_nanoattn import NanoattnForCausalLM
    from lab.hub.tokenizer_json import fast

    path = checkpoint.path_of(out_dir, which)
    state = checkpoint.load(path)
    model = checkpoint.model_of(state)
    try:
        theirs = NanoattnForCausalLM.of(model) if custom else exported(model)
    except UserError as error:
        raise UserError(f"{error}. With --custom every model can be exported") from None

    # its tokenizer
    try:
        tok = checkpoint.tokenizer_of(state)
        padding = [*range(tok.n_vocab, model.config.vocab_size)]  # ids that stand for no text
        theirs.generation_config.suppress_tokens = padding or None
        exported_tok = fast(tok, model.config.block_size)
    except (UserError, OSError) as error:
        note(f"no tokenizer is exported: {error}")
    else:
        for c in (theirs.config, theirs.generation_config):
            c.bos_token_id = c.eos_token_id = c.pad_token_id = tok.eot
        exported_tok.save_pretrained(to)

    theirs.save_pretrained(to)
    if custom:
        for name, code in code_files().items():
            (folder / name).write_text(code, "utf-8")
    print(f"{path} is {to}: {type(theirs).__name__}, {theirs.num_parameters():,} parameters")


if __name__ == "__main__":
    run_script(globals())
