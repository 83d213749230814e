"""A recipe's name stands for its file, wherever the package is."""

from pathlib import Path

import pytest

from gpt2_triton.config import recipes
from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_name_is_that_of_a_file_in_configs():
    assert recipes.names() == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    for name in recipes.names():
        assert recipes.find(name) == CONFIGS / f"{name}.yaml"
    assert Config.load("gpt2_124m") == Config.load(CONFIGS / "gpt2_124m.yaml")


def test_installed_package_has_its_own_recipes(elsewhere, monkeypatch):
    monkeypatch.setattr(recipes, "PACKAGE", elsewhere / "gpt2_triton")
    for file in ("gpt2_triton/configs/mine.yaml", "configs/other.yaml"):
        (elsewhere / file).parent.mkdir(parents=True)
        (elsewhere / file).touch()
    assert recipes.names() == ["mine"]


def test_file_but_not_a_directory_comes_before_a_recipe_of_the_same_name(elsewhere):
    (elsewhere / "overfit").mkdir()
    assert recipes.find("overfit") == CONFIGS / "overfit.yaml"
    (elsewhere / "quickstart").write_text("train: {steps: 700}")
    assert Config.load("quickstart").train.steps == 700


@pytest.mark.parametrize("path", ["x.yaml", "x.yml", "configs/nope.yaml", "/nowhere/gpt2"])
def test_path_stays_a_path(path):
    assert recipes.find(path) == Path(path)


@pytest.mark.parametrize("path", ["gpt2_124m.yaml", "configs/gpt2_124m.yaml", "configs/gpt2_124m"])
def test_missing_file_called_like_a_recipe_is_refused_with_the_name(path):
    with pytest.raises(
        ConfigError,
        match=f"^{path}: no such file; the recipe is called gpt2_124m, without directory",
    ):
        Config.load(path)


@pytest.mark.parametrize(
    ("name", "near"), [("owm", "own"), ("quikstart", "quickstart"), ("nope", None)]
)
def test_unknown_name_gets_a_suggestion_if_one_is_near_else_the_list(name, near):
    with pytest.raises(ConfigError) as error:
        recipes.find(name)
    advice = f"; did you mean {near}?" if near else f"; recipes: {', '.join(recipes.names())}"
    assert str(error.value) == f"{name}: neither a file nor a recipe{advice}"
