# The long-short paper's model of PG-19 (section 5.1), 6.5M parameters, at n = 2048.
# First: python data/pg19/prepare.py
# At n = 8192: --block_size=8192 --batch_size=4 --gradient_accumulation_steps=16
# To compare: --heads=L has long heads only (it diverges in the paper), --heads=S short ones.
# The paper's figure 1b: --import=lab.loggers.logits

out_dir = "out-pg19-ls"
eval_interval = 1000
eval_iters = 100
log_interval = 10

wandb_project = "pg19"
wandb_run_name = "ls-2048"

dataset = "pg19"
batch_size = 16
gradient_accumulation_steps = 16  # 2^19 tokens per step = 2048 x 16 x 16
block_size = 2048

n_layer = 6
n_head = 6
n_embd = 192  # as in the paper: heads of 32, an MLP 4 times as wide
# the default window is the paper's, 50 at 2048 and 100 at 8192
heads = "SSSSSL"  # one long head in each layer
tied = False  # so the model has 6.5M parameters without positions, as in the paper

# the paper compares after these steps: at n = 8192 a validation perplexity of about 36
max_iters = 50000
learning_rate = 6e-4
min_lr = 6e-5
lr_decay_iters = 600000  # so at step 50,000 the learning rate has hardly begun to decay
warmup_iters = 2000
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0
