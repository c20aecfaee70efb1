"""Limits: the options of a server that bound what a connection, a client or a request may use."""

from dataclasses import dataclass

from nanovllm.config import MAX_WAITING
from nanovllm.structured_outputs import GRAMMAR_SECONDS
from nanovllm.utils.option import NOTHING, float_range, int_range, option

COST = 16  # how many values a list or an object counts as, because of its memory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Each refusal names its option; docs/serving.md explains them."""

    max_waiting: int = option(
        MAX_WAITING,
        "most samples that wait, in addition to those that run; the next get status 429",
        int_range(0),
    )
    timeout: float | None = option(
        None, "seconds after which a request is aborted", float_range(0.0, above=True), none=NOTHING
    )
    max_body_mib: int = option(
        16, "largest body of a request in MiB; a larger one gets status 413", int_range(1)
    )
    max_body_values: int = option(
        1 << 21,
        "most values in the JSON of a body, where a list or an object counts as sixteen; a body"
        " with more gets status 413",
        int_range(1),
    )
    max_body_depth: int = option(
        128, "most lists and objects in one another in the JSON of a body", int_range(1)
    )
    max_tokenize_chars: int = option(
        1 << 22,
        "most characters of a text or a chat for `/tokenize`, and of a prompt with"
        " `truncate_prompt_tokens`",
        int_range(1),
    )
    max_inputs: int = option(
        2048, "most inputs of an embedding, and most queries and documents to score", int_range(1)
    )
    max_state_numbers: int = option(
        1 << 24,
        "most numbers of the hidden states in an answer of `/pooling`: the tokens of all inputs"
        " times the model's hidden size",
        int_range(1),
    )
    max_logprobs: int = option(
        20,
        "most that `logprobs`, `top_logprobs` and `prompt_logprobs` of a request may be: an answer"
        " has this many for each token",
        int_range(0),
    )
    max_grammar_kib: int = option(
        256, "largest `structured_outputs` or `response_format` of a request in KiB", int_range(1)
    )
    grammar_seconds: float = option(
        GRAMMAR_SECONDS,
        "seconds that a request waits for its `structured_outputs` to be compiled",
        float_range(0.0, above=True),
    )
    max_bad_words: int = option(10_000, "most texts in `bad_words` of a request", int_range(1))
    max_stops: int = option(64, "most texts in `stop` of a request", int_range(1))
    max_stop_chars: int = option(
        4096, "most characters of all texts in `stop` of a request", int_range(1)
    )
    max_connections: int = option(
        8192, "most connections at a time; the next get status 503", int_range(1)
    )
    max_header_kib: int = option(
        64, "most KiB of the headers of a request; more get status 431", int_range(1)
    )
    max_headers: int = option(200, "most headers of a request; more get status 431", int_range(1))
    request_seconds: float = option(
        60.0,
        "how long a client may take to send a request, or a TLS handshake; a body has one more"
        " second for each KiB. A slower one gets status 408",
        float_range(0.0, above=True),
    )
    unread_seconds: float = option(
        300.0,
        "how long a client may read nothing of an answer; then its connection is closed",
        float_range(0.0, above=True),
    )
    max_request_tokens: int = option(
        1 << 24,
        "most tokens that a request may ask for: its prompts times `n` times `max_tokens`; one"
        " sample of a prompt may always have as many as `max_model_len` leaves",
        int_range(1),
    )
    max_responses: int = option(
        1024,
        "most responses of `/v1/responses` that are kept in memory for `previous_response_id`; the"
        " one that was not used for longest is dropped. 0 keeps none",
        int_range(0),
    )
    max_responses_mib: int = option(
        64, "most MiB of the responses that are kept, with their conversations", int_range(1)
    )
    max_client_requests: int | None = option(
        None,
        "most requests of a client that are answered at a time; the next get status 429. A client"
        " is an API key, or an address if no key is needed",
        int_range(1),
        none="no limit",
    )
    max_client_samples: int | None = option(
        None,
        "most samples of a client that run or wait; an input of an embedding or a score is one",
        int_range(1),
        none="no limit",
    )
