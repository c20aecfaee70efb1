"""The request and response bodies of OpenAI's API, for chats and completions.

request.py          what a body asks for
response_format.py  the text or JSON that a body wants
response.py         the body that answers it
chunks.py           the same in chunks, as it comes
logprobs.py         log-probabilities in either
token_bytes.py      the bytes of a token, for logprobs

It knows no engine, files, batches or servers: these put their own envelopes around the bodies.
"""
