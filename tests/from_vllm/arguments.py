"""Chats by the options of a command line, which are the LLM's keywords."""

import argparse

from vllm import LLM, EngineArgs


def main() -> None:
    parser = argparse.ArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="none", runner="auto", enforce_eager=True)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    args = vars(parser.parse_args())
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if temperature is not None:
        params.temperature = temperature
    conversation = [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "7+8="},
    ]
    for conversations in (conversation, [conversation] * 2):
        outputs = llm.chat(
            conversations, params, use_tqdm=False, chat_template_content_format="auto"
        )
        print([output.outputs[0].text for output in outputs])


if __name__ == "__main__":
    main()
