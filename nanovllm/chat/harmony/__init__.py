"""Harmony, the format of gpt-oss: an answer is messages, each with a header and a channel.

marked_text.py  an answer's text, divided at its special tokens
header.py       the header of a message: author, recipient, channel
reader.py       messages as reasoning, content and calls, whole or piece by piece
opening.py      where in a message the prompt ends
grammar.py      constraints: of the final channel, of calls
history.py      conversations and tools as gpt-oss's chat template reads them
turns.py        which chats use the format; the parameters and the format of their answers

A message is `<|start|>AUTHOR to=RECIPIENT<|channel|>CHANNEL TYPE<|message|>BODY<|end|>`. Instead of
`<|end|>`, `<|return|>` ends the last message, and `<|call|>` one that calls a function. The prompt
ends with `<|start|>assistant`, so an answer begins with the rest of a header.

The parser is our own. The package openai-harmony downloads a vocabulary when it makes its encoding,
reads tokens of that vocabulary alone, and stops with an error at a header that is not well-formed;
this parser works with the checkpoint's own tokenizer, without a network, and reads any answer. It
takes text and tokens together: the tokens say which markers are real, the text where a stop string
has cut it.
"""
