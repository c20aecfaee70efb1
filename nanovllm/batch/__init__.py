"""Batch jobs: JSON Lines of requests in, JSON Lines of results out, as OpenAI's batches have them.

lines.py        an input's lines, one at a time, however large it is
request.py      what a line asks for
submit.py       its way into an engine
response.py     what a result looks like
token_bytes.py  what bytes a token stands for
journal.py      the output file: which lines are done, and what is done stays
job.py          the loop that keeps an engine busy with them

A job can be ended at any time, and begun again: it repeats nothing, and loses nothing.
"""
