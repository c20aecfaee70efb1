"""An engine in a notebook or a server, where an event loop runs."""

import asyncio

import pytest
from reference import make_llm

from nanovllm import SamplingParams
from nanovllm.embedded import EMBEDDED_MODEL

pytestmark = pytest.mark.usefixtures("two_threads")


def test_an_engine_works_beside_an_event_loop() -> None:
    """Used in a coroutine, and in a thread while the loop runs."""
    greedy = SamplingParams(temperature=0, max_tokens=8)

    async def use() -> list[str]:
        with make_llm(EMBEDDED_MODEL, max_model_len=64) as llm:
            (here,) = llm.generate("12+34=", greedy)
            (there,), _ = await asyncio.gather(
                asyncio.to_thread(llm.generate, "7+8=", greedy), asyncio.sleep(0)
            )
            last = "".join(event["text"] for event in llm.stream("1+1=", greedy))
        return [here["text"], there["text"], last]

    assert asyncio.run(use()) == ["46", "15", "2"]
