"""Generate completions for a batch of prompts.

python example.py                      # the embedded model, which adds numbers
python example.py ~/models/Qwen3-0.6B  # any Qwen3 model: a directory or a hub id
"""

import sys

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL


def main() -> None:
    """Load a model, complete a batch of prompts, print them."""
    if len(sys.argv) > 1:
        show(sys.argv[1], ["Introduce yourself.", "List all prime numbers within 100."], 256)
    else:
        show(EMBEDDED_MODEL, ["12+34=", "7+8=", "250+250=", "999+1=", "123+456=", "88+913="], 8)


def show(model: str, questions: list[str], max_tokens: int) -> None:
    """Ask `questions` through the model's chat template, and print the answers."""
    with LLM(model) as llm:
        print(llm)
        conversations = [[{"role": "user", "content": question}] for question in questions]
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        for question, output in zip(questions, llm.chat(conversations, params), strict=True):
            print(f"{question}{output['text']}  ({output['finish_reason']})")


if __name__ == "__main__":
    main()
