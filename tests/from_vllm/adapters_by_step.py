"""Requests with and without adapters join a running engine, one at each step."""

import sys

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    greedy = dict(temperature=0.0, logprobs=1, max_tokens=8)
    waiting = [
        ("12+34=", SamplingParams(prompt_logprobs=1, **greedy), None),
        (
            "250+250=",
            SamplingParams(stop_token_ids=[9], **greedy),
            LoRARequest("a", 1, sys.argv[2]),
        ),
        ("7+8=", SamplingParams(**greedy), None),
        ("1+1=", SamplingParams(**greedy), LoRARequest("b", 2, sys.argv[2])),
    ]
    args = EngineArgs(model=sys.argv[1], enable_lora=True, max_loras=1, max_lora_rank=8,
                      max_cpu_loras=2, max_num_seqs=256, max_model_len=64)  # fmt: skip
    engine, number = LLMEngine.from_engine_args(args), 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            prompt, params, adapter = waiting.pop(0)
            engine.add_request(str(number), prompt, params, lora_request=adapter)
            number += 1
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                print(output.request_id, output.outputs[0].text)


if __name__ == "__main__":
    main()
