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


def test_names_are_the_files_in_configs():
    assert recipes.names() == sorted(path.stem for path in CONFIGS.glob("*.yaml")) and "gpt2_124m" in recipes.names()


@pytest.mark.parametrize("name", recipes.names())
def test_name_loads_the_recipe(name):
    assert recipes.find(name) == CONFIGS / f"{name}.yaml"
    assert Config.load(name) == Config.load(CONFIGS / f"{name}.yaml")


def test_installed_package_has_its_own_recipes(elsewhere, monkeypatch):
    monkeypatch.setattr(recipes, "PACKAGE", elsewhere / "gpt2_triton")
    (elsewhere / "gpt2_triton" / "configs").mkdir(parents=True)
    (elsewhere / "gpt2_triton" / "configs" / "mine.yaml").touch()
    (elsewhere / "configs").mkdir()
    (elsewhere / "configs" / "other.yaml").touch()
    assert recipes.names() == ["mine"]


def test_file_comes_before_a_recipe_of_the_same_name(elsewhere):
    (elsewhere / "quickstart").write_text("train: {steps: 700}")
    assert Config.load("quickstart").train.steps == 700


def test_directory_of_a_recipe_name_does_not_hide_the_recipe(elsewhere):
    (elsewhere / "quickstart").mkdir()
    assert recipes.find("quickstart") == CONFIGS / "quickstart.yaml"


@pytest.mark.parametrize("path", ["a/b.yaml", "x.yaml", "x.yml", "configs/nope.yaml", "/nowhere/gpt2"])
def test_path_stays_a_path(path):
    assert recipes.find(path) == Path(path)


@pytest.mark.parametrize("path", ["gpt2_124m.yaml", "configs/gpt2_124m.yaml", "configs/gpt2_124m"])
def test_missing_file_called_like_a_recipe_is_refused_with_the_name(path):
    with pytest.raises(ConfigError) as error:
        Config.load(path)
    assert str(error.value) == (f"{path}: no such file; the recipe is called gpt2_124m, without directory and ending")


@pytest.mark.parametrize(("name", "near"), [("gpt2-124M", "gpt2_124m"), ("quikstart", "quickstart"), ("nope", None)])
def test_unknown_name_gets_the_list_and_a_suggestion_only_if_one_is_near(name, near):
    with pytest.raises(ConfigError) as error:
        recipes.find(name)
    suggestion = f"; did you mean {near}?" if near else ""
    expected = f"{name}: neither a file nor a recipe{suggestion}; recipes: {', '.join(recipes.names())}"
    assert str(error.value) == expected
