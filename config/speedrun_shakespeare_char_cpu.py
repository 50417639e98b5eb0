# Tiny Shakespeare to nanoGPT's validation loss, 1.88, as soon as possible on a two-core CPU
# (docs/speedrun.md).
# A small model that sees more text wins here.

out_dir = "out-speedrun-cpu"
eval_interval = 100000  # larger than max_iters: only before the first step and after the last
eval_iters = 88  # 1760 windows: the whole validation split, and as many of the training split
log_interval = 50
always_save_checkpoint = False
sample_tokens = 0

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 20
block_size = 64  # context of up to 64 characters

n_layer = 2
n_head = 2
n_embd = 64
n_hidden = 192  # 3 n_embd instead of 4 n_embd: each step is faster
position = "rope"
rope_base = 100.0  # wavelengths up to 600 characters are enough for a context of 64
qk_norm = "layernorm"
mlp = "relu2"
zero_init = True
tied = False

optimizer = "muon"
muon_lr = 0.02
muon_beta = 0.85  # a longer memory is worse in a run of a few hundred steps
learning_rate = 0.01  # of the embedding, the head and the norms
schedule = "wsd"
decay_share = 1.0  # a linear decay from the warm-up to the end
max_iters = 300
lr_decay_iters = 300  # as max_iters
min_lr = 0.0
warmup_iters = 20
