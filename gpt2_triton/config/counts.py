"""How many parameters a model has, and how many operations a token takes, both as in llm.c."""

from gpt2_triton.config.schema import Sections


class Counts(Sections):
    """The sections of a configuration, with what they amount to."""

    @property
    def n_params(self) -> int:
        """Number of parameters as in llm.c: the vocabulary is padded, wpe counts, wte
        and a tied head count once.
        """
        m = self.model
        # all in rows of n_embd
        if m.arch == "llama":
            mlp = 3  # matrices
            vectors = 2  # of a layer: norms
            last = 1  # norm
        else:
            mlp = 2
            vectors = 13  # norms 4, biases 3 + 1 + 4 + 1
            last = 2 + m.block_size  # norm, positions
        # q and the attention's output, k and v
        layer = 2 * m.q_channels + 2 * m.kv_channels + mlp * m.inner + vectors
        heads = 2 * m.head_size * m.n_layer if m.qk_norm else 0
        return m.n_embd * (m.head_row + m.padded_vocab + m.n_layer * layer + last) + heads

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations per token of a step, as in llm.c: 6N +
        6*L*NH*HS*T, without recomputation.

        An embedding that is not the head too multiplies nothing, and is not in N.
        """
        m = self.model
        return 6 * (
            self.n_params - m.head_row * m.n_embd + m.n_layer * m.q_channels * self.train.seq_len
        )
