"""Loggers in many processes."""

import logging

import pytest

from orc.runtime import Accelerator, MultiProcessAdapter, get_logger


@pytest.mark.distributed
def test_only_the_main_process_speaks_unless_told_otherwise(run_ranks, tmp_path):
    def body(path):
        logging.basicConfig(filename=path, format="%(message)s", level="DEBUG")
        logger = get_logger("train", log_level="DEBUG")
        rank = Accelerator().process_index
        logger.info("main %d", rank)
        for turn in range(3):
            logger.debug("turn %d rank %d", turn, rank, main_process_only=False, in_order=True)
        logger.debug("all", main_process_only=False)

    run_ranks(2, body, tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[:7] == ["main 0", *(f"turn {turn} rank {rank}" for turn in range(3) for rank in range(2))]
    assert lines[7:] == ["all", "all"]


@pytest.mark.distributed
def test_a_logger_knows_the_rank_before_the_processes_meet(run_ranks, tmp_path):
    def body(path):
        import torch.distributed as dist

        logging.basicConfig(filename=path, format="%(message)s", level="INFO")
        get_logger("early").warning("once")
        return dist.is_initialized()

    assert run_ranks(2, body, tmp_path / "log") == [False, False]
    assert (tmp_path / "log").read_text() == "once\n"


def test_the_level_comes_from_argument_or_environment(monkeypatch):
    root_level = logging.root.level
    try:
        monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "error")
        assert get_logger("by.environment").logger.level == logging.ERROR
        assert get_logger("by.argument", log_level="DEBUG").logger.level == logging.DEBUG
        with pytest.raises(ValueError, match="log_level = 'LOUD': expected one of DEBUG, INFO"):
            get_logger("x", log_level="LOUD")
    finally:
        logging.root.setLevel(root_level)


def test_the_place_of_the_call_is_logged(caplog):
    logger = get_logger("place")
    logger.warning("here")
    logger.warning("here", main_process_only=False, in_order=True)
    logger.log(logging.WARNING, "here")
    logger.warning_once("here")
    assert [(record.filename, record.funcName) for record in caplog.records] == [
        ("test_logging.py", "test_the_place_of_the_call_is_logged")
    ] * 4


def test_warning_once(caplog):
    logger = get_logger("once")
    for _ in range(3):
        logger.warning_once("careful")
        logger.warning_once("careful %s", "you")
    assert [record.message for record in caplog.records] == ["careful", "careful you"]


def test_an_adapter_adds_its_fields_to_those_of_the_call(caplog):
    logger = MultiProcessAdapter(logging.getLogger("fields"), {"job": "j1"})
    logger.warning("here", extra={"step": 3})
    assert (caplog.records[0].job, caplog.records[0].step) == ("j1", 3)


def test_exceptions_come_with_their_traceback(caplog):
    try:
        raise KeyError("mine")
    except KeyError:
        get_logger("exceptions").exception("failed", main_process_only=False)
    assert "KeyError: 'mine'" in caplog.text
