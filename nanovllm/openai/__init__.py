"""The messages, requests and responses of OpenAI's API, for chats and completions.

conversation.py     messages, and the prompts that chat templates make of them
tools.py            tools that a model may call
tool_formats/       how models write calls: parsers and grammars
reasoning.py        what a model writes between <think> and </think>
answers.py          an answer divided into reasoning, content and calls, whole or piece by piece
chat_format.py      how one model's answers are written; prompts with what constrains the answers
request.py          what a body asks for
response_format.py  the text or JSON that a body wants
response.py         the body that answers it
chunks.py           the same in chunks, as it comes
logprobs.py         log-probabilities in either
token_bytes.py      the bytes of a token, for logprobs

It knows no engine, files, batches or servers: these put their own envelopes around the bodies.
"""
