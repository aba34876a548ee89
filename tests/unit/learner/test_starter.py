"""The shipped starter policies: intact, small, and what their recipes build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.learner.models import STARTER_FOLDER, STARTER_SKILL_FOLDER, STARTER_TOOLS_FOLDER
from tools import starter
from tools.starter import Recipe, build, file_hashes
from tools.starter_skill import SkillRecipe
from tools.starter_tools import ToolsRecipe

each_policy = pytest.mark.parametrize(
    ("folder", "recipe", "command"),
    [
        (STARTER_FOLDER, Recipe, "tools.starter"),
        (STARTER_TOOLS_FOLDER, ToolsRecipe, "tools.starter_tools"),
        (STARTER_SKILL_FOLDER, SkillRecipe, "tools.starter_skill"),
    ],
)


@each_policy
def test_files_are_the_manifests_and_of_the_default_recipe(folder: Path, recipe: type[Recipe], command: str) -> None:
    manifest = json.loads((folder / starter.MANIFEST).read_text())
    assert manifest["sha256"] == file_hashes(folder)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(manifest["sha256"])
    assert recipe(**manifest["recipe"]) == recipe()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 5_000_000
    assert f"python -m {command} --out" in (folder / "README.md").read_text()


@each_policy
def test_a_seed_gives_one_loadable_policy(tmp_path: Path, folder: Path, recipe: type[Recipe], command: str) -> None:
    small = {"num_problems": 400, "first_steps": 3, "last_steps": min(2, recipe().last_steps), "batch": 4}
    for name, seed in (("first", 0), ("second", 0), ("other", 1)):
        build(tmp_path / name, recipe(seed=seed, **small))
    hashes = [file_hashes(tmp_path / name) for name in ("first", "second", "other")]
    assert hashes[0] == hashes[1] != hashes[2]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    assert all(torch.isfinite(parameter).all() for parameter in reloaded.parameters())


def test_auto_tokenizer_splits_as_the_shipped_file_and_as_the_recipe() -> None:
    tokenizer = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    # AutoTokenizer replaces the splitting rule of a Qwen2 folder by that of its own class, without a word.
    drawn = generate("train", Recipe().num_problems, Recipe().seed)
    built = starter.build_tokenizer(drawn)
    raw = Tokenizer.from_file(str(STARTER_FOLDER / "tokenizer.json"))
    assert len(built) == len(tokenizer) == raw.get_vocab_size()
    for problem in drawn[:200]:
        text = f"{problem.text}{starter.END}{problem.completion}"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == raw.encode(text, add_special_tokens=False).ids
        assert ids == built(text, add_special_tokens=False)["input_ids"]
