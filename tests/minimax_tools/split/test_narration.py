from __future__ import annotations

import io
import logging

import pytest

from minimax_tools.split.factory import logging_to_stderr

logger = logging.getLogger("minimax_tools.split.tests")
package = logging.getLogger("minimax_tools")


def test_messages_show_on_stderr_while_the_block_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to_stderr(True):
        logger.info("loading")
    logger.info("over")
    assert capsys.readouterr() == ("", "loading\n")


def test_what_is_shown_already_is_not_shown_twice(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    package.handlers[:] = [logging.StreamHandler(stream)]
    package.setLevel(logging.INFO)
    with logging_to_stderr(True):
        logger.info("loading")
    assert stream.getvalue() == "loading\n"
    assert capsys.readouterr() == ("", "")
