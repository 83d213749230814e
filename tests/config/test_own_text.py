"""Keys for a user's own text: valid on every machine, in proportion to the text, and
after the keys that are given.
"""

import functools
import math

import pytest

from gpt2_triton import device
from gpt2_triton.config import recipes
from gpt2_triton.config.config import Config
from gpt2_triton.config.own_text import (
    FINETUNING,
    ON_A_CPU,
    ON_A_GPU,
    VAL_FRACTION,
    Machine,
    choice_for,
    choose,
    summary,
)
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.config.values import TOKENIZER_SIZES
from gpt2_triton.errors import ConfigError, DataError
from gpt2_triton.model.memory_plan import CONTEXT_BYTES, MODULE_BYTES
from tests.config.test_recipes import require_fit

LENGTHS = (5_000, 100_000, 4_000_000, 100_000_000, 10_000_000_000)
CARDS = {"4090": 23.5, "h200": 139.8}
DATA = {"data.train": "t.bin", "data.val": "v.bin"}


def tokens_of(characters, tokenizer):
    """English has a token for four characters, and one byte in each."""
    return characters if tokenizer == "bytes" else characters // 4


def config_for(characters, gpu_gib=None, gpus=1, tokens=None, **given):
    given = {key.replace("__", "."): value for key, value in given.items()}
    machine = Machine(gpus, gpu_gib)
    choice = choice_for(characters, machine, given)
    tokenizer = given.get("data.tokenizer", choice.config.data.tokenizer)
    tokens = tokens or tokens_of(characters, tokenizer)
    keys = choose(choice, tokens, machine, tokenizer, TOKENIZER_SIZES[tokenizer], given)
    assert not keys.keys() & given.keys()
    return Config.load(choice.recipe, keys | given | DATA, gpus)


on_h200 = functools.partial(config_for, gpu_gib=139.8)


def test_each_recipe_of_own_text_is_chosen_for_some_text():
    choices = [ON_A_CPU, FINETUNING, *ON_A_GPU.values()]
    named = [name for name in recipes.names() if name.startswith(recipes.OWN)]
    assert sorted(choice.recipe for choice in choices) == named
    assert all(choice.config.checkpoint.best == "val_loss" for choice in choices)


@pytest.mark.parametrize("characters", LENGTHS)
@pytest.mark.parametrize("gpu", [None, *CARDS])
def test_keys_are_valid_and_fit_the_machine(characters, gpu):
    config = config_for(characters, CARDS.get(gpu))
    shape = StepShape.of(config)
    budget = (device.memory_bytes(gpu) if gpu else 2 << 30) - CONTEXT_BYTES - MODULE_BYTES
    require_fit(config, budget, shape)


@pytest.mark.parametrize("characters", LENGTHS)
@pytest.mark.parametrize("gpu_gib", [None, 23.5, 139.8])
def test_data_hold_a_step_and_the_validation(characters, gpu_gib):
    """Twice, for an end of the text whose tokens are longer than its others."""
    config = config_for(characters, gpu_gib)
    tokens = tokens_of(characters, config.data.tokenizer)
    assert config.train.step_tokens <= tokens * (1 - VAL_FRACTION)
    assert config.train.seq_len + 1 <= tokens * VAL_FRACTION
    assert 2 * config.eval.tokens <= tokens * VAL_FRACTION


def epochs(config, tokens):
    return config.train.steps * config.train.step_tokens / (tokens * (1 - VAL_FRACTION))


def epochs_of(config, characters):
    return epochs(config, tokens_of(characters, config.data.tokenizer))


@pytest.mark.parametrize("per_character", [0.2, 0.25, 1.0, 2.5])
def test_a_text_of_any_script_is_read_three_times_in_finetuning(per_character):
    """GPT-2 has a token for four English characters, and more than one for each
    Russian or Chinese character.
    """
    tokens = int(500_000 * per_character)
    assert 2.4 < epochs(on_h200(500_000, tokens=tokens, init_from="hf:gpt2"), tokens) <= 3


