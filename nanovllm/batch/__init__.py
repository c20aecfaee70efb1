"""Batch jobs in the format of OpenAI's: JSON Lines of requests in, JSON Lines of results out.

lines.py     read an input of any size line by line
envelope.py  parse a line
submit.py    queue a line's request in an engine
records.py   the lines of the output
digests.py   64-bit digests of request ids
journal.py   the output file, which also says which lines are done
job.py       the loop that keeps an engine busy

A job that was killed at any moment can be restarted: it repeats nothing and loses nothing.
"""
