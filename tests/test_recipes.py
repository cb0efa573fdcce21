"""Recipes: every one is a run that can be read and a drafter that can be made."""

from pathlib import Path

import pytest

from hf_specdraft import evaluation, recipes
from hf_specdraft.drafters import families
from hf_specdraft.training.config import TrainConfig
from hf_specdraft.training.loss import DraftLoss

OVERRIDES = ["target=model", "data=answers", "trainer.output_dir=out"]


@pytest.mark.parametrize("name", recipes.known())
def test_a_recipe_reads_as_a_training_config_and_as_fields_of_a_drafter(name):
    recipe = recipes.get(name)
    if recipe.train and "family" not in recipe.train["drafter"]:
        with pytest.raises(ValueError, match="drafter needs either family .* or init_from"):
            TrainConfig.read(name, OVERRIDES)  # for a drafter that is there
        DraftLoss(**recipe.train["loss"])
    elif recipe.train:
        config = TrainConfig.read(name, OVERRIDES)
        assert config.recipe == name and config.data == "answers"
        DraftLoss(**config.loss)
        family = config.family.config_class
        fields = {key: value for key, value in config.drafter.items() if key not in ("family", "init_from")}
        fields |= recipe.draft
        made = family.tiny(**fields) if fields.get("block_size") is None else family.tiny(**{**fields, "tree_nodes": 0})
        assert all(getattr(made, key) == value for key, value in fields.items() if key != "tree_nodes")
    else:
        known = {field for family in families().values() for field in family.config_class.__dataclass_fields__}
        assert recipe.draft and set(recipe.draft) <= known


def test_a_file_says_more_than_its_recipe(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("recipe: dflash\nloss: {weighting: dpace}\ntrainer: {max_steps: 3}\n")
    config = TrainConfig.read(path, OVERRIDES)
    assert config.loss == {"terms": "ce", "weighting": "dpace"}
    assert config.trainer["learning_rate"] == 6e-4 and config.trainer["max_steps"] == 3
    path.write_text("recipe: a run of my own\n")
    with pytest.raises(ValueError, match="no drafter"):
        TrainConfig.read(path, OVERRIDES)


def test_a_trained_drafter_has_a_family_already():
    merged = recipes.beneath(recipes.get("dflash"), {"drafter": {"init_from": "folder"}})
    assert merged["drafter"] == {"init_from": "folder"} and merged["unroll"] == {"anchors": 512}


def test_the_docs_list_the_recipes():
    assert recipes.table() in (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_an_unknown_recipe_names_those_there_are():
    with pytest.raises(ValueError, match="no such recipe.*dflash"):
        TrainConfig.read("dflush", OVERRIDES)
    with pytest.raises(ValueError, match="no recipe 'dflush'; there are .*dflash"):
        evaluation.load_drafter("ngram:recipe=dflush")
