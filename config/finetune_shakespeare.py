# GPT-2 XL on Shakespeare, in minutes on one GPU: python data/shakespeare/prepare.py first.
# --init_from=gpt2 takes the smallest GPT-2; --attention=laser or --heads=SSSL --window=128
# changes its attention.

out_dir = "out-shakespeare"
eval_interval = 5
eval_iters = 40
log_interval = 1

wandb_project = "shakespeare"
wandb_run_name = "ft-gpt2-xl"

dataset = "shakespeare"
init_from = "gpt2-xl"  # the largest GPT-2
always_save_checkpoint = False  # it overfits: only best.pt is of use

batch_size = 1
# 32,768 tokens per step; the text has 301,966 tokens, so 9 steps are an epoch
gradient_accumulation_steps = 32
max_iters = 20

learning_rate = 3e-5  # small, as the weights are already trained
decay_lr = False  # a constant learning rate
