# GPT-2 XL on Shakespeare, in minutes on one GPU: python data/shakespeare/prepare.py first.
# --init_from=gpt2 is the small one; --attention=laser, --heads=SSSL --window=128, ... swap its attention.

out_dir = "out-shakespeare"
eval_interval = 5
eval_iters = 40
log_interval = 1

wandb_project = "shakespeare"
wandb_run_name = "ft-gpt2-xl"

dataset = "shakespeare"
init_from = "gpt2-xl"  # the largest GPT-2
always_save_checkpoint = False  # only best.pt is of use: it overfits

batch_size = 1
gradient_accumulation_steps = 32  # 32,768 tokens per step: the 301,966 of the text are an epoch of 9 steps
max_iters = 20

learning_rate = 3e-5  # a small one,
decay_lr = False  # and constant
