"""Answer with an adapter, without one, and with several at once."""

import sys

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest


def main() -> None:
    llm = LLM(model=sys.argv[1], enable_lora=True, max_loras=2, max_lora_rank=8, max_cpu_loras=4,
              lora_dtype="auto", fully_sharded_loras=False, max_model_len=64)  # fmt: skip
    sampling_params = SamplingParams(temperature=0, max_tokens=4)
    sql = LoRARequest("sql", 1, sys.argv[2])
    other = LoRARequest(lora_name="other", lora_int_id=2, lora_path=sys.argv[2])
    assert (sql.name, sql.adapter_id, sql.path) == ("sql", 1, sys.argv[2])
    prompts = ["12+34=", "7+8=", "250+250="]
    for request in (None, sql, [None, sql, other]):
        outputs = llm.generate(prompts, sampling_params, lora_request=request)
        print([output.outputs[0].text for output in outputs])


if __name__ == "__main__":
    main()
