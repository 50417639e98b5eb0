# The LASER paper's model of 7.7B parameters, on 44 billion tokens (appendix).
# Its baseline in the paper: --attention=softmax.
# The paper names no number of layers; 32, as in its other models, gives 7.7B parameters.
# Prepare the data first:
# python data/text/prepare.py --source=allenai/c4:en --tokenizer=sentencepiece \
#     --vocab_size=32000 --out_dir=data/c4
# This downloads all of C4 (327 GB), and needs about 1.8 TB of disk. For a tenth of it, write
# --source=c4 after
# hf download allenai/c4 --repo-type=dataset --include="en/c4-train.000*" --local-dir=c4
# The paper names no vocabulary; with 32,000 tokens and tied embeddings the models have the sizes
# that it names.
# python train.py config/train_laser_7_7b.py --dry_run prints how much memory and time it needs.

out_dir = "out-laser-7-7b"
eval_interval = 1000
eval_iters = 100
log_interval = 10

wandb_project = "laser"
wandb_run_name = "laser_7_7b"

dataset = "c4"
vocab_size = 32000
attention = "laser"
block_size = 1024  # the paper's
batch_size = 2
gradient_accumulation_steps = 512  # 1024 sequences per step, the paper's
parallel = "fsdp"  # each of several processes has a share of the model
activation_checkpointing = True

n_layer = 32
n_embd = 3440
n_head = 16
head_dim = 720
n_hidden = 11584

max_iters = 42000  # 44 billion tokens (appendix)
lr_decay_iters = 42000  # as max_iters
# the paper tried powers of ten from 1e-1 to 1e-5, and does not say which one won
learning_rate = 1e-4
min_lr = 0.0  # "decay to zero"
# 5% of the steps, as in the paper's appendix A.1; it gives no number for these models
warmup_iters = 2100
weight_decay = 1e-1  # the paper tried 1e-2, 1e-1 and 1
beta1 = 0.9
beta2 = 0.99  # the paper's epsilon is 1e-24: docs/choices.md says why it is not used here
