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
        c = self.model.n_embd
        # in rows of c: the MLP's matrices; norms of a layer, with GPT-2 also biases 3 + 1
        # + 4 + 1; last norm, positions
        mlp, rows, last = (3, 2, 1) if m.arch == "llama" else (2, 13, 2 + m.block_size)
        # q and the attention's output, k and v
        layer = 2 * m.q_channels + 2 * m.kv_channels + mlp * m.inner + rows
        heads = 2 * m.head_size * m.n_layer if m.qk_norm else 0
        return c * (m.head_row + m.padded_vocab + m.n_layer * layer + last) + heads

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
