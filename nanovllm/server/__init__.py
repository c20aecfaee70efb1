"""An HTTP server with OpenAI's API, and Anthropic's: Starlette in front of an AsyncLLM.

options.py   what the command line can set
app.py       the routes, and what is common to all of them
adapters.py  the names that a body's model may have: the model's, and those of adapters
answering.py chats and completions, whole and streamed
body_parser.py  the requests in their bodies, within the server's limits
generation.py   the outputs of these requests, whole or as events
event_stream.py a response of server-sent events
answered.py  answering with the result of work that ends when its client leaves
chats/       chats for APIs that write them in their own forms:
responses/   OpenAI's Responses API
messages/    Anthropic's Messages API
clients.py   counting what each client has at a time
bodies.py    reading a request's body
errors.py    errors as OpenAI's API writes them
limits.py    the options that bound what one client may ask for
refusals.py  refusing what is over these limits
guard.py     hosts, keys, draining, and the line in the log of each request
metrics.py   the engine's metrics in Prometheus's format
tokens.py    /tokenize and /detokenize
vectors.py   /v1/embeddings, /score and /rerank
pooling.py   /pooling and /classify
state.py     /ping, /load and /server_info
described/   /openapi.json and /docs
serve.py     the life of the process: start, signals, the end
http_server.py  listening: uvicorn's server, with connections of our own
connection.py   the requests of a client: their order, and the time that they may take
request_parser.py  the requests in a client's bytes, and limits on all that is not a body
exchange.py  one request and its response, for the application
wire.py      writing to a client that may not read, or may leave

The formats of bodies are those of nanovllm.openai.
"""
