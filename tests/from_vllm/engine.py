"""Options from the command line; parameters of the model that are changed; requests by step."""

import argparse

from vllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams


def test_prompts() -> list[tuple[str, SamplingParams]]:
    return [
        ("12+34=", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("7+8=", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, seed=1)),
        ("250+250=", SamplingParams(n=2, temperature=0.5, top_p=0.95, frequency_penalty=0.1)),
    ]


def process_requests(engine: LLMEngine, prompts: list[tuple[str, SamplingParams]]) -> None:
    request_id = 0
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, sampling_params = prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for output in request_outputs:
            if output.finished:
                print(output.request_id, output.prompt, len(output.outputs))
            for completion in output.outputs:
                for token_id, logprobs in zip(
                    completion.token_ids, completion.logprobs or [], strict=False
                ):
                    assert token_id in logprobs and logprobs[token_id].rank == 1
                    for other_id, logprob in logprobs.items():
                        assert logprob.logprob <= logprobs[token_id].logprob, other_id


def complete(args: dict) -> None:
    max_tokens = args.pop("max_tokens")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if max_tokens is not None:
        sampling_params.max_tokens = max_tokens
    sampling_params.temperature = 0.0
    for output in llm.generate(["12+34=", "7+8="], sampling_params):
        print(f"Prompt: {output.prompt!r}, generated: {output.outputs[0].text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The classes LLM and LLMEngine")
    engine_group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(engine_group)
    engine_group.set_defaults(max_model_len=64)
    parser.add_argument("--max-tokens", type=int)
    args = parser.parse_args()
    engine_args = EngineArgs.from_cli_args(args)
    process_requests(LLMEngine.from_engine_args(engine_args), test_prompts())
    complete(vars(args))
