"""A GPT of any attention as a model of transformers, for `lab.hub.export --custom`.

An exported folder has this file, model.py and the files that they import. transformers needs no
other files.
"""

import torch
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from attention.cache import Context
from lab.ideas.documents import Documents
from model import GPT, GPTConfig

# arguments of other models of transformers that this one does not have
REFUSED = ("inputs_embeds", "output_attentions", "output_hidden_states")


class NanoattnConfig(PretrainedConfig):
    """gpt: the fields of GPTConfig. Some of them stand here again, by transformers' names."""

    model_type = "nanoattn"

    def __init__(self, gpt: dict | None = None, **kwargs):
        self.gpt = gpt or {}
        c = GPTConfig(**self.gpt)

        # by transformers' names
        self.vocab_size = c.vocab_size
        self.max_position_embeddings = c.block_size
        self.hidden_size = c.n_embd
        self.num_hidden_layers = c.n_layer
        self.num_attention_heads = c.n_head

        # else transformers does not read _tied_weights_keys, below, which says what is tied
        kwargs["tie_word_embeddings"] = True
        super().__init__(**kwargs)


class NanoattnCache:
    """What a batch of texts has read: a Cache (attention/cache.py) and the tokens.

    After block_size tokens the window slides, as in sample.py. From then on, and with padding, the
    Cache is None, and each step reads the whole window again.
    """

    is_compileable = is_croppable = False  # read by transformers

    def __init__(self, gpt: GPT, ids: Tensor, mask: Tensor | None):
        if mask is not None and not mask[:, -1].all():
            raise ValueError("decoding needs padding on the left: tokenizer.padding_side = 'left'")
        self.padded = padding(mask) is not None
        self.ids = ids[:, :0]
        self.cache = None if self.padded else gpt.new_cache()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.ids.shape[1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """For beam search: row i becomes what row beam_idx[i] was."""
        self.ids = self.ids[beam_idx]
        if self.cache is not None:
            for part in (self.cache.state, *self.cache.parts.values()):
                part |= {name: x[beam_idx] for name, x in part.items()}


def padding(mask: Tensor | None) -> Tensor | None:
    """The number of tokens before each text, (B, 1); None if all texts begin at the first token.

    mask: (B, T), 1 for text. Raises ValueError for a mask with gaps.
    """
    if mask is None:
        return None
    mask = mask.bool()
    start = mask.int().argmax(1, keepdim=True)
    end = start + mask.sum(1, keepdim=True)
    position = torch.arange(mask.shape[1], device=mask.device)
    text = (position >= start) & (position < end)  # (B, T)

    if mask.dim() != 2 or not (text == mask).all() or not mask.any(1).all():
        raise ValueError(
            "attention_mask must be (batch, tokens), with one run of ones in each row: "
            "padding, a text"
        )
    return start if start.any() else None


class NanoattnForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT with transformers' interface. Raises ValueError for arguments that it does not have."""

    config_class = NanoattnConfig
    base_model_prefix = "gpt"
    _no_split_modules = ["Block"]
    _is_stateful = True  # the cache cannot be cropped: transformers refuses assisted decoding

    def __init__(self, config: NanoattnConfig):
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**config.gpt))

        # a weight that several modules share is saved once
        first = {}
        self._tied_weights_keys = {}
        for name, p in self.state_dict(keep_vars=True).items():
            if p in first:
                self._tied_weights_keys[name] = first[p]
            else:
                first[p] = name
        self.post_init()

    @classmethod
    def of(cls, gpt: GPT) -> "NanoattnForCausalLM":
        """The same model as gpt, with a copy of its weights."""
        classes = {  # read with trust_remote_code
            "AutoConfig": "modeling_nanoattn.NanoattnConfig",
            "AutoModelForCausalLM": "modeling_nanoattn.NanoattnForCausalLM",
        }
        model = cls(NanoattnConfig(gpt=vars(gpt.config), auto_map=classes))
        model.gpt.load_state_dict(gpt.state_dict())
        return model

    def _init_weights(self, module):
        """Compute a module's tables (RoPE, ALiBi, ...). No file has them: here they are empty."""
        for name in module._non_persistent_buffers_set:
            table = getattr(module, name)
            if table is not None and not table.is_meta:
                table.copy_(getattr(type(module)(self.gpt.config.resolved()), name))

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # forward makes a NanoattnCache

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.gpt.transformer.wte

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.gpt.lm_head

    def set_input_embeddings(self, new: torch.nn.Module) -> None:
        self.gpt.transformer.wte = new

    def set_output_embeddings(self, new: torch.nn.Module) -> None:
        self.gpt.lm_head = new

    def resize_token_embeddings(self, *args, **kwargs) -> torch.nn.Module:
        """As transformers': for another number of tokens; returns the input's embedding."""
        new = super().resize_token_embeddings(*args, **kwargs)
        self.config.gpt["vocab_size"] = self.gpt.config.vocab_size = new.num_embeddings
        return new

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
        """Logits (B, T, V), or of the last logits_to_keep tokens; with labels (B, T) the loss.

        labels: -100 where there is no target. attention_mask: (B, T) or, with past_key_values,
        (B, all tokens so far), 1 for text. Padding may be on the left or, without a cache, on the
        right. use_cache: also return the cache, which has no gradient. With labels there is none.
        """
        for name in REFUSED:
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"this model does not take {name}")

        # what was read before; its name is cache since transformers 5.24
        past_key_values = kwargs.pop("cache", past_key_values)
        if past_key_values is None and use_cache and labels is None:
            past_key_values = NanoattnCache(self.gpt, input_ids, attention_mask)

        n = logits_to_keep or input_ids.shape[1]
        if past_key_values is None:
            x = self.hidden(input_ids, attention_mask, n)
        elif isinstance(past_key_values, NanoattnCache):
            x = self.next(input_ids, attention_mask, n, past_key_values)
        else:
            raise ValueError(
                f"past_key_values must be what this model returned, not {type(past_key_values)}"
            )

        logits = self.gpt.logits(x)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)

    def hidden(self, ids: Tensor, mask: Tensor | None, n: int) -> Tensor:
        """GPT.hidden at the last n of ids (B, T). If n < T, only the last block_size are read.

        Padding on the left becomes a document of its own, which the text does not see.
        """
        block_size = self.gpt.config.block_size
        if n < ids.shape[1]:
            ids = ids[:, -block_size:]
            mask = None if mask is None else mask[:, -block_size:]
        T = ids.shape[1]
        if T > block_size or n > T:
            raise ValueError(
                f"{max(n, T)} tokens do not fit: this model takes 1 to block_size={block_size}"
            )

        start = padding(mask)
        if start is None:
            return self.gpt.hidden(ids, Context())[:, -n:]
        position = torch.arange(T, device=ids.device)
        position = torch.where(position < start, position, position - start)  # (B, T)
        return self.gpt.hidden(ids, Documents(position))[:, -n:]

    @torch.no_grad()
    def next(self, ids: Tensor, mask: Tensor | None, n: int, past: NanoattnCache) -> Tensor:
        """GPT.hidden at the last n of the tokens ids (B, T), which follow those in `past`."""
        before = past.get_seq_length()
        past.ids = torch.cat((past.ids, ids), dim=1)
        block_size = self.gpt.config.block_size
        slides = past.get_seq_length() > block_size

        if slides and before and n > 1:
            raise ValueError(f"{n} tokens do not fit after {before}: block_size is {block_size}")
        if past.padded and mask is None:
            raise ValueError("texts with padding need their attention_mask with every new token")

        if past.cache is not None and not slides:
            with past.cache.adding(*ids.shape):
                return self.gpt.hidden(ids, past.cache)[:, -n:]
        past.cache = None
        return self.hidden(past.ids, mask, n)
