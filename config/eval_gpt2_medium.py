# The loss of OpenAI's GPT-2 (350M) on OpenWebText, as nanoGPT:
# python train.py config/eval_gpt2_medium.py
# (python eval.py --init_from=gpt2-medium --dataset=openwebtext measures the whole split)

dataset = "openwebtext"
init_from = "gpt2-medium"
eval_only = True
eval_iters = 500  # more for a good estimate
batch_size = 8
wandb_log = False
