# A small character-level model of Shakespeare: about two minutes on a two-core CPU.
# In equal time a smaller model that sees more text wins. Validation losses of one seed, 3 layers:
# 1.67 with 96 wide and 4000 steps, 1.71 with 144 wide and 2500, 1.77 with 192 wide and 1700
# (learning rates 6e-3, 4e-3, 3e-3).

out_dir = "out-shakespeare-char-cpu"
eval_interval = 1000
eval_iters = 146  # 1752 windows: the whole validation split, and as many of the training split
log_interval = 10

wandb_project = "shakespeare-char"
wandb_run_name = "cpu"

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 12
block_size = 64  # context of up to 64 characters

n_layer = 3
n_head = 6  # so that --heads=SSSSSL fits
n_embd = 96

learning_rate = 6e-3  # small networks can take a high learning rate
max_iters = 3000
lr_decay_iters = 3000  # as max_iters
min_lr = 1e-4
beta2 = 0.99  # a bit larger, because there are few tokens per step
warmup_iters = 100
