"""A GPT as a model of Hugging Face's transformers, whatever its attention: what `lab/hub/export.py --custom` writes.

An exported folder has this file, model.py and the files that they import. transformers loads it without this
repository:

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

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
    """What a batch of texts has read, for decoding. The texts may have different lengths, with padding on the left.

    Rows whose texts begin at the same place share a Cache (attention/cache.py); a forward pass runs once for each of
    these groups. After block_size tokens of text the window slides, and each step is a whole forward pass, as in
    sample.py.
    """

    is_compileable = is_croppable = False  # read by transformers

    def __init__(self, gpt: GPT, mask: Tensor | None, ids: Tensor):
        self.gpt, self.ids = gpt, ids[:, :0]
        self.starts = [0] * len(ids) if mask is None else padding(mask)  # of each row's text
        if mask is not None and not mask[:, -1].all():
            raise ValueError("decoding needs padding on the left: tokenizer.padding_side = 'left'")
        self.caches = {start: gpt.new_cache() for start in set(self.starts)}

    def rows(self, start: int) -> list[int]:
        return [row for row, s in enumerate(self.starts) if s == start]

    def hidden(self, ids: Tensor, n: int) -> Tensor:
        """(B, n, C): the output head's input at the last n of the next tokens, ids (B, T); zeros at padding."""
        block_size = self.gpt.config.block_size
        if n > block_size:
            raise ValueError(f"{n} tokens do not fit: this model takes 1 to block_size={block_size} at once")
        past = self.get_seq_length()
        self.ids = torch.cat((self.ids, ids), dim=1)
        y = ids.new_zeros(len(ids), n, self.gpt.config.n_embd, dtype=self.gpt.lm_head.weight.dtype)
        for start, cache in self.caches.items():
            rows = self.rows(start)
            text = self.ids[rows, start:]
            if cache is not None and text.shape[1] <= block_size:
                new = text[:, max(0, past - start) :]
                with cache.extended(*new.shape):
                    x = self.gpt.hidden(new, cache)
            else:
                if cache is not None and 1 < n and past > start:
                    raise ValueError(f"{n} tokens do not fit after {past - start}: block_size is {block_size}")
                self.caches[start] = None
                with torch.no_grad():
                    x = self.gpt.hidden(text[:, -block_size:])
            x = x[:, -n:]
            y[rows, n - x.shape[1] :] = x.to(y)
        return y

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.ids.shape[1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was (for beam search)."""
        order = beam_idx.tolist()
        old = {start: self.rows(start) for start in self.caches}
        self.starts, self.ids = [self.starts[i] for i in order], self.ids[beam_idx]
        self.caches = {start: cache for start, cache in self.caches.items() if start in self.starts}
        for start, cache in self.caches.items():
            if cache is not None:
                cache.select(torch.tensor([old[start].index(order[row]) for row in self.rows(start)]))


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
        model = cls(NanoattnConfig(gpt=vars(gpt.config)))
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
        if input_ids is None:
            raise ValueError("this model needs input_ids")
        n, block_size = logits_to_keep or input_ids.shape[1], self.gpt.config.block_size
        if n < input_ids.shape[1] and past_key_values is None and not use_cache:  # generate without a cache
            input_ids = input_ids[:, -max(n, block_size) :]
            attention_mask = None if attention_mask is None else attention_mask[:, -max(n, block_size) :]
        if past_key_values is None and use_cache and labels is None:
            past_key_values = NanoattnCache(self.gpt, attention_mask, input_ids)
        if past_key_values is not None:
            if not isinstance(past_key_values, NanoattnCache):
                raise ValueError(f"past_key_values must be what this model returned, not {type(past_key_values)}")
            x = past_key_values.hidden(input_ids, n)
        else:
            x = self.hidden(input_ids, attention_mask)[:, -n:]
        # GPT.predict gives the logits of each text's last token: here each token is a text of its own
        logits = self.gpt.predict(x.flatten(0, 1)[:, None], None)[0].view(*x.shape[:2], -1)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def hidden(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """GPT.hidden of ids (B, T). Padding on the left becomes a document of its own, which the text does not see."""
        T = ids.shape[1]
        if T > self.gpt.config.block_size:
            raise ValueError(f"{T} tokens do not fit: this model takes 1 to block_size={self.gpt.config.block_size}")
        start = torch.zeros(len(ids)) if mask is None else torch.tensor(padding(mask))
        if not start.any():
            return self.gpt.hidden(ids)
        at, start = torch.arange(T, device=ids.device), start[:, None].to(ids.device)
        pos = torch.where(at < start, at, at - start)
        return self.gpt.hidden(ids, Documents(pos), pos)
