"""The last events of a request that another call has aborted; that call has its output."""

from nanovllm.outputs import StreamEvent


def last_events(
    index: int, reported: list[tuple[int, int] | None], request_id: int
) -> list[StreamEvent]:
    """An event for each sample of the prompt at `index` that has not ended in its stream."""
    return [
        StreamEvent(
            index=index, sample=sample, request_id=request_id, text="", token_ids=[],
            finish_reason="abort", stop_reason=None, logprobs=None,
        )
        for sample, place in enumerate(reported)
        if place is not None
    ]  # fmt: skip
