"""Writes a run as one self-contained HTML file: the live page with its server's answers inside.

The page's own modules run unchanged; their requests are answered from the file. It needs no network, no
server and no other file, and shows the last steps' timelines.
"""

import html
from importlib.resources import files
from pathlib import Path
from typing import Final

from braid.dashboards.run_data import RANKS_AT_ONCE, RunData, compact_json

_STEPS: Final = 3
_MOST_RANKS: Final = 64
"""Numbers of last steps and of first ranks whose timelines are in the file."""

_SCRIPT: Final = """
const { news, answers, modules } = JSON.parse(document.getElementById("run").textContent);

// Answers the page's requests from this file.
window.EventSource = class {
  constructor() {
    setTimeout(() => {
      this.onopen({});
      this.onmessage({ data: JSON.stringify(news) });
    });
  }
};
window.fetch = async (address) => {
  const known = address in answers;
  return new Response(known ? JSON.stringify(answers[address]) : null, { status: known ? 200 : 204 });
};

// Every module gets an address of its own, after those that it imports.
const addresses = {};
function addressOf(name) {
  const body = modules[name].replace(/from "\\.\\/([^"]+)"/g, (_, other) => `from "${addressOf(other)}"`);
  return (addresses[name] ??= URL.createObjectURL(new Blob([body], { type: "text/javascript" })));
}
import(addressOf("main.js"));
"""


def report_html(run: Path) -> str:
    """Return the report of a run directory as HTML. Raise `ValueError` if it holds no run."""
    data = RunData(run)
    data.check()
    news = data.refresh()
    state = data.state()
    traced = state["traced"][-_STEPS:]
    answers = {
        "api/state": state,
        "api/metrics?after=0&epoch=0": data.metrics(0, 0),
        "api/ranks": data.ranks(),
        **{
            f"api/timeline?step={step}&ranks={first}": body
            for step in traced
            for first in range(0, _MOST_RANKS, RANKS_AT_ONCE)
            if (body := data.timeline(step, first)) is not None
        },
    }
    folder = files("braid.dashboards") / "page"
    page = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}
    content = {
        "news": {**news, "trace": [1, *traced[:1], *traced[-1:]]},
        "answers": answers,
        "modules": {name: body for name, body in page.items() if name.endswith(".js")},
    }
    inside = compact_json(content).replace("<", "\\u003c")  # JSON that cannot end the element around it
    data_element = f'<script type="application/json" id="run">{inside}</script>'
    text = page["index.html"]
    for old, new in (
        ('<link rel="stylesheet" href="style.css">', f"<style>\n{page['style.css']}</style>"),
        ('<script type="module" src="main.js"></script>\n', ""),
        ("</body>", f'{data_element}\n<script type="module">{_SCRIPT}</script>\n</body>'),
        ("<title>Braid</title>", f"<title>Braid: {html.escape(state['name'])}</title>"),
    ):
        text = text.replace(old, new)
    return text
