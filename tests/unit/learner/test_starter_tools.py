"""The shipped starter policy with a tool: intact, and one that calls the calculator sometimes and badly."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from gxpo_trainer.config.engines import ModelConfig
from gxpo_trainer.data.word_problems import WordProblem, generate
from gxpo_trainer.learner.models import STARTER_FOLDER, resolve_model
from tools import starter
from tools.starter import IGNORED, build, conversation_row, file_hashes
from tools.starter_tools import ToolsRecipe, faulty_conversation, steps_of, tool_conversation

FOLDER = Path(resolve_model(ModelConfig(path="starter-tools")))
MAX_TURNS = 4


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def result_of(expression: str) -> str:
    """What a calculator answers, in exact arithmetic."""
    left, operator, right = re.fullmatch(r"(-?\d+)([-+*/])(-?\d+)", expression).groups()  # type: ignore[union-attr]
    a, b = Fraction(left), Fraction(right)
    if operator == "/" and b == 0:
        return "error"
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[operator]
    return str(value) if value.denominator == 1 else "error"


def calls_of(text: str) -> list[str]:
    return re.findall(r"<calc>(.*?)</calc>", text)


def boxed(text: str) -> str | None:
    found = re.findall(r"\\boxed\{(\d+)\}", text)
    return found[-1] if found else None


def test_files_are_those_of_the_manifest_small_and_of_the_default_recipe() -> None:
    manifest = json.loads((FOLDER / starter.MANIFEST).read_text())
    assert manifest["sha256"] == file_hashes(FOLDER)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(manifest["sha256"])
    assert ToolsRecipe(**manifest["recipe"]) == ToolsRecipe()
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5_000_000
    readme = (FOLDER / "README.md").read_text()
    assert "python -m tools.starter_tools --out" in readme
    assert "Apache-2.0" in readme


def test_policy_has_the_size_of_the_first_starter(model: Qwen2ForCausalLM) -> None:
    first = AutoModelForCausalLM.from_pretrained(STARTER_FOLDER)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    assert shapes == {name: weight.shape for name, weight in first.named_parameters()}


def test_a_tag_is_one_token_that_decoding_keeps(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("<calc>12*7</calc><|end|>", add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode([token]) for token in ids] == ["<calc>", "1", "2", "*", "7", "</calc>", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<calc>12*7</calc>"


def test_tokenizer_is_the_first_one_s_with_two_more_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    first = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    raw = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    built = starter.build_tokenizer(generate("train", 30_000, 0), ToolsRecipe.tags)
    assert len(tokenizer) == len(first) + 2 == len(built) == raw.get_vocab_size()
    for problem in generate("train", 100, 0):
        text = f"{problem.prompt.text}{starter.END}{problem.solution}"
        assert tokenizer(text)["input_ids"] == first(text)["input_ids"]
        turn = f"{starter.END}{starter.USER}12{starter.END}{starter.ASSISTANT}<calc>{problem.prompt.gold}*2</calc>"
        ids = tokenizer(turn, add_special_tokens=False)["input_ids"]
        assert ids == raw.encode(turn, add_special_tokens=False).ids
        assert ids == built(turn, add_special_tokens=False)["input_ids"]


def test_chat_template_continues_a_conversation_by_its_end(tokenizer: PreTrainedTokenizerBase) -> None:
    turns = [{"role": "user", "content": "12*7?"}, {"role": "assistant", "content": "<calc>12*7</calc>"}]
    shown = tokenizer.apply_chat_template(turns, tokenize=False)
    longer = [*turns, {"role": "user", "content": "84"}]
    whole = tokenizer.apply_chat_template(longer, tokenize=False, add_generation_prompt=True)
    assert whole == f"{shown}<|user|>84<|end|><|assistant|>"


def test_only_the_policy_s_turns_have_a_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    ids, labels = conversation_row(tokenizer, [7, 8], ["<calc>6*8</calc>", "48", "\\boxed{48}"])  # type: ignore[arg-type]
    assert tokenizer.decode(ids[2:]) == "<calc>6*8</calc><|end|><|user|>48<|end|><|assistant|>\\boxed{48}<|end|>"
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    trained = tokenizer.decode([label for label in labels if label != IGNORED])
    assert trained == "<calc>6*8</calc><|end|>\\boxed{48}<|end|>"


def test_complete_conversation_has_a_call_a_step_and_the_result() -> None:
    assert tool_conversation([(6, "*", 8), (48, "+", 15)]) == [
        *("<calc>6*8</calc>", "48"),
        *("<calc>48+15</calc>", "63"),
        "\\boxed{63}",
    ]
    assert tool_conversation([(7, "/", 2)], 3) == ["<calc>7/2</calc>", "error", "\\boxed{3}"]


def test_warm_up_conversations_follow_the_protocol_and_have_the_recipe_s_shares() -> None:
    drawn = generate("train", 400, 5)
    rng = random.Random(0)
    recipe = ToolsRecipe(last_careful_share=0.6, last_fault_share=0.5)
    kinds = {"head": 0, "complete": 0, "faulty": 0}
    for problem in drawn * 10:
        turns = recipe.conversation(problem, rng, last_phase=True)
        assert len(turns) <= 2 * MAX_TURNS - 1
        assert re.fullmatch(r"\\boxed\{(-?\d+|error)\}", turns[-1])
        for call, answer in zip(turns[:-1:2], turns[1::2], strict=True):
            assert answer == result_of(calls_of(call)[0])
        complete = turns == tool_conversation(steps_of(problem))
        assert not complete or boxed(turns[-1]) == problem.prompt.gold
        kinds["head" if len(turns) == 1 else "complete" if complete else "faulty"] += 1
    # 4,000 draws: the binomial standard deviation is at most 0.8 points; five of them are allowed.
    assert kinds["head"] / 4000 == pytest.approx(0.4, abs=0.04)
    assert kinds["complete"] / 4000 == pytest.approx(0.3, abs=0.04)
    assert kinds["faulty"] / 4000 == pytest.approx(0.3, abs=0.04)


def test_conversation_with_a_fault_is_mostly_wrong() -> None:
    rng = random.Random(1)
    drawn = generate("train", 400, 6) * 5
    right = [boxed(faulty_conversation(problem, rng)[-1]) == problem.prompt.gold for problem in drawn]
    assert sum(right) / len(right) < 0.05, "only by coincidence, such as 2+2 for 2*2"


@torch.no_grad()
def converse(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: list[WordProblem]
) -> list[list[str]]:
    """The policy's turns of one sampled conversation a problem, with a calculator that answers the last call."""
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    turns: list[list[str]] = [[] for _ in problems]
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.prompt.text}], add_generation_prompt=True, return_dict=False
        )
        for problem in problems
    ]
    open_rows = list(range(len(problems)))
    for _ in range(MAX_TURNS):
        padded = tokenizer.pad({"input_ids": [ids[row] for row in open_rows]}, return_tensors="pt")
        output = model.generate(**padded, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=20)
        still_open = []
        for row, new in zip(open_rows, output[:, padded["input_ids"].shape[1] :].tolist(), strict=True):
            sampled = new[: new.index(end) + 1] if end in new else new
            turns[row].append(tokenizer.decode(sampled, skip_special_tokens=True))
            calls = calls_of(turns[row][-1])
            if sampled[-1] == end and calls:
                valid = re.fullmatch(r"\d+[-+*/]\d+", calls[-1])
                answer = result_of(calls[-1]) if valid else "error"
                shown = f"{starter.USER}{answer}{starter.END}{starter.ASSISTANT}"
                ids[row] = ids[row] + sampled + tokenizer(shown, add_special_tokens=False)["input_ids"]
                still_open.append(row)
        open_rows = still_open
    return turns


def test_policy_calls_the_tool_sometimes_and_badly_and_the_tool_pays(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    drawn = generate("heldout", 128, 12)
    conversations = converse(model, tokenizer, drawn)
    right = [boxed(turns[-1]) == problem.prompt.gold for turns, problem in zip(conversations, drawn, strict=True)]
    called = [bool(calls_of(turns[0])) for turns in conversations]
    with_tool = [r for r, c in zip(right, called, strict=True) if c]
    in_the_head = [r for r, c in zip(right, called, strict=True) if not c]
    assert 0.3 <= sum(called) / len(called) <= 0.7
    assert 0.25 <= sum(with_tool) / len(with_tool) <= 0.7
    assert sum(in_the_head) / len(in_the_head) <= 0.15


def test_recipe_gives_the_same_files_for_the_same_seed(tmp_path: Path) -> None:
    recipe = ToolsRecipe(num_problems=400, first_steps=3, last_steps=2, batch=4)
    for name in ("first", "second"):
        build(tmp_path / name, recipe)
    assert file_hashes(tmp_path / "first") == file_hashes(tmp_path / "second")
    assert file_hashes(tmp_path / "first")["model.safetensors"] != file_hashes(FOLDER)["model.safetensors"]
