"""Generate completions for a batch of prompts.

python example.py                      # a tiny embedded model, then SmolLM2 of the package index
python example.py ~/models/Qwen3-0.6B  # any model: a directory, a GGUF file or a hub id
"""

import sys

from nanovllm import LLM, SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL

SUMS = ["12+34=", "7+8=", "250+250=", "999+1=", "123+456=", "88+913="]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    """Load a model or two, complete a batch of prompts, print them."""
    free = SamplingParams(temperature=0, max_tokens=256)
    if len(sys.argv) > 1:
        questions = ["Introduce yourself.", "List all prime numbers within 100."]
        show(sys.argv[1], dict.fromkeys(questions, free))
        return
    show(EMBEDDED_MODEL, dict.fromkeys(SUMS, free))
    json = SamplingParams(temperature=0, max_tokens=64, structured_outputs={"json": PERSON})
    questions = {
        "What is the capital of France?": free,
        "Write a haiku about the sea.": free,
        "Write the person as JSON: Anna is 31 years old and lives in Rome.": json,
    }
    try:
        show("smollm2", questions)
    except OSError as error:  # the first time, 93 MB are downloaded
        print(f"SmolLM2 is left out: {error}")


def show(model: str, questions: dict[str, SamplingParams]) -> None:
    """Ask questions through the model's chat template, and print the answers."""
    with LLM(model) as llm:
        print(llm)
        conversations = [[{"role": "user", "content": question}] for question in questions]
        outputs = llm.chat(conversations, [*questions.values()])
        for question, output in zip(questions, outputs, strict=True):
            between = "" if question.endswith("=") else "\n  "
            answer = output["text"].replace("\n", "\n  ")
            print(f"{question}{between}{answer}  ({output['finish_reason']})")


if __name__ == "__main__":
    main()
