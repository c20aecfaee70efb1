"""The records of a batch's output: OpenAI's batch output, a line of JSON for each request.

A record's `id` holds the number of the input's line. A job that is restarted reads from it which
lines are done.
"""

import json
from typing import Any

from nanovllm.llm import LLM
from nanovllm.openai.request import APIRequest
from nanovllm.openai.response import response_body
from nanovllm.outputs import RequestOutput

ID = "batch_req_"
START = f'{{"id": "{ID}'.encode()  # of every record


def result_record(
    number: int, custom_id: str, request: APIRequest, output: RequestOutput, llm: LLM
) -> bytes:
    """The record of a line that `llm` has answered."""
    body = response_body(str(number), request, output, llm)
    response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
    return _record(number, custom_id, response, None)


def error_record(number: int, custom_id: str, message: str) -> bytes:
    """The record of a line that cannot be answered."""
    error = {"code": "invalid_request", "message": f"line {number}: {message}", "line": number}
    return _record(number, custom_id, None, error)


def _record(number: int, custom_id: str, response: Any, error: Any) -> bytes:
    record = dict(id=f"{ID}{number}", custom_id=custom_id, response=response, error=error)
    return json.dumps(record).encode() + b"\n"
