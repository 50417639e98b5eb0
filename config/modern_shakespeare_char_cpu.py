# A small GPT as people build it in 2026, on Shakespeare's characters: a minute on a two-core CPU.
# lab.verdict compares ideas with it (docs/verdict.md). GPT-2's recipe for the same text is
# config/train_shakespeare_char_cpu.py.

out_dir = "out-modern-cpu"
eval_interval = 600
eval_iters = 146  # 438 windows: the whole validation split, and as many of the training split
log_interval = 10

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 3
block_size = 256  # context of up to 256 characters; as many tokens in a step as with 12 x 64

n_layer = 3
n_head = 6  # so that --heads=SSSSSL fits
n_embd = 96
position = "rope"
norm = "rmsnorm"
qk_norm = "rmsnorm"
mlp = "swiglu"
tied = False
zero_init = True

optimizer = "muon"
muon_lr = 0.014
muon_beta = 0.85  # a longer memory is worse in a run of a few hundred steps
learning_rate = 0.028  # of the embedding, the head and the norms
beta2 = 0.99  # a bit larger, because there are few tokens per step
max_iters = 600
lr_decay_iters = 600  # as max_iters
min_lr = 0.0
warmup_iters = 120
