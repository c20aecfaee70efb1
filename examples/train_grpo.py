"""Train a model by reward: sample answers, score them, update the weights, push them to the engine.

The model is the small one that comes with nanovllm and adds numbers. Noise in its weights lets it
forget much of that; sums that are right are rewarded until it adds again. The trainer is PyTorch
with transformers' model, in one process with the engine; on a CPU it takes half a minute::

    python examples/train_grpo.py
"""

import argparse
import json
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems

PROMPTS = 32  # of a step
SAMPLES = 8  # answers to each prompt, which are compared with each other
NOISE = 0.65  # of the weights' deviation
Problem = tuple[str, str]


class Trainer:
    """A policy and its optimizer."""

    def __init__(self, learning_rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
        with torch.no_grad():
            for param in self.model.parameters():
                if param.dim() > 1:
                    param.add_(torch.randn_like(param) * param.std() * NOISE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), learning_rate)

    def step(self, answers: list[tuple[list[int], list[int], float]]) -> None:
        """Make answers with an advantage above 0 likelier, and others less likely.

        An answer is a prompt's tokens, the tokens that were sampled, and its advantage.
        """
        if not answers:
            return
        longest = max(len(prompt) + len(tokens) for prompt, tokens, _ in answers)
        ids = torch.zeros(len(answers), longest, dtype=torch.long)
        weights = torch.zeros(len(answers), longest)
        for row, (prompt, tokens, advantage) in enumerate(answers):
            end = len(prompt) + len(tokens)
            ids[row, :end] = torch.tensor(prompt + tokens)
            weights[row, len(prompt) : end] = advantage / len(tokens)
        logits = self.model(ids).logits  # padding follows, so that no real token attends to it
        likely = log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(likely * weights[:, 1:]).sum() / len(answers)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def reward(text: str, answer: str) -> float:
    """1 for the right sum."""
    return float(text == answer)


def rewards_of(problems: Sequence[Problem], outputs: Sequence[Any]) -> torch.Tensor:
    """The rewards of all samples: [prompts, samples]."""
    return torch.tensor(
        [
            [reward(sample.text, answer) for sample in output.outputs]
            for (_, answer), output in zip(problems, outputs, strict=True)
        ]
    )


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each sample is than the others of its prompt."""
    means, deviations = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    return (rewards - means) / (deviations + 1e-4)


def train(steps: int, learning_rate: float = 3e-4, seed: int = 0) -> list[float]:
    """Train; returns the mean reward of the samples of each step."""
    draw = random.Random(seed)
    problems = sample_problems(2000)
    trainer = Trainer(learning_rate, seed)
    means = []
    with LLM(EMBEDDED_MODEL, dtype="float32", max_model_len=64, num_kvcache_blocks=4096) as llm:
        for step in range(steps):
            llm.update_weights(trainer.model.named_parameters())
            batch = draw.sample(problems, PROMPTS)
            params = SamplingParams(n=SAMPLES, max_tokens=6, seed=step)
            outputs = llm.generate([prompt for prompt, _ in batch], params, use_tqdm=False)
            rewards = rewards_of(batch, outputs)
            means.append(float(rewards.mean()))
            print(json.dumps({"step": step, "reward": round(means[-1], 3)}), flush=True)
            trainer.step(
                [
                    (output["prompt_token_ids"], list(sample.token_ids), advantage)
                    for output, row in zip(outputs, advantages(rewards), strict=True)
                    for sample, advantage in zip(output.outputs, row.tolist(), strict=True)
                    if advantage
                ]
            )
    return means


def main() -> None:
    """Train as many steps as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    args = parser.parse_args()
    train(args.steps, args.learning_rate)


if __name__ == "__main__":
    main()
