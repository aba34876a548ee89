"""What the embedded task asks for: accuracy of the untrained starter policy, with and without hasty answers.

    python -m benchmarks.first_token [PROBLEMS]

A hasty answer of the starter policy begins with `\\boxed`, a careful one with a calculation. Forbidding the first token
of a hasty answer, and nothing else, tells how much of a run's gain that one choice is. Held-out problems, 4 samples
each at temperature 1 and one greedy answer; scored by the product's grader; intervals are 95% over problems.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import Figure, save
from gxpo_trainer.data.benchmarks import HELD_OUT_SEED
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.grading.verify import verify
from gxpo_trainer.learner.models import STARTER_FOLDER

SAMPLES, MAX_NEW_TOKENS, BATCH = 4, 48, 256


@torch.inference_mode()
def responses(model: Any, tokenizer: Any, texts: list[str], *, greedy: bool, forbidden: int | None) -> list[str]:
    """One response to each text, each first token drawn without `forbidden`."""
    chats = [[{"role": "user", "content": text}] for text in texts]
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    length = encoded["input_ids"].shape[1]

    def mask(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if forbidden is not None and ids.shape[1] == length:
            scores[:, forbidden] = -torch.inf
        return scores

    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    out = model.generate(**encoded, **options, max_new_tokens=MAX_NEW_TOKENS, logits_processor=[mask])
    decoded: list[str] = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
    return decoded


def accuracy(name: str, correct: np.ndarray) -> Figure:
    """Mean of bool[problems, samples] with a bootstrap interval over problems."""
    per_problem = correct.mean(axis=1)
    draws = np.random.default_rng(0).choice(per_problem, (2000, len(per_problem))).mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return Figure(name, float(per_problem.mean()), float(low), float(high), "")


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    tokenizer = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    model: Any = AutoModelForCausalLM.from_pretrained(STARTER_FOLDER)
    problems = [problem.prompt for problem in generate("heldout", number, HELD_OUT_SEED)]
    hasty = tokenizer.encode("\\boxed", add_special_tokens=False)[0]
    figures = []
    for forbidden, answers in ((None, "all answers"), (hasty, "hasty ones forbidden")):
        for greedy in (False, True):
            torch.manual_seed(0)
            tried = [prompt for prompt in problems for _ in range(1 if greedy else SAMPLES)]
            correct: list[bool] = []
            for start in range(0, len(tried), BATCH):
                batch = tried[start : start + BATCH]
                texts = responses(model, tokenizer, [p.text for p in batch], greedy=greedy, forbidden=forbidden)
                correct += [verify(p.gold, text).status == "correct" for p, text in zip(batch, texts, strict=True)]
            name = f"untrained, {answers}, {'greedy' if greedy else 'sampled'}"
            figures.append(accuracy(name, np.array(correct).reshape(number, -1)))
    save("first_token", figures, {"problems": number, "samples": SAMPLES, "forbidden": tokenizer.decode([hasty])})


if __name__ == "__main__":
    main()
