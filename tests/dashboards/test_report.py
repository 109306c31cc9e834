"""The report: the live page in one file that asks nobody for anything."""

import json
import re
from pathlib import Path

import pytest

from braid.dashboards.report import report_html
from tests.dashboards.browser import CHROMIUM, browser
from tests.dashboards.made_up_runs import made_up
from tests.dashboards.test_page import DRAWN, looking, read
from tests.in_process import Capture, called, refused


def test_data_cannot_leave_its_element(tmp_path: Path) -> None:
    made = made_up(tmp_path, ranks=2, steps=3)
    config = made.path / "config.yaml"
    evil = "</script><script>alert(1)</script>"
    config.write_text(config.read_text() + f"\nnote: {json.dumps(evil)}\n")
    text = report_html(made.path)
    assert evil not in text
    assert len(re.findall("<script", text)) == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to look at the page with")
@looking
async def test_the_file_shows_the_run_without_a_single_request(tmp_path: Path, capsys: Capture) -> None:
    made = made_up(tmp_path / "run", ranks=8, steps=6)
    output = tmp_path / "report.html"
    assert called(capsys, "report", made.path, "--output", output).code == 0
    refused(called(capsys, "report", tmp_path / "none"), str(tmp_path / "none"))
    async with browser() as tab:
        await tab.open(output.as_uri())
        await tab.until(DRAWN.format(step=6))
        assert "of communication is hidden" in await read(tab, "headline")
        assert tab.errors == []
        assert [
            url for url in tab.requests if not url.startswith(("file:", "data:", "about:", "blob:"))
        ] == []
        assert len([url for url in tab.requests if url.startswith("file:")]) == 1
