"""Chats: how models write conversations, tool calls and reasoning, and how answers are parsed.

conversation.py  messages, and the prompts that chat templates make of them
tools.py         tools that a model may call
tool_formats/    how models write calls: parsers and grammars
reasoning.py     what a model writes between <think> and </think>
answers.py       an answer divided into reasoning, content and calls, whole or piece by piece
chat_format.py   how one model writes answers; prompts with constraints for the answers

Messages have the form of OpenAI's API. Nothing here runs a model.
"""
