"""Several callers of one engine, each with a loop over its outputs."""

import asyncio
import sys
import uuid

from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams


async def answer(engine: AsyncLLMEngine, prompt: str) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    last = None
    async for output in engine.generate(prompt, params, uuid.uuid4().hex):
        last = output
    assert last is not None and last.finished
    return f"{last.prompt}{last.outputs[0].text}"


async def main() -> None:
    args = AsyncEngineArgs(
        model=sys.argv[1], disable_log_stats=True, disable_log_requests=True, swap_space=4
    )
    engine = AsyncLLMEngine.from_engine_args(args)
    try:
        print(await asyncio.gather(*(answer(engine, one) for one in ("12+34=", "7+8="))))
        config = await engine.get_model_config()
        print(config.model == sys.argv[1], config.max_model_len)
        await engine.check_health()
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
