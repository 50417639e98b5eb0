"""Writes a checkpoint as a model of Hugging Face's transformers: config, weights (safetensors), tokenizer.

    python -m lab.hub.export --out_dir=out-shakespeare-char --to=exported
    python -m lab.hub.export --out_dir=out-laser --to=exported-laser --custom

Without --custom the model becomes a GPT-2, Llama, Mistral or Qwen 3. If it has a choice that none of them has, such as
another attention, the script names the choice and writes nothing. With --custom every model can be exported. The folder
then also has the code of the model, which transformers loads with trust_remote_code=True, without this repository.
"""

import os
import re
from typing import Literal

from errors import UserError, note, optional
from lab.experiments.results import start
from lab.hub.formats import export
from lab.hub.tokenizer_json import fast
from text.dataset import ROOT
from training import checkpoint
from training.pretrained import USER

# What is exported, and where does it go?
out_dir = "out"  # the folder of a run of train.py
to = "exported"  # the new folder
which: Literal["best", "latest"] = "best"  # best: best.pt, or ckpt.pt if there is no best.pt; latest: ckpt.pt
custom = False  # write the model's code too, so that every attention and every other choice can be exported

CODE = "lab.hub.modeling_nanoattn"  # the module that transformers is told to load


def code_files() -> dict[str, str]:
    """{name: code} of CODE and of every file of ours that it imports (`from x import y`): here they import .x, not x.

    A function that imports a file of ours (GPT.from_pretrained) needs this repository: there it raises an error.
    """

    def rewritten(line: re.Match) -> str:
        indent, module, names = line.groups()
        if not os.path.exists(path_of(module)):
            return line[0]
        if indent:
            return f'{indent}raise NotImplementedError("this needs the whole repository, not an exported model")'
        waiting.append(module)
        return f"from .{flat(module)} import{names}"

    files, waiting = {}, [CODE]
    while waiting:
        if flat(module := waiting.pop()) in files:
            continue
        with open(path_of(module), encoding="utf-8") as f:
            code = f.read()
        files[flat(module)] = re.sub(r"^( *)from (\S+) import(.*)", rewritten, code, flags=re.M)
    return files


def flat(module: str) -> str:
    return "modeling_nanoattn" if module == CODE else module.replace(".", "_")


def path_of(module: str) -> str:
    return os.path.join(ROOT, *module.split(".")) + ".py"


def main() -> None:
    if not to or (os.path.exists(to) and (not os.path.isdir(to) or os.listdir(to))):
        raise UserError(f"--to={to} must name a folder that is empty or not there yet")
    optional("transformers", USER)
    from lab.hub.modeling_nanoattn import NanoattnForCausalLM

    path = checkpoint.path_of(out_dir, which)
    state = checkpoint.load(path)
    model = checkpoint.model_of(state)
    try:
        theirs = NanoattnForCausalLM.of(model) if custom else export(model)
    except UserError as error:
        raise UserError(f"{error}. With --custom every model can be exported") from None
    try:
        tok = checkpoint.tokenizer_of(state)
        their_tok = fast(tok, model.config.block_size)
    except (UserError, OSError) as error:
        note(f"no tokenizer is exported: {error}")
    else:
        for c in (theirs.config, theirs.generation_config):
            c.bos_token_id = c.eos_token_id = c.pad_token_id = tok.eot
        their_tok.save_pretrained(to)
    theirs.save_pretrained(to)
    for name, text in code_files().items() if custom else ():
        with open(os.path.join(to, f"{name}.py"), "w", encoding="utf-8") as f:
            f.write(text)
    print(f"{path} is {to}: {type(theirs).__name__}, {theirs.num_parameters():,} parameters")


if __name__ == "__main__":
    start(globals())
