# The LASER paper's model of 301M parameters, on 168 billion tokens of C4 (section 4.1).
# Its baseline in the paper: --attention=softmax.
# Other rows of its table 1: --n_layer=16 --n_hidden=4096, and --n_hidden=4096. Its ablation, LAMB:
# docs/choices.md.
# Prepare the data first:
# python data/text/prepare.py --source=allenai/c4:en --tokenizer=sentencepiece \
#     --vocab_size=32000 --out_dir=data/c4
# This downloads all of C4 (327 GB), and needs about 1.8 TB of disk. For a tenth of it, write
# --source=c4 after
# hf download allenai/c4 --repo-type=dataset --include="en/c4-train.000*" --local-dir=c4
# The paper names no vocabulary; with 32,000 tokens and tied embeddings the models have the sizes
# that it names.
# python train.py config/train_laser_301m.py --dry_run prints how much memory and time it needs.

out_dir = "out-laser-301m"
eval_interval = 1000
eval_iters = 100
log_interval = 10

wandb_project = "laser"
wandb_run_name = "laser_301m"

dataset = "c4"
vocab_size = 32000
attention = "laser"
block_size = 1024  # the paper's
batch_size = 16
gradient_accumulation_steps = 64  # 1024 sequences per step, the paper's

n_layer = 32
n_embd = 1024
n_head = 8
head_dim = 128
n_hidden = 2048

max_iters = 160000
lr_decay_iters = 160000  # as max_iters
# the paper tried powers of ten from 1e-1 to 1e-5, and does not say which one won
learning_rate = 1e-3
min_lr = 0.0  # "decay to zero"
# 5% of the steps, as in the paper's appendix A.1; it gives no number for these models
warmup_iters = 8000
weight_decay = 1e-1  # the paper tried 1e-2, 1e-1 and 1
beta1 = 0.9
beta2 = 0.99  # the paper's epsilon is 1e-24: docs/choices.md says why it is not used here
