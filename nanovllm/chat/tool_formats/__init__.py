"""The formats in which models write tool calls: a reader and a grammar for each.

source.py          text that comes in pieces
base.py            what a format is, and the parts of a call
json_reader.py     JSON in such text
literal_reader.py  literals of Python in such text, read as JSON
hermes.py  llama3_json.py  mistral.py  pythonic.py  qwen3_coder.py
parameters.py      a tool's parameters one by one, for the last two
lark.py            pieces of grammars in llguidance's Lark
text_terminal.py   strings without quotes in such grammars
table.py           all formats by name; finds the format of a chat template
parser.py          content and calls of a text, whole or piece by piece
"""
