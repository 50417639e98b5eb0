# A character-level model of Shakespeare in about two minutes on a two-core CPU.

out_dir = "out-shakespeare-char-cpu"
eval_interval = 250
eval_iters = 1000  # 12,000 windows asked for: more than the validation split has, so all of it
log_interval = 50
