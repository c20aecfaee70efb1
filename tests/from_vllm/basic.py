"""Complete a few prompts, and print what an output holds."""

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    prompts = ["12+34=", "7+8=", "250+250=", "999+1="]
    sampling_params = SamplingParams(
        temperature=0.0, top_p=0.95, top_k=-1, max_tokens=8, logprobs=2
    )
    llm = LLM(model=sys.argv[1], dtype="half", trust_remote_code=False, swap_space=0, seed=None,
              max_num_batched_tokens=None, block_size=16, max_model_len=64)  # fmt: skip
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        completion = output.outputs[0]
        assert output.finished
        assert output.prompt_token_ids == tokenizer.encode(output.prompt)
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob <= 0.0
        print(f"{output.prompt}{completion.text} {completion.finish_reason}")

    # Prompts as dicts, a list of parameters, several samples.
    mixed = [
        {"prompt": "12+34="},
        {"prompt_token_ids": tokenizer.encode("7+8=")},
        {"prompt_token_ids": outputs[2].prompt_token_ids, "prompt": outputs[2].prompt},
    ]
    params = [SamplingParams(n=2, temperature=0.5, seed=i, max_tokens=8) for i in range(3)]
    for output in llm.generate(mixed, sampling_params=params, use_tqdm=False):
        texts = [completion.text for completion in output.outputs]
        print(output.request_id, output.prompt, len(texts), [c.index for c in output.outputs])


if __name__ == "__main__":
    main()
