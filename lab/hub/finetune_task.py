# fine-tunes on prompts and answers (lab/hub/prepare_answers.py), some thousand examples
# python -m lab.hub.finetune lab/hub/finetune_task.py --init_from=out-books --dataset=endings

# init_from and dataset are given on the command line
out_dir = "out-task"
eval_interval = 50
eval_iters = 50
log_interval = 10
always_save_checkpoint = False  # best.pt is saved; ckpt.pt only at the end

batch_size = 16  # examples
gradient_accumulation_steps = 1
max_iters = 300
lr_decay_iters = 300
warmup_iters = 20
learning_rate = 3e-4  # small, because the weights are trained already
min_lr = 3e-5
dropout = 0.1  # a model without dropout learns a small number of examples by heart
