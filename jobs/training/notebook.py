"""Shows a run's progress where it is called: one output that is updated in a notebook, lines elsewhere."""

import html
import io
import sys
import time
from typing import Any

from rich.console import Console

from braid.actors.controller.records.run_records import Finished, StepDone
from braid.actors.controller.records.step_record import StepRecord
from braid.dashboards.frames import curve_svg, facts_html, frame_html
from braid.jobs.training.display import Display
from braid.jobs.training.train import PageOpened

_DRAW_SECONDS = 0.5
"""Least seconds between two updates of a notebook's output by steps."""
_LINES = 12
"""Number of newest lines that are shown."""


def progress(*, page: bool = False) -> Display:
    """Return a callback that shows a run's progress: lines on standard output or, in a notebook, one output
    with numbers and the loss curve. ``page``: in a notebook, show the live page below them, too."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None and hasattr(shell, "kernel"):
        return NotebookDisplay(page=page)
    return Display(Console(), live=False, worded=str)


class NotebookDisplay(Display):
    """Shows a run's progress in one output of a notebook."""

    def __init__(self, *, page: bool = False) -> None:
        self._text = io.StringIO()
        super().__init__(Console(file=self._text, width=110), live=False, worded=str)
        self._shown_page, self._page = page, ""
        self._numbers_shown: dict[str, str] = {}
        self._output: Any = None
        self._drawn = 0.0

    def show(self, event: Any) -> None:
        """Show one event."""
        if isinstance(event, PageOpened):
            self._page = frame_html(event.address) if self._shown_page else ""
        if isinstance(event, Finished):
            self._page = ""  # it ends with the run
        super().show(event)
        often = isinstance(event, StepDone) and event.record.step != self._last_step
        if not often or time.monotonic() - self._drawn >= _DRAW_SECONDS:
            self._draw()

    def _step(self, record: StepRecord) -> None:
        self._count(record)
        self._numbers_shown = self._facts(record)

    def _draw(self) -> None:
        from IPython.display import HTML, display

        self._drawn = time.monotonic()
        newest = self._text.getvalue().splitlines()[-_LINES:]
        lines = f"<pre>{html.escape(chr(10).join(newest))}</pre>"
        content = HTML(facts_html(self._numbers_shown) + curve_svg(self._losses) + lines + self._page)
        if self._output is None:
            self._output = display(content, display_id=True)
        else:
            self._output.update(content)
