"""What `word_problems` asks for: accuracy of the untrained starter policy, with and without hasty answers.

    python -m benchmarks.first_token [PROBLEMS]

A hasty answer of the starter policy begins with `\\boxed`, a careful one with a calculation. Forbidding the first token
of a hasty answer, and nothing else, tells how much of a run's gain that one choice is. Held-out problems, 4 samples
each at temperature 1 and one greedy answer; scored by the product's grader; intervals are 95% over problems.
`benchmarks.skill_task` asks the same of `arithmetic_skill`, and more.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import mean, save
from gxpo_trainer.compare.intervals import Floats
from gxpo_trainer.data.benchmarks import HELD_OUT_SEED
from gxpo_trainer.data.word_problems import generate
from gxpo_trainer.grading.verify import verify
from gxpo_trainer.learner.models import STARTER_FOLDER
from gxpo_trainer.types import Prompt

SAMPLES, BATCH = 4, 256


@torch.inference_mode()
def responses(
    model: Any, tokenizer: Any, texts: list[str], *, temperature: float = 1.0, forbidden: int | None = None,
    forced: str = "",
) -> list[str]:  # fmt: skip
    """One response to each text. forbidden: a token that none begins with. forced: what each begins with.

    temperature 0 is greedy. The longest response is the policy's own `max_new_tokens`.
    """
    chats = [[{"role": "user", "content": text}] for text in texts]
    opened = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    encoded = tokenizer([text + forced for text in opened], add_special_tokens=False, padding=True, return_tensors="pt")
    length = encoded["input_ids"].shape[1]

    def mask(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if forbidden is not None and ids.shape[1] == length:
            scores[:, forbidden] = -torch.inf
        return scores

    greedy = {"do_sample": False}
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(**encoded, **(sampled if temperature else greedy), logits_processor=[mask])
    decoded: list[str] = tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
    return [forced + text for text in decoded]


def graded(model: Any, tokenizer: Any, problems: list[Prompt], samples: int, **mode: Any) -> Floats:
    """Whether each sample is correct: [problems, samples], from the seed 0. mode: as for `responses`."""
    torch.manual_seed(0)
    tried = [prompt for prompt in problems for _ in range(samples)]
    correct: list[bool] = []
    for start in range(0, len(tried), BATCH):
        batch = tried[start : start + BATCH]
        texts = responses(model, tokenizer, [p.text for p in batch], **mode)
        correct += [verify(p.gold, text).status == "correct" for p, text in zip(batch, texts, strict=True)]
    return np.array(correct, dtype=np.float64).reshape(len(problems), samples)


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    tokenizer = AutoTokenizer.from_pretrained(STARTER_FOLDER)
    model: Any = AutoModelForCausalLM.from_pretrained(STARTER_FOLDER)
    problems = generate("heldout", number, HELD_OUT_SEED)
    hasty = tokenizer.encode("\\boxed", add_special_tokens=False)[0]
    figures = []
    for forbidden, answers in ((None, "all answers"), (hasty, "hasty ones forbidden")):
        for temperature, samples, name in ((1.0, SAMPLES, "sampled"), (0.0, 1, "greedy")):
            correct = graded(model, tokenizer, problems, samples, temperature=temperature, forbidden=forbidden)
            figures.append(mean(f"untrained, {answers}, {name}", correct.mean(axis=1)))
    save("first_token", figures, {"problems": number, "samples": SAMPLES, "forbidden": tokenizer.decode([hasty])})


if __name__ == "__main__":
    main()
