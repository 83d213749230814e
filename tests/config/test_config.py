"""Configuration: values, derived sizes, and a table of mistakes with the text that a user sees."""

import pytest
import yaml
from pydantic import ValidationError

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import options
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.config.values import SIZES


def test_rules_suggest_batches_that_pass():
    """The values that the message about batches offers both pass."""
    train = dict(total_batch_tokens=524_288, batch_size=48)
    for fix in (dict(batch_size=32), dict(total_batch_tokens=491_520)):
        assert StepShape.of(Config.model_validate(dict(train=train | fix))).accumulation in (16, 10)


def test_config_keys_have_a_meaning():
    assert all(field.description for _, field in options())


def test_config_yaml_reads_back_equal(tmp_path):
    config = Config.model_validate(
        dict(
            train=dict(total_batch_tokens=2**19),
            sample=dict(prompt='null: "é"\n'),
            optim=dict(eps=1e-8),
        )
    )
    path = tmp_path / "x.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert Config.load(path) == config
    assert (
        Config.model_validate(yaml.safe_load(config.to_yaml()))
        == Config.model_validate(config.to_dict())
        == config
    )


def test_tau_gives_the_decay_for_the_rate_and_the_steps():
    config = Config.load({}, {"optim.tau": "4", "optim.lr": "1e-3", "train.steps": "2000"})
    assert config.weight_decay == 2.0 and config.optim.weight_decay is None
    assert Config.model_validate(config.to_dict()) == config  # as a resume reads it
    assert (
        Config.load(
            config.to_dict(), {"optim.tau": "null", "optim.weight_decay": "0.5"}
        ).weight_decay
        == 0.5
    )
    assert Config().weight_decay == Config.load({}, {"optim.tau": "null"}).weight_decay == 0.1


def test_config_is_frozen():
    with pytest.raises(ValidationError):
        Config().optim.lr = 1.0


def test_config_derived_sizes():
    config = Config.model_validate(dict(train=dict(total_batch_tokens=524_288)))
    assert config.n_params == 124_475_904  # what llm.c prints for 124M
    assert (config.model.padded_vocab, config.head_rows) == (50304, 11264)
    assert StepShape.of(config) == StepShape(gpus=1, micro_batch=64, accumulation=8, zero=0)
    assert config.train.step_tokens == 524_288
    small = Config.model_validate(
        dict(train=dict(total_batch_tokens=4096), model=dict(n_embd=1280, n_head=20))
    )
    assert StepShape.of(small) == StepShape(gpus=1, micro_batch=4, accumulation=1, zero=0)
    assert small.head_rows == 10112
    assert Config.load({}, {"train.total_batch_tokens": "null"}).train.step_tokens == 64 * 1024


def test_one_sequence_of_validation_is_enough():
    assert Config.load({}, {"eval.tokens": "1024"}).train.seq_len == 1024


def test_the_defaults_are_the_recipe_gpt2_124m_but_for_the_keys_that_config_md_names():
    recipe = Config.load("gpt2_124m")
    added = recipe.replace(
        sample=Config().sample.model_dump(), checkpoint={"major": 0}, eval={"hellaswag_every": 0}
    )
    assert added == Config() and recipe != Config()


@pytest.mark.parametrize("C, width", [(768, 256), (1024, 256), (1280, 256), (1600, 320)])
def test_head_rows_fill_the_waves_of_an_h200(C, width):
    model = dict(n_embd=C, n_head=C // 64)
    tiles = -(-Config.model_validate(dict(model=model)).head_rows // 128) * -(-C // width)
    assert tiles / (132 * -(-tiles // 132)) > 0.96


@pytest.mark.parametrize("size", sorted(SIZES))
def test_model_size_sets_its_keys(size, tmp_path):
    (tmp_path / "x.yaml").write_text(f"model:\n  size: {size}\n")
    config = Config.load(tmp_path / "x.yaml")
    m = config.model
    assert (m.n_layer, m.n_embd, m.n_head, m.block_size) == SIZES[size]
    assert "size" not in config.to_dict()["model"]
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert Config.load(tmp_path / "resolved.yaml") == config


def test_model_sizes_have_the_parameters_of_gpt2():
    """llm.c counts 124.5M, 354.9M, 774.7M and 1558.9M with the vocabulary padded to 50304."""
    found = [Config.model_validate({"model": {"size": f"d{d}"}}).n_params for d in (12, 24, 36, 48)]
    assert [round(n / 1e6, 1) for n in found] == [124.5, 354.9, 774.1, 1557.7]


def test_model_sizes_have_the_parameters_of_llama_3():
    """transformers counts 1,235,814,400, 3,212,749,824 and 8,030,261,248."""
    found = [
        Config.model_validate({"model": {"size": f"llama:{name}"}}).n_params
        for name in ("1b", "3b", "8b")
    ]
    assert found == [1_235_814_400, 3_212_749_824, 8_030_261_248]


def test_head_dim_counts_in_parameters_and_operations():
    """A layer has 4 * 768 * 64 weights more for each head that is 128 columns wide, not 64."""
    narrow, wide = (
        Config.model_validate({"model": {"arch": "llama", "head_dim": width}})
        for width in (None, 128)
    )
    assert wide.n_params - narrow.n_params == 12 * 12 * 4 * 768 * 64
    attention = 6 * 12 * 12 * 64 * 1024
    more = wide.flops_per_token - narrow.flops_per_token
    assert more == 6 * (wide.n_params - narrow.n_params) + attention


def test_operations_of_a_step_count_an_untied_head_but_not_its_embedding():
    tied, untied = (
        Config.model_validate({"model": {"size": "llama:1b", "tied": tied}})
        for tied in (True, False)
    )
    assert tied.flops_per_token == untied.flops_per_token and tied.n_params < untied.n_params
