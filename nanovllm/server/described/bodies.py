"""What each path takes, for its description: the names that its parser knows.

A path of the application that is missing here is described without the fields of its body.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nanovllm.from_vllm.names.fields import EMBEDDING, SCORING
from nanovllm.openai.field_kinds import Kind
from nanovllm.openai.fields import CHAT, COMPLETIONS, KINDS, KNOWN, OTHERS
from nanovllm.openai.pooling import POOLING, POOLING_FIELDS, POOLING_KINDS
from nanovllm.openai.vectors import (
    EMBED_FIELDS,
    EMBED_KINDS,
    EMBEDDINGS,
    OTHER_NAMES,
    RERANK,
    RERANK_FIELDS,
    RERANK_KINDS,
    SCORE,
    SCORE_FIELDS,
    SCORE_KINDS,
)
from nanovllm.server.adapters import KINDS as ADAPTER_KINDS
from nanovllm.server.adapters import LOAD_FIELDS, UNLOAD_FIELDS
from nanovllm.server.messages.errors import PATH as MESSAGES
from nanovllm.server.messages.request import COUNTED
from nanovllm.server.messages.request import KINDS as MESSAGES_KINDS
from nanovllm.server.messages.request import KNOWN as MESSAGES_NAMES
from nanovllm.server.responses.endpoints import RESPONSES
from nanovllm.server.responses.request import KINDS as RESPONSES_KINDS
from nanovllm.server.responses.request import KNOWN as RESPONSES_NAMES
from nanovllm.server.tokens import IDS_FIELDS, TEXT_FIELDS
from nanovllm.server.tokens import KINDS as TOKENS_KINDS
from nanovllm.utils.other_names import OtherName

ALSO = ("model", "user")  # in every body that `given_fields` reads


@dataclass(frozen=True)
class Body:
    """The names in a path's body, or in its query; and what the path does.

    `kinds` are those by which the parser checks the fields, and `others` are fields with few
    values, which change nothing.
    """

    says: str
    names: Collection[str] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    streams: bool = False
    query: tuple[str, ...] = ()
    others: Mapping[str, OtherName] = field(default_factory=dict)


CHAT_NAMES = tuple(KNOWN[CHAT])
SCORE_NAMES = (*OTHER_NAMES, *OTHER_NAMES.values(), *SCORE_FIELDS, *ALSO)
RERANK_NAMES = (*RERANK_FIELDS, *SCORE_FIELDS, *ALSO)
EMBED_NAMES = ("input", *EMBED_FIELDS, *ALSO)

BODIES: dict[str, Body] = {
    CHAT: Body("Answer a chat.", CHAT_NAMES, KINDS[CHAT], ("messages",), streams=True,
               others=OTHERS[CHAT]),
    COMPLETIONS: Body("Complete prompts.", tuple(KNOWN[COMPLETIONS]), KINDS[COMPLETIONS],
                      ("prompt",), streams=True, others=OTHERS[COMPLETIONS]),
    RESPONSES: Body("Respond to items, or to a text.", RESPONSES_NAMES, RESPONSES_KINDS,
                    ("input",), streams=True),
    MESSAGES: Body("Answer messages.", MESSAGES_NAMES, MESSAGES_KINDS, ("messages", "max_tokens"),
                   streams=True),
    f"{MESSAGES}/count_tokens": Body("Count the tokens of messages.", COUNTED, MESSAGES_KINDS,
                                     ("messages",)),
    EMBEDDINGS: Body("Vectors of inputs.", EMBED_NAMES, EMBED_KINDS, ("input",), others=EMBEDDING),
    POOLING: Body("Vectors of inputs, or states of their tokens.", (*POOLING_FIELDS, *ALSO),
                  POOLING_KINDS, ("input",), others=EMBEDDING),
    **{url: Body("How well documents fit queries.", SCORE_NAMES, SCORE_KINDS, others=SCORING)
       for url in SCORE},
    **{url: Body("Documents by how well they fit a query.", RERANK_NAMES, RERANK_KINDS,
                 ("query", "documents"), others=SCORING) for url in RERANK},
    "/tokenize": Body("The token ids of a prompt, or of the prompt of messages.",
                      dict.fromkeys((*TEXT_FIELDS, *CHAT_NAMES, *ALSO)),
                      {**KINDS[CHAT], **TOKENS_KINDS}, others=OTHERS[CHAT]),
    "/detokenize": Body("The text of tokens.", (*IDS_FIELDS, *ALSO), TOKENS_KINDS, ("tokens",)),
    "/v1/load_lora_adapter": Body("Offer an adapter.", LOAD_FIELDS, ADAPTER_KINDS,
                                  ("lora_name", "lora_path")),
    "/v1/unload_lora_adapter": Body("Stop offering an adapter.", UNLOAD_FIELDS, ADAPTER_KINDS,
                                    ("lora_name",)),
    "/sleep": Body("Free the engine's memory.", query=("level", "running")),
    "/wake_up": Body("Get the engine's memory back.", query=("tags",)),
    "/reload_weights": Body("Load the checkpoint again.", query=("running",)),
}  # fmt: skip