def test_short_texts_are_seen_forty_times_and_long_ones_four_times_at_most():
    on_gpu = [(epochs_of(on_h200(n), n), n) for n in LENGTHS]
    assert all(39 < seen <= 40 for seen, n in on_gpu if n < 20_000_000)
    assert all(1 < seen <= 4 for seen, n in on_gpu if n >= 20_000_000)
    assert all(config_for(n).train.steps <= 600 for n in LENGTHS)  # on a CPU


def test_model_and_tokens_grow_with_the_text():
    configs = [on_h200(n) for n in LENGTHS]
    assert [c.data.tokenizer for c in configs] == ["bytes"] * 3 + ["gpt2"] * 2
    assert [c.n_params for c in configs] == sorted(c.n_params for c in configs)
    assert (configs[-1].model.n_layer, configs[-1].model.n_embd, configs[-1].train.step_tokens) == (
        12,
        768,
        524_288,
    )
    assert [c.train.precision for c in configs] == ["bf16"] * 4 + ["auto"]


@pytest.mark.parametrize("gpus", [2, 3, 8])
def test_step_divides_among_gpus(gpus):
    for n in LENGTHS:
        assert StepShape.of(on_h200(n, gpus=gpus), gpus).gpus == gpus


def test_other_keys_follow_the_given_ones():
    assert on_h200(1_000_000, train__steps="1e3").optim.warmup == 100
    usual = on_h200(1_000_000)
    half = on_h200(1_000_000, train__total_batch_tokens="8192")
    assert (half.train.step_tokens, half.train.steps) == (
        8192,
        pytest.approx(2 * usual.train.steps, abs=1),
    )
    short = config_for(1_000_000, train__steps="20")
    assert (short.train.steps, short.optim.warmup, short.eval.every, short.sample.every) == (
        20,
        6,
        4,
        10,
    )
    wide = config_for(1_000_000, model__n_embd="256")
    assert (wide.model.n_head, wide.model.n_layer) == (4, 4)
    assert config_for(1_000_000, model__n_head="3").model.n_embd == 192
    sized = config_for(1_000_000, model__size="d6")
    assert (sized.model.n_layer, sized.model.n_embd, sized.model.vocab_size) == (6, 384, 256)
    long = config_for(1_000_000, train__seq_len="512", train__batch_size="1")
    # a batch accumulates to a step
    assert (long.model.block_size, long.train.step_tokens) == (512, 1024)
    gpt2, llama3 = (config_for(1_000_000, data__tokenizer=name) for name in ("gpt2", "llama3"))
    assert (gpt2.model.vocab_size, llama3.model.vocab_size) == (
        50257,
        128256,
    ) and gpt2.eval == llama3.eval
    assert config_for(1_000_000, eval__every="0").checkpoint.best == "none"
    assert not on_h200(1_000_000, model__size="llama:c768").model.dropout
    qwen3 = on_h200(1_000_000, model__size="qwen3:0.6b")
    assert (qwen3.model.vocab_size, qwen3.model.dropout) == (151_936, 0)


def test_short_texts_are_kept_from_overfitting_and_keys_against_that_follow_the_given_ones():
    usual, long = on_h200(1_000_000), on_h200(100_000_000)
    assert (
        usual.model.dropout
        and usual.data.windows == "shifted"
        and usual.optim.tau
        and usual.train.patience
    )
    assert (long.model.dropout, long.data.windows, long.train.patience) == (0, "fixed", 0)
    assert on_h200(1_000_000, optim__weight_decay="0.5").weight_decay == 0.5
    assert on_h200(1_000_000, optim__name="adamw").optim.lr <= 1e-3 < usual.optim.lr
    assert on_h200(1_000_000, train__dtype="fp32").optim.master == "none" != usual.optim.master
    for given in (dict(eval__every="0"), dict(checkpoint__best="none")):
        assert on_h200(1_000_000, **given).train.patience == 0


