"""Complete many prompts at once, with stops and limits, and write the results as JSON Lines."""

import json
import sys
import time

from vllm import LLM, RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt


def record(output: RequestOutput) -> str:
    completion = output.outputs[0]
    return json.dumps({
        "id": output.request_id, "prompt": output.prompt, "text": completion.text,
        "tokens": len(completion.token_ids), "reason": completion.finish_reason,
        "stop": completion.stop_reason, "cached": output.num_cached_tokens,
    })  # fmt: skip


def main() -> None:
    llm = LLM(model=sys.argv[1], max_num_seqs=64, enable_chunked_prefill=True,
              disable_log_stats=True, tensor_parallel_size=1)  # fmt: skip
    tokenizer = llm.get_tokenizer()
    texts = [f"{a}+{b}=" for a in range(10, 30) for b in range(5)]
    prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(text), prompt=text) for text in texts]
    sampling_params = SamplingParams(
        temperature=0, max_tokens=12, min_tokens=1, stop=["\n"], detokenize=True,
        stop_token_ids=[tokenizer.eos_token_id], include_stop_str_in_output=False,
        skip_special_tokens=True, spaces_between_special_tokens=True, truncate_prompt_tokens=None,
        logits_processors=None,
    )  # fmt: skip
    start = time.time()
    outputs = llm.generate(prompts, sampling_params, use_tqdm=True)
    for output in outputs:
        print(record(output))
    total = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    print(f"{total / (time.time() - start):.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
