# The LASER paper's model of 7.7B parameters, on 44 billion tokens (appendix).
# --attention=softmax is its baseline.
# It names no number of layers: with 32, as its others, there are 7.7B.
# Its text: python data/text/prepare.py --source=allenai/c4:en --tokenizer=sentencepiece --vocab_size=32000
# --out_dir=data/c4. The paper names no vocabulary; with 32,000 tokens, tied, the sizes are those that it gives.
# python train.py config/train_laser_7_7b.py --dry_run says what it needs.

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
parallel = "fsdp"  # of several processes each has its share
activation_checkpointing = True

n_layer = 32
n_embd = 3440
n_head = 16
head_dim = 720
n_hidden = 11584

max_iters = 42000  # 44 billion tokens (appendix)
lr_decay_iters = 42000  # as max_iters
learning_rate = 1e-4  # the paper searched 1e-1 to 1e-5 in powers of ten, and does not say which one won
min_lr = 0.0  # "decay to zero"
warmup_iters = 2100  # 5%, as in its appendix A.1; for these models it gives no number
weight_decay = 1e-1  # of its 1e-2, 1e-1 and 1
beta1 = 0.9
beta2 = 0.99  # its epsilon of 1e-24 is PyTorch's 1e-8 here
