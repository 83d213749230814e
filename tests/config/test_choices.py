"""What follows from the declaration of a model's key: refusals, train.precision auto, exports."""

import pytest

from gpt2_triton.checkpoint.export import WRITERS, export
from gpt2_triton.checkpoint.weights import Weights
from gpt2_triton.config.config import Config
from gpt2_triton.config.precision import choose_precision
from gpt2_triton.config.rules import conflicts
from gpt2_triton.config.schema import Choice, ModelConfig, choices
from gpt2_triton.errors import ConfigError
from tests.support.changes import CHANGES


def choice_of(key: str) -> Choice:
    [choice] = choices(ModelConfig().model_copy(update={key: CHANGES["model"][key]}))
    return choice


CHOICES = [choice_of(key) for key in CHANGES["model"]]
each = pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: choice.key)


def with_choice(choice: Choice, arch: str, precision: str) -> Config:
    """Return the defaults with this choice."""
    model = {"arch": arch, choice.key.removeprefix("model."): choice.value}
    return Config().replace(model=model, train={"precision": precision})


@each
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_value_is_refused_beside_other_architectures(choice, arch):
    found = dict(conflicts(with_choice(choice, arch, "bf16")))
    refused = f"{choice.value} is for model.arch {choice.arch}; remove it"
    assert (found.get(choice.key) == refused) == (choice.arch not in ("", arch))


@each
def test_fp8_is_refused_and_not_chosen_for_what_it_does_not_have(choice):
    config = with_choice(choice, choice.arch or "gpt2", "fp8")
    wrong = f"fp8 has no {choice.key} {choice.value}"
    assert (("train.precision", f"{wrong}; set it to bf16") in conflicts(config)) != choice.fp8
    chosen, notes = choose_precision(config.replace(train={"precision": "auto"}), "9.0")
    assert (notes == [f"train.precision auto: bf16 ({wrong})"]) != choice.fp8
    assert choice.fp8 or chosen.train.precision == "bf16"


@each
@pytest.mark.parametrize("format", WRITERS)
def test_export_refuses_what_a_format_has_no_name_for(tmp_path, monkeypatch, choice, format):
    def written(*arguments):
        raise ZeroDivisionError

    monkeypatch.setitem(WRITERS, format, written)
    weights = Weights("here", with_choice(choice, "gpt2", "bf16").model, None, written)
    refused = format not in choice.formats
    message = f"format: {format} has no {choice.key} {choice.value}; take hf" if refused else None
    with pytest.raises(ConfigError if refused else ZeroDivisionError, match=message):
        export(weights, tmp_path / "out", format, "fp32")
    assert not (tmp_path / "out").exists()
