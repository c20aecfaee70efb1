"""Talk to a model: one conversation, then a batch of them, then with another template."""

import sys

from vllm import LLM, SamplingParams


def show(outputs) -> None:
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
    print("-" * 40)


def main() -> None:
    llm = LLM(model=sys.argv[1], enforce_eager=True)
    sampling_params = llm.get_default_sampling_params()
    assert sampling_params.max_tokens
    sampling_params = SamplingParams(max_tokens=8, temperature=0)
    conversation = [
        {"role": "system", "content": "You add numbers."},
        {"role": "user", "content": "1+1="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "12+34="}]},
    ]
    show(llm.chat(conversation, sampling_params, use_tqdm=False))
    show(llm.chat([conversation[-1:]] * 3, sampling_params, use_tqdm=True))
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    show(llm.chat(conversation[-1:], sampling_params, use_tqdm=False, chat_template=template,
                  chat_template_kwargs={"enable_thinking": False}))  # fmt: skip


if __name__ == "__main__":
    main()
