# A small character-level model of Shakespeare, about 10.65M parameters: minutes on a GPU.

out_dir = "out-shakespeare-char"
eval_interval = 250  # often, because it overfits
eval_iters = 200
log_interval = 10  # not every step
# it overfits: only best.pt is of use; ckpt.pt is written at the end only
always_save_checkpoint = False

wandb_log = False
wandb_project = "shakespeare-char"
wandb_run_name = "mini-gpt"

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256  # context of up to 256 characters

n_layer = 6
n_head = 6
n_embd = 384
mlp = "gelu_exact"  # as in nanoGPT; GPT-2's own GELU, with tanh, takes twice as long on a CPU
dropout = 0.2

learning_rate = 1e-3  # small networks can take a higher learning rate
max_iters = 5000
lr_decay_iters = 5000  # as max_iters
min_lr = 1e-4  # learning_rate / 10
beta2 = 0.99  # a bit larger, because there are few tokens per step

warmup_iters = 100  # hardly needed
