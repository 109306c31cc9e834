"""The report: the live page in one file that asks nobody for anything."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from braid.dashboards.report import bundle, report_html
from braid.jobs import cli
from tests.dashboards.browser import CHROMIUM, browser
from tests.dashboards.made_up_runs import made_up
from tests.dashboards.test_page import DRAWN


def test_modules_become_one_script() -> None:
    modules = {
        "main": 'import { twice, LIMIT as most } from "./sums.js";\nconst seen = twice(most);\n',
        "sums": 'import { base } from "./base.js";\nexport const LIMIT = base;\n'
        "export function twice(x) {\n  return 2 * x;\n}\nfunction own() {}\n",
        "base": "export const base = 21;\nconst own = 1;\n",
    }
    script = bundle(modules, "main")
    places = [script.index(f"const module_{name} =") for name in ("base", "sums", "main")]
    assert places == sorted(places), "what is needed comes first"
    assert "import" not in script
    assert "export" not in script
    assert "const { twice, LIMIT: most } = module_sums;" in script
    assert "return { LIMIT, twice };" in script


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
def test_the_file_shows_the_run_without_a_single_request(tmp_path: Path) -> None:
    made = made_up(tmp_path, ranks=8, steps=6)
    output = tmp_path / "report.html"
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(made.path), "--output", str(output)])
    assert not ended.value.code

    async def look() -> None:
        async with browser(1366, 768) as tab:
            await tab.open(output.as_uri())
            await tab.until(DRAWN.replace("{step}", "6"))
            headline = await tab.evaluate("document.getElementById('headline').innerText")
            assert "of communication is hidden" in headline
            assert tab.errors == []
            assert [url for url in tab.requests if not url.startswith(("file:", "data:", "about:"))] == []
            assert len([url for url in tab.requests if url.startswith("file:")]) == 1

    asyncio.run(look())


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path)])
    assert ended.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err
