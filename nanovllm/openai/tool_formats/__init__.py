"""The formats in which models write tool calls: how each is read, and the grammar that makes one.

source.py       text that comes in pieces
json_reader.py  JSON in such text
base.py         what a format is, and the parts of a call
hermes.py  llama3_json.py  mistral.py
lark.py         pieces of grammars in llguidance's Lark
table.py        all formats by name, and which of them a chat template shows
parser.py       content and calls of a text, whole or piece by piece
"""
