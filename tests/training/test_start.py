"""A step of few tokens at a recipe's learning rate is warned of, with the step to take instead."""

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.training.start import starting


def warned(capsys, tmp_path, **sections):
    with starting(Config.model_validate(sections), tmp_path / "run", resume=False):
        return capsys.readouterr().err


def test_few_tokens_at_a_high_learning_rate_are_warned_of(capsys, tmp_path):
    printed = warned(capsys, tmp_path, train=dict(batch_size=12))
    what = "12,288 tokens a step are few for optim.lr 0.0006: the loss may stay high"
    todo = "in a new run set train.total_batch_tokens to 516096, or lower optim.lr"
    assert printed == f"warning: {what}; {todo}\n"
    fixed = Config.model_validate(dict(train=dict(batch_size=12, total_batch_tokens=516_096)))
    assert StepShape.of(fixed).accumulation == 42
    small = dict(train=dict(batch_size=12), model=dict(n_layer=6, n_head=6, n_embd=384))
    for quiet in (dict(train=dict(batch_size=98)), dict(train=dict(batch_size=12), optim=dict(lr=5.9e-4)), small):
        assert warned(capsys, tmp_path, **quiet) == ""
