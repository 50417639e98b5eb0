"""A GPT as a model of Hugging Face's transformers, whatever its attention: what `lab/hub/export.py --custom` writes.

An exported folder has this file, model.py and the files that they import: transformers needs nothing else.
"""

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attention.cache import Cache
from attention.documents import Documents
from model import GPT, GPTConfig

# arguments of other models of transformers that this one cannot honour
REFUSED = ("inputs_embeds", "output_attentions", "output_hidden_states")


class NanoattnConfig(PretrainedConfig):
    """gpt: the fields of GPTConfig. The other entries repeat some of them under the names that tools look for."""

    model_type = "nanoattn"

    def __init__(self, gpt: dict | None = None, **kwargs):
        self.gpt = gpt or {}
        c = GPTConfig(**self.gpt)
        self.vocab_size, self.max_position_embeddings = c.vocab_size, c.block_size
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = c.n_embd, c.n_layer, c.n_head
        # transformers reads _tied_weights_keys, below, only where this is True
        kwargs["tie_word_embeddings"] = c.tied or (c.scheme is not None and c.scheme.shared)
        super().__init__(**kwargs)


class NanoattnCache:
    """What a batch of texts has read, for decoding: a Cache (attention/cache.py) or, with padding, the tokens alone.

    After block_size tokens the window slides, as in sample.py. Then, and with padding, each step is a whole pass.
    """

    is_compileable = is_croppable = False  # read by transformers

    def __init__(self, gpt: GPT, ids: Tensor, mask: Tensor | None):
        if mask is not None and not mask[:, -1].all():
            raise ValueError("decoding needs padding on the left: tokenizer.padding_side = 'left'")
        self.padded = mask is not None and any(padding(mask))
        self.ids, self.cache = ids[:, :0], None if self.padded else gpt.new_cache()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.ids.shape[1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was (for beam search)."""
        self.ids = self.ids[beam_idx]
        if self.cache is not None:
            select(self.cache, beam_idx)


def select(cache: Cache, rows: Tensor) -> None:
    """Keeps these rows of a cache, in this order; a row may be taken twice, as for beams."""
    for part in cache.parts.values():
        vars(part).update({name: x[rows] for name, x in vars(part).items() if isinstance(x, Tensor)})
    cache.last, cache.rows = {conv: x[rows] for conv, x in cache.last.items()}, len(rows)


def padding(mask: Tensor) -> list[int]:
    """The number of tokens before each text, from an attention mask (B, T), 1 for text. ValueError for other masks."""
    mask = mask.bool()
    start, n = mask.int().argmax(1), mask.sum(1)
    at = torch.arange(mask.shape[1], device=mask.device)
    text = (at >= start[:, None]) & (at < (start + n)[:, None])
    if mask.dim() != 2 or not (text == mask).all() or not n.all():
        raise ValueError("attention_mask must be (batch, tokens), with one run of ones in each row: padding, a text")
    return start.tolist()


class NanoattnForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT with transformers' interface. Errors: ValueError for masks and arguments that it cannot honour."""

    config_class = NanoattnConfig
    base_model_prefix = "gpt"
    _no_split_modules = ["Block"]
    _is_stateful = True  # the cache cannot be cropped: transformers refuses assisted decoding

    def __init__(self, config: NanoattnConfig):
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**config.gpt))
        first, tied = {}, {}  # weights that several modules share are saved once
        for name, p in self.state_dict(keep_vars=True).items():
            if first.setdefault(id(p), name) != name:
                tied[name] = first[id(p)]
        self._tied_weights_keys = tied
        self.post_init()

    @classmethod
    def of(cls, gpt: GPT) -> "NanoattnForCausalLM":
        """The same model as gpt, with a copy of its weights."""
        classes = {"AutoConfig": "NanoattnConfig", "AutoModelForCausalLM": "NanoattnForCausalLM"}
        where = {auto: f"modeling_nanoattn.{name}" for auto, name in classes.items()}  # read with trust_remote_code
        model = cls(NanoattnConfig(gpt=vars(gpt.config), auto_map=where))
        model.gpt.load_state_dict(gpt.state_dict())
        return model

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Computes a module's tables (of RoPE, ALiBi, ...), which are in no file: transformers leaves them empty."""
        for name in module._non_persistent_buffers_set:
            table = getattr(module, name)
            if table is not None and not table.is_meta:
                table.copy_(getattr(type(module)(self.gpt.config.resolved()), name))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes a NanoattnCache

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.transformer.wte

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.gpt.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: NanoattnCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V), or of the last logits_to_keep tokens; the loss with labels (B, T), -100 where none counts.

        attention_mask: (B, T) or, with past_key_values, (B, all tokens so far), 1 for text: padding may be on the left
        or, without a cache, on the right. use_cache: also return the cache, which has no gradient (not with labels).
        """
        for name in REFUSED:
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"this model does not take {name}")
        n = logits_to_keep or input_ids.shape[1]
        past_key_values = kwargs.pop("cache", past_key_values)  # its name since transformers 5.24
        if past_key_values is None and use_cache and labels is None:
            past_key_values = NanoattnCache(self.gpt, input_ids, attention_mask)
        if past_key_values is None:
            x = self.hidden(input_ids, attention_mask, n)
        elif isinstance(past_key_values, NanoattnCache):
            x = self.next(input_ids, attention_mask, n, past_key_values)
        else:
            raise ValueError(f"past_key_values must be what this model returned, not {type(past_key_values)}")
        # GPT.predict gives the logits of each text's last token: here each token is a text of its own
        logits = self.gpt.predict(x.flatten(0, 1)[:, None], None)[0].view(*x.shape[:2], -1)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def hidden(self, ids: Tensor, mask: Tensor | None, n: int) -> Tensor:
        """GPT.hidden at the last n of ids (B, T). For fewer than all, only the last block_size tokens are read.

        Padding on the left becomes a document of its own, which the text does not see.
        """
        T, block_size = ids.shape[1], self.gpt.config.block_size
        if n < T:
            ids, mask, T = ids[:, -block_size:], None if mask is None else mask[:, -block_size:], min(T, block_size)
        if T > block_size or n > T:
            raise ValueError(f"{max(n, T)} tokens do not fit: this model takes 1 to block_size={block_size}")
        start = torch.zeros(len(ids)) if mask is None else torch.tensor(padding(mask))
        if not start.any():
            return self.gpt.hidden(ids)[:, -n:]
        at, start = torch.arange(T, device=ids.device), start[:, None].to(ids.device)
        pos = torch.where(at < start, at, at - start)
        return self.gpt.hidden(ids, Documents(pos), pos)[:, -n:]

    @torch.no_grad()
    def next(self, ids: Tensor, mask: Tensor | None, n: int, past: NanoattnCache) -> Tensor:
        """GPT.hidden at the last n of the tokens ids (B, T) that follow on what `past` has read."""
        before, block_size = past.get_seq_length(), self.gpt.config.block_size
        past.ids = torch.cat((past.ids, ids), dim=1)
        slides = past.get_seq_length() > block_size
        if slides and before and n > 1:
            raise ValueError(f"{n} tokens do not fit after {before}: block_size is {block_size}")
        if past.padded and mask is None:
            raise ValueError("texts with padding need their attention_mask with every new token")
        if past.cache is not None and not slides:
            with past.cache.extended(*ids.shape):
                return self.gpt.hidden(ids, past.cache)[:, -n:]
        past.cache = None
        return self.hidden(past.ids, mask, n)
