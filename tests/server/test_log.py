"""What a server writes about its engine, which is another process."""

import logging
from pathlib import Path

import pytest
from servers import serving

from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.utils.log import log_to_stderr

SMALL = ("--num-kvcache-blocks", "10")
WARNING = "nanovllm: max_model_len is 160, which the KV pool can hold"
NOTE = "nanovllm: KV cache in float32: 160 tokens"


def test_verbose_servers_log_what_their_engine_does(tmp_path: Path) -> None:
    with serving(tmp_path / "log", EMBEDDED_MODEL, "--verbose", *SMALL) as server:
        assert WARNING in server.text and NOTE in server.text


def test_other_servers_log_warnings_of_their_engine(tmp_path: Path) -> None:
    with serving(tmp_path / "log", EMBEDDED_MODEL, *SMALL) as server:
        assert WARNING in server.text and "KV cache in" not in server.text


def test_what_the_package_logs_begins_with_its_name(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    log_to_stderr(logging.WARNING)
    logger.info("not this")
    logging.getLogger("nanovllm.engine").warning("but this")
    assert capsys.readouterr().err == "nanovllm: but this\n"
