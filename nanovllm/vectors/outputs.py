"""The outputs of `embed`, `encode` and `score`: records with vLLM's names."""

from typing import TYPE_CHECKING, Any

from nanovllm.outputs import Record, RequestMetrics

if TYPE_CHECKING:
    import torch


class PooledOutput(Record):
    """The common fields of outputs for prompts without generated tokens.

    `num_cached_tokens` counts the prompt tokens found in the prefix cache on first admission.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """True: only a request that has ended has an output. vLLM's name."""
        return True


class EmbeddingOutput(Record):
    """The vector of one prompt."""

    embedding: list[float]


class EmbeddingRequestOutput(PooledOutput):
    """The result of `embed` for one prompt; `outputs.embedding` is its `embedding`."""

    embedding: list[float]
    outputs: EmbeddingOutput


class PoolingOutput(Record):
    """Hidden states in float32: [hidden], or [tokens, hidden] for all tokens."""

    data: "torch.Tensor"


class PoolingRequestOutput(PooledOutput):
    """The result of `encode` for one prompt."""

    outputs: PoolingOutput


class ScoringOutput(Record):
    """How well a document fits a query: a probability, or a cosine."""

    score: float


class ScoringRequestOutput(PooledOutput):
    """The result of `score` for a query and a document.

    If query and document are computed separately, the tokens are the query's and then the
    document's, and so is their number; the other fields are the document's.
    """

    score: float
    outputs: ScoringOutput


def common_fields(request: Any) -> dict[str, Any]:
    """The fields of `PooledOutput` for a finished request of the engine."""
    seq = request.seqs[0]
    return dict(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_hit_tokens or 0,
        metrics=request.times.metrics(0),
    )