@pytest.mark.parametrize("characters", [100_000_000, 1_000_000_000, 10_000_000_000])
def test_the_block_of_a_long_text_follows_the_given_keys(characters):
    usual = on_h200(characters).model
    assert usual.arch == "llama" and usual.qk_norm and 3 * usual.n_embd > usual.inner
    wide = on_h200(characters, model__n_embd="640").model
    assert (wide.n_head, wide.n_kv_head, wide.inner) == (10, 2, 1664 + 64 * (usual.n_embd == 512))
    assert on_h200(characters, model__n_kv_head="1").model.n_kv_head == 1
    gpt2 = on_h200(characters, model__arch="gpt2").model
    assert gpt2 == ModelConfig(
        n_layer=usual.n_layer,
        n_head=usual.n_head,
        n_embd=usual.n_embd,
        block_size=usual.block_size,
    )
    d12 = on_h200(characters, model__size="d12").model
    assert (d12.arch, d12.qk_norm, d12.inner) == ("gpt2", False, 4 * 768)
    assert on_h200(characters, model__size="llama:c768").model.inner == 2048
    adamw = on_h200(characters, optim__name="adamw").optim
    assert adamw.lr <= 1e-3 and adamw.adamw_lr is None
    assert on_h200(characters, train__dtype="fp32").optim.master == "none"


def test_weights_from_the_hub_decide_size_and_tokenizer():
    for name, layers, gib in (
        ("hf:gpt2", 12, None),
        ("hf:openai-community/gpt2-xl", 48, 139.8),
        ("hf:DIR", 12, 23.5),
    ):
        config = config_for(1_000_000, gib, init_from=name)
        assert (config.model.n_layer, config.model.block_size, config.data.tokenizer) == (
            layers,
            1024,
            "gpt2",
        )
        assert (
            2 < epochs_of(config, 1_000_000) <= 3
            and config.optim.lr < 1e-4
            and config.model.dropout
        )
    other = config_for(1_000_000, init_from="hf:DIR", model__n_layer="6")
    assert (other.model.n_layer, other.model.n_embd, other.model.block_size) == (6, 768, 1024)
    short = on_h200(20_000, init_from="hf:gpt2", train__seq_len="256")
    assert (short.model.block_size, short.train.seq_len) == (1024, 256)


def test_finetuning_saves_no_oftener_than_its_steps_pay_for():
    for characters, saves in (
        (50_000, 3),
        (1_000_000, 3),
        (6_000_000, 3),
        (12_000_000, 5),
        (100_000_000, 11),
    ):
        config = on_h200(characters, init_from="hf:gpt2")
        every = config.eval.every
        assert every == config.checkpoint.every and math.ceil(config.train.steps / every) == saves


def test_weights_that_were_read_decide_model_and_sequence():
    source = ModelConfig(
        arch="llama", vocab_size=128256, block_size=131072, n_kv_head=4, rope_factor=32.0
    )
    given = {"init_from": "hf:DIR"}
    h200 = Machine(1, 139.8)
    for characters, T in ((100_000, 1024), (1_000_000, 2048), (100_000_000, 8192)):
        keys = choose(FINETUNING, characters // 4, h200, "llama3", 128_256, given, source)
        config = Config.load(FINETUNING.recipe, keys | given | DATA)
        assert (config.model, config.train.seq_len, config.data.tokenizer) == (source, T, "llama3")
    small = ModelConfig(vocab_size=256, block_size=32)
    keys = choose(FINETUNING, 100_000, Machine(1, None), "bytes", 256, given, small)
    short = Config.load(FINETUNING.recipe, keys | given | DATA)
    assert (short.train.seq_len, short.model.vocab_size, short.model.dropout) == (
        32,
        256,
        0.1,
    )


def test_too_little_text_is_refused_with_what_is_needed():
    assert config_for(1320).train.steps >= 1
    with pytest.raises(DataError, match=r"1,319 tokens .* needs 1,320; give more"):
        config_for(1319)
    assert config_for(400, train__seq_len="32").train.seq_len == 32
    with pytest.raises(
        ConfigError, match="init_from: expected scratch or one of .*; got runs/mine"
    ):
        config_for(1320, init_from="runs/mine")


def test_summary_tells_what_was_picked():
    text = summary(config_for(1_000_000), 1_000_000, 999_000, Machine(1, None))
    for part in (
        "1,000,000 characters, on the CPU; tokenizer bytes, 999,000 tokens\n",
        "layers 4, heads 2, channels 128",
        "600 of 1,024",
        "between validations 120, checkpoints 120, samples 300; any key can be given",
    ):
        assert part in text
