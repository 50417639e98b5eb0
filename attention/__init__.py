"""The attentions of model.py made fast."""
