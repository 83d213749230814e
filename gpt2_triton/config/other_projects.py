"""Options of nanoGPT's scripts and llm.c's train_gpt2cu and their names here: the
table in docs/guide/interop.md.

A text names a key, an option or a command, then other units or values.  "none:
..." tells why no key is needed.
"""

NANOGPT = {
    "dataset": "data.train and data.val: token shards, which prepare nanogpt makes of its folder",
    "gradient_accumulation_steps": "train.total_batch_tokens, in tokens of all GPUs: "
    "gradient_accumulation_steps * batch_size * block_size",
    "block_size": "train.seq_len, at most model.block_size",
    "max_iters": "train.steps, one more: nanoGPT counts from 0 to max_iters",
    "learning_rate": "optim.lr",
    "warmup_iters": "optim.warmup, in steps",
    "decay_lr": "optim.schedule, cosine, or constant for decay_lr False",
    "lr_decay_iters": "optim.schedule, which ends with the last step, train.steps",
    "min_lr": "optim.final_frac, a fraction of the peak: min_lr / learning_rate",
    "grad_clip": "optim.clip",
    "bias": "none: models have biases, as GPT-2 has",
    "eval_interval": "eval.every, and checkpoint.every for its checkpoints",
    "eval_iters": "eval.tokens, in tokens: eval_iters * batch_size * block_size",
    "eval_only": "python -m gpt2_triton perplexity",
    "always_save_checkpoint": "checkpoint.best val_loss",
    "log_interval": "log.every",
    "out_dir": "--run_dir",
    "wandb_log": "log.wandb online",
    "wandb_run_name": "log.wandb_name",
    "device": "none: a run uses the GPU if there is one; CUDA_VISIBLE_DEVICES chooses",
    "backend": "none: GPUs communicate through NCCL",
    "compile": "none: kernels are always compiled",
    "start": "sample --prompt",
    "num_samples": "sample --num",
    "max_new_tokens": "sample --tokens",
}

LLMC = {
    "-i": "data.train",
    "-j": "data.val",
    "-o": "--run_dir",
    "-y": "--resume",
    "-e": "model.size for a size such as d12, init_from llmc:FILE for a model",
    "-n": "checkpoint.every",
    "-nk": "checkpoint.keep",
    "-nm": "checkpoint.major",
    "-b": "train.batch_size",
    "-t": "train.seq_len",
    "-d": "train.total_batch_tokens",
    "-x": "train.steps",
    "-k": "optim.schedule",
    "-l": "optim.lr",
    "-u": "optim.warmup",
    "-q": "optim.final_frac",
    "-c": "optim.weight_decay",
    "-sl": "train.skip_loss_z",
    "-sg": "train.skip_norm_z",
    "-v": "eval.every",
    "-m": "eval.tokens, in tokens: -m * -b * -t * GPUs; 0 takes all",
    "-s": "sample.every",
    "-g": "sample.tokens",
    "-h": "eval.hellaswag_every, in steps",
    "-a": "the recipe overfit",
    "-f": "none: TF32 is not used",
    "-ge": "none: GELU is fused where that is faster",
    "-w": "optim.master, fp32 or none",
    "-z": "parallel.zero",
    "-r": "memory.recompute, none, gelu or gelu+ln for 0, 1 or 2",
    **dict.fromkeys(
        ("-pn", "-pr", "-pg", "-ps", "-pf", "-pi"), "torchrun or srun, which start the processes"
    ),
}

USUAL = dict.fromkeys(
    ("epochs", "num_train_epochs"), "train.steps; a run says at its start how many epochs they are"
)
USUAL |= {"max_steps": "train.steps", "warmup_steps": "optim.warmup, in steps"}


def counterpart(name: str) -> str:
    """Return the end of an error about an option that other trainers have;
    nothing for any other name.
    """
    if name in USUAL:
        return f"; use {USUAL[name]}"
    for project, known in (("nanoGPT", NANOGPT), ("llm.c", LLMC)):
        text = known.get(name, "")
        if text.startswith("none: "):
            return f"; {project}'s {name} has no counterpart here: {text.removeprefix('none: ')}"
        if text:
            return f"; for {project}'s {name} use {text}"
    return ""
