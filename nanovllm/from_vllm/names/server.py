"""vLLM's names of options of its server that are not options here.

As in `options`, they accept only values that ask for what is done anyway. The options
of the engine, which vLLM's server takes too, are there.
"""

from nanovllm.utils.other_names import OtherName

PROXY = "a proxy in front of the server can do it"
CORS = "see `cors_origin`"

SERVER = {
    "allowed_origins": OtherName((), CORS),
    "allow_credentials": OtherName((False,), CORS),
    "allowed_methods": OtherName((), CORS),
    "allowed_headers": OtherName((), CORS),
    "uvicorn_log_level": OtherName((), "the log has a line for each request; see --verbose"),
    "disable_uvicorn_access_log": OtherName((False,), "send stderr to a file, or to /dev/null"),
    "disable_access_log_for_endpoints": OtherName(
        (), "/health, /metrics and other paths that are polled are not logged"
    ),
    "log_config_file": OtherName((None,), "the log goes to stderr"),
    "log_error_stack": OtherName((True, False), "tracebacks of internal errors are logged"),
    "max_log_len": OtherName((), "prompts and texts are never logged"),
    "enable_log_requests": OtherName((False,), "prompts and texts are never logged"),
    "enable_log_outputs": OtherName((False,), "prompts and texts are never logged"),
    "enable_log_deltas": OtherName((False,), "prompts and texts are never logged"),
    "chat_template": OtherName(
        (None,), "put a chat_template.jinja into the directory of the model or of `tokenizer`"
    ),
    "chat_template_content_format": OtherName(("auto",), "the template decides"),
    "default_chat_template_kwargs": OtherName(
        (None, {}), "requests have `chat_template_kwargs`"
    ),
    "response_role": OtherName(("assistant",), "answers have the role assistant"),
    "return_tokens_as_token_ids": OtherName((False,), "log-probabilities have the texts of tokens"),
    "exclude_tools_when_tool_choice_none": OtherName((False,), "leave `tools` out of the request"),
    "tool_parser_plugin": OtherName((None, ""), "see `tool_parser`"),
    "tool_server": OtherName((None,), "the client calls the tools"),
    "ssl_ca_certs": OtherName((None,), f"certificates of clients are not read; {PROXY}"),
    "ssl_cert_reqs": OtherName((0,), f"certificates of clients are not read; {PROXY}"),
    "enable_ssl_refresh": OtherName((False,), "start the server again with the new certificate"),
    "middleware": OtherName(((), None), PROXY),
    "disable_fastapi_docs": OtherName((False,), "/docs shows what /openapi.json describes"),
    "enable_offline_docs": OtherName((True, False), "/docs needs no other site"),
    "enable_server_load_tracking": OtherName((True, False), "/load always answers"),
    "enable_request_id_headers": OtherName((True,), "responses always have an X-Request-Id"),
    "enable_prompt_tokens_details": OtherName((True,), "usage always has the cached tokens"),
    "enable_force_include_usage": OtherName((False,), "clients ask with `stream_options`"),
    "enable_tokenizer_info_endpoint": OtherName((True, False), "/tokenizer_info always answers"),
    "disable_frontend_multiprocessing": OtherName(
        (False,), "the engine always has a process of its own"
    ),
    "h11_max_incomplete_event_size": OtherName((), "see `max_header_kib`"),
    "h11_max_header_count": OtherName((), "see `max_headers`"),
    "api_server_count": OtherName((1, None), "nanovllm.ray serves from several processes"),
    "generation_config": OtherName(
        ("auto",), "requests get what the model recommends, unless the command has the parameter"
    ),
    "headless": OtherName((False,), "nanovllm.ray runs engines on several machines"),
    "config": OtherName((None,), "give the options on the command line"),
    "tokens_only": OtherName((False,), "completions take token ids"),
}  # fmt: skip
SHORT = {  # flags of the engine and of the server
    "-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size",
    "-q": "quantization", "-asc": "api_server_count",
}  # fmt: skip
