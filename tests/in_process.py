"""The command line in this process: how a call ends, and what it says."""

from dataclasses import dataclass

import pytest

from braid.jobs.cli import main

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Outcome:
    """What a command leaves behind."""

    code: int
    output: str
    errors: str


def called(capsys: Capture, *arguments: object) -> Outcome:
    """``braid ARGUMENTS``."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([*map(str, arguments)])
    caught = capsys.readouterr()
    return Outcome(int(left.value.code or 0), caught.out, caught.err)


def refused(outcome: Outcome, *says: str) -> str:
    """The message of a call that is refused: it says all that, and shows no trace."""
    assert outcome.code == 2, outcome
    assert outcome.errors.startswith("braid: ")
    assert "Traceback" not in outcome.errors
    for text in says:
        assert text in outcome.errors
    return outcome.errors
