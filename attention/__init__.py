"""What makes the attentions of model.py fast, and what they are made of.

scores.py: scores, masks and biases, for the definitions. fast.py: the same functions, fast. heads.py: which heads of
a layer are short. cache.py: decoding token by token. documents.py: several documents in one window. probe.py: looking
into a layer. kernels.py: Triton.
"""
