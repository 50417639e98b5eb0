# GPT-2 (124M) on OpenWebText. nanoGPT reaches a validation loss of about 2.85 in four days on
# eight A100 (40 GB):
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-124M"

dataset = "openwebtext"
vocab_size = 50304  # GPT-2's 50257, rounded up to a multiple of 64, as in nanoGPT
batch_size = 12  # 12 x 1024 x 40 = 491,520 tokens per step, whatever the number of processes
block_size = 1024
# if it is a multiple of the number of processes, all micro-batches are full
gradient_accumulation_steps = 5 * 8

max_iters = 600000  # 295 billion tokens
lr_decay_iters = 600000  # as max_iters

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
