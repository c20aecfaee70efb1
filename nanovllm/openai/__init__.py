"""The request and response bodies of OpenAI's API, for chats and completions.

request.py          parses the body of a request
response_format.py  the form of the answer: text or JSON
response.py         the body that answers a request
chunks.py           the same in chunks, for streams
logprobs.py         log-probabilities for both
token_bytes.py      the bytes of a token, for logprobs

It knows no engine, files, batches or servers: these put their own envelopes around the bodies.
"""
