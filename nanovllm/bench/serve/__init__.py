"""Measure a server with OpenAI's API: send it requests, and date what it streams.

options.py    which requests are sent, and when
prompts.py    random prompts, and the lines of a file
arrivals.py   the times at which requests are sent
response.py   reads a response of HTTP/1.1
events.py     reads server-sent events
client.py     requests on connections that are kept
server.py     requests to the server that are not measured
answer.py     the times and tokens of one answer
run.py        sends the requests of a run
summary.py    figures of a run
plot.py       a picture of a run

Nothing here needs PyTorch, a model or a library for HTTP.
"""
