"""One self-contained HTML file of a run: the live page with what its server would answer inside.

The page's own code runs unchanged; its requests are answered from the file. It needs no network, no server
and no other file, and shows the last steps' timelines.
"""

import html
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from braid.dashboards.run_data import RANKS_AT_ONCE, RunData, compact_json

_STEPS: Final = 3
_MOST_RANKS: Final = 64
"""Of so many last steps and first ranks the timelines are in the file."""
_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+)\.js";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?:async )?(?:const|let|class|function\*?) (\w+)", re.MULTILINE)

_ANSWERS: Final = """
// Answers the page's requests from this file.
const answers = JSON.parse(document.getElementById("run").textContent);
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
"""


def report_html(run: Path) -> str:
    """The report of a run directory. `ValueError` if it holds no run."""
    data = RunData(run)
    data.check()
    news = data.refresh()
    folder = files("braid.dashboards") / "page"
    page = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}
    answers = _answers(data, news)
    text = page["index.html"]
    text = text.replace('<link rel="stylesheet" href="style.css">', f"<style>\n{page['style.css']}</style>")
    modules = {name.removesuffix(".js"): body for name, body in page.items() if name.endswith(".js")}
    code = bundle(modules, "main")
    inline = (
        f'<script type="application/json" id="run">{_inside_html(answers)}</script>\n'
        f'<script type="module">\n{_ANSWERS}\n{code}</script>\n</body>'
    )
    text = text.replace('<script type="module" src="main.js"></script>\n', "").replace("</body>", inline)
    name = html.escape(str(answers["state"].get("name", run.name)))
    return text.replace("<title>Braid</title>", f"<title>Braid: {name}</title>")


def _answers(data: RunData, news: dict[str, Any]) -> dict[str, Any]:
    """What the server would answer, by request."""
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
    """JSON that cannot end the element around it."""
    return (
        compact_json(content)
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def bundle(modules: Mapping[str, str], entry: str) -> str:
    """ES modules that import each other by name as one script: each a function that returns its exports.

    Understands what the page uses: ``import { names } from "./module.js"`` and exported declarations.
    """
    done: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in done:
            return
        body = modules[name]
        for _, needed in _IMPORT.findall(body):
            visit(needed)

        def imported(match: re.Match[str]) -> str:
            return f"const {{{match[1].replace(' as ', ': ')}}} = module_{match[2]};\n"

        exported = _EXPORT.findall(body)
        body = re.sub(r"^export ", "", _IMPORT.sub(imported, body), flags=re.MULTILINE)
        done[name] = f"const module_{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();\n"

    visit(entry)
    return "".join(done.values())
