"""Print an answer as it comes."""

import asyncio
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    sampling_params = SamplingParams(
        max_tokens=10, temperature=0.0, seed=42, output_kind=RequestOutputKind.DELTA
    )
    print(f"{request_id} {prompt}", end="", flush=True)
    async for output in engine.generate(
        request_id=request_id, prompt=prompt, sampling_params=sampling_params
    ):
        for completion in output.outputs:
            if completion.text:
                print(completion.text, end="", flush=True)
        if output.finished:
            print(" done")
            break


async def main() -> None:
    engine_args = AsyncEngineArgs(model=sys.argv[1], enforce_eager=True, max_model_len=64)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        for i, prompt in enumerate(["12+34=", "7+8="], 1):
            await stream_response(engine, prompt, f"stream-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
