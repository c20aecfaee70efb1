"""An HTTP server with OpenAI's API: Starlette in front of an AsyncLLM.

options.py   what the command line can set
app.py       the routes, and what is common to all of them
adapters.py  the names that a body's model may have: the model's, and those of adapters
answering.py chats and completions, whole and streamed
bodies.py    reading a request's body
errors.py    errors as OpenAI's API writes them
guard.py     keys, draining, and the line in the log of each request
limits.py    the options that bound what one client may ask for
refusals.py  refusing what is over these limits
metrics.py   the engine's metrics in Prometheus's format
tokens.py    /tokenize and /detokenize
serve.py     the life of the process: start, signals, the end

The formats of bodies are those of nanovllm.openai.
"""
