"""Another value of each kept key than its default and than tests.support.foreign.config_of's."""

CHANGES = {
    "model": dict(n_layer=3, n_embd=80, n_head=2, vocab_size=301, block_size=32)
    | dict(dropout=0.1, activation="relu2")
    | dict(
        arch="llama",
        n_kv_head=1,
        head_dim=128,
        n_inner=96,
        norm_eps=1e-6,
        qk_norm=True,
        logit_cap=15.0,
        rope_theta=1e4,
        rope_factor=8.0,
        tied=False,
    ),
    "data": dict(tokenizer="gpt2", seed=1, windows="shifted"),
    "train": dict(seq_len=8, total_batch_tokens=32, dtype="bf16", seed=1),
    "optim": dict(name="muon", master="fp32", m="bf16", v="bf16"),
}
