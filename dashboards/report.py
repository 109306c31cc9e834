"""Writes a run as one self-contained HTML file: the live page with its server's answers inside.

The page's own modules run unchanged; their requests are answered from the file. It needs no network, no
server and no other file, and shows the last steps' timelines.
"""

import html
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from braid.dashboards.run_data import RANKS_AT_ONCE, RunData, compact_json

_STEPS: Final = 3
_MOST_RANKS: Final = 64
"""Numbers of last steps and of first ranks whose timelines are in the file."""

_SCRIPT: Final = """
const { answers, modules } = JSON.parse(document.getElementById("run").textContent);

// Answers the page's requests from this file.
window.EventSource = class {
  constructor() {
    setTimeout(() => {
      this.onopen?.({});
      this.onmessage?.({ data: JSON.stringify(answers.news) });
    });
  }
  close() {}
};
window.fetch = async (address) => {
  const url = new URL(address, "http://report/");
  const path = url.pathname.replace(/^\\/api\\//, "");
  const query = url.searchParams;
  let found = answers[path];
  if (path === "ranks") found = answers.ranks[query.get("step") ?? "0"] ?? answers.ranks["0"];
  if (path === "timeline") found = answers.timeline[`${query.get("step")}:${query.get("ranks") ?? 0}`];
  if (found === undefined) return new Response(null, { status: 204 });
  return new Response(JSON.stringify(found));
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
    folder = files("braid.dashboards") / "page"
    page = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}
    answers = _answers(data, news)
    text = page["index.html"]
    text = text.replace('<link rel="stylesheet" href="style.css">', f"<style>\n{page['style.css']}</style>")
    modules = {name: body for name, body in page.items() if name.endswith(".js")}
    inline = (
        f'<script type="application/json" id="run">{_inside_html({"answers": answers, "modules": modules})}'
        f'</script>\n<script type="module">{_SCRIPT}</script>\n</body>'
    )
    text = text.replace('<script type="module" src="main.js"></script>\n', "").replace("</body>", inline)
    name = html.escape(str(answers["state"].get("name", run.name)))
    return text.replace("<title>Braid</title>", f"<title>Braid: {name}</title>")


def _answers(data: RunData, news: dict[str, Any]) -> dict[str, Any]:
    """Return what the server would answer, by request."""
    state = data.state()
    traced: list[int] = state["traced"][-_STEPS:]
    timelines = {}
    for step in traced:
        first = 0
        while (body := data.timeline(step, first)) is not None and first < _MOST_RANKS:
            timelines[f"{step}:{first}"] = body
            first += RANKS_AT_ONCE
    return {
        "news": {**news, "trace": [1, *traced[:1], *traced[-1:]]},
        "state": {**state, "traced": traced},
        "metrics": data.metrics(0, 0),
        "ranks": {"0": data.ranks(None), **{str(step): data.ranks(step) for step in traced}},
        "timeline": timelines,
    }


def _inside_html(content: Any) -> str:
    """Return JSON that cannot end the HTML element around it."""
    return (
        compact_json(content)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )
