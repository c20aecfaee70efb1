"""Ask several questions about one long text, with and without prefix caching."""

import sys

from vllm import LLM, SamplingParams

TEXT = "".join(f"{number}+{number}={2 * number}\n" for number in range(1, 40))
QUESTIONS = ["12+34=", "7+8=", "250+250="]


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6)
    answers = []
    for caches in (False, True):
        llm = LLM(model=sys.argv[1], enable_prefix_caching=caches, block_size=16)
        llm.generate(TEXT + QUESTIONS[0], params)  # fills the cache
        outputs = llm.generate([TEXT + question for question in QUESTIONS], params)
        answers.append([output.outputs[0].text for output in outputs])
        print(caches, [output.num_cached_tokens > 100 for output in outputs])
        del llm
    print("equal" if answers[0] == answers[1] else answers)


if __name__ == "__main__":
    main()
