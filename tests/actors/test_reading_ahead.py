"""The next step's tokens are read while this one runs: the right ones, whatever step comes."""

import threading

import pytest

from braid.actors.stage.reading_ahead import ReadingAhead


def test_the_next_one_is_read_before_it_is_asked_for() -> None:
    readers: dict[int, str] = {}
    read = threading.Event()

    def tokens(step: int) -> int:
        readers[step] = threading.current_thread().name
        read.set()
        return step * 10

    ahead = ReadingAhead(tokens)
    assert ahead.of(0) == 0
    while 1 not in readers:
        assert read.wait(10.0)
    assert [ahead.of(1), ahead.of(2)] == [10, 20]
    assert readers[0] == threading.current_thread().name
    assert all(readers[step].startswith("reading") for step in (1, 2))
    assert ahead.of(1) == 10, "a step is repeated"
    assert ahead.of(7) == 70, "a run goes on elsewhere"
    ahead.close()


def test_what_goes_wrong_comes_with_its_step() -> None:
    def tokens(step: int) -> int:
        if step == 1:
            raise OSError("the disk is gone")
        return step

    ahead = ReadingAhead(tokens)
    assert ahead.of(0) == 0
    with pytest.raises(OSError, match="the disk is gone"):
        ahead.of(1)
    assert ahead.of(2) == 2
    ahead.close()
