"""The page in a headless browser: made-up runs, a run that trains meanwhile, the same run past, a report."""

import asyncio
import contextlib
import functools
import json
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from braid.dashboards.server import make_app
from braid.scheduling.trace.spans import Span
from braid.scheduling.trace.stragglers import LAST
from tests.dashboards.browser import CHROMIUM, Tab, browser
from tests.dashboards.lines import lines_of
from tests.dashboards.made_up_runs import MadeUpRun, made_up
from tests.end_to_end.command import start, write_config, write_corpus
from tests.in_process import Capture, called, refused
from tests.spans import read_folder, spans_of

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to look at the page with"),
    pytest.mark.slow,
]
DRAWN = "window.braid && braid.drawnStep >= {step} && braid.timeline.whole && !document.hidden"
LONGEST = """(() => {
  const t = braid.timeline, {data, at} = t.steps(0).at(-1), own = data.ranks.get(0);
  const {start, end, label} = own.spans;
  let best = own.lanes[LANE][0];
  for (const span of own.lanes[LANE]) if (end[span] - start[span] > end[best] - start[best]) best = span;
  const box = t.canvas.getBoundingClientRect();
  return {x: box.x + t.x((start[best] + end[best]) / 2 + at),
          y: box.y + 22 + 3 + (LANE + 0.5) * t.lane - t.scroll,
          operator: data.labels[label[best]].operator, ns: end[best] - start[best], step: data.step};
})()"""


def looking(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:

    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))  # type: ignore[arg-type]

    return run


async def serve(run: Path, port: int = 0) -> web.AppRunner:
    runner = web.AppRunner(make_app(run), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    return runner


@asynccontextmanager
async def looked_at(run: Path, step: int | None) -> AsyncIterator[Tab]:
    """A tab that shows a run, once a step is drawn, if one is given; the page must not have complained."""
    runner = await serve(run)
    address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    try:
        async with browser() as tab:
            await tab.open(address)
            await tab.until("window.braid" if step is None else DRAWN.format(step=step))
            yield tab
            assert tab.errors == []
            asked = [url for url in tab.requests if not url.startswith(("data:", "about:"))]
            assert all(url.startswith(address) for url in asked), "a request left this machine"
    finally:
        await runner.cleanup()


async def read(tab: Tab, name: str, what: str = "innerText") -> Any:
    """The text of an element, or something else of it."""
    return await tab.evaluate(f"document.getElementById('{name}').{what}")


async def count(tab: Tab, selector: str) -> int:
    return int(await tab.evaluate(f"document.querySelectorAll('{selector}').length"))


async def hovered(tab: Tab, element: str, place: str) -> tuple[Any, str]:
    """A place in an element, once that is in view, and what the page says when the mouse is over it."""
    await read(tab, element, "scrollIntoView({block: 'center'})")
    found = await tab.evaluate(place)
    await tab.move(*((found["x"], found["y"]) if isinstance(found, dict) else found))
    await tab.until("!document.getElementById('tip').hidden")
    return found, str(await read(tab, "tip"))


async def written(tab: Tab, ns: float) -> str:
    return str(await tab.evaluate(f"import('/dom.js').then((dom) => dom.nanoseconds({ns}))"))


async def told_of_longest(tab: Tab, run: Path) -> AsyncIterator[tuple[Span, str]]:
    """The longest computation and transfer of rank 0 in its trace, and what is told of what is drawn so."""
    for lane, stream in enumerate(("compute", "intra")):
        place, text = await hovered(tab, "timeline", LONGEST.replace("LANE", str(lane)))
        spans = spans_of(read_folder(run).step(place["step"] - 1))
        own = [span for span in spans if span.rank == 0 and span.stream == stream]
        longest = max(own, key=lambda span: span.end_ns - span.start_ns)
        assert (place["operator"], place["ns"]) == (longest.operator, longest.end_ns - longest.start_ns)
        assert longest.operator in text
        assert await written(tab, place["ns"]) in text
        yield longest, text


@looking
async def test_the_headline_says_what_the_numbers_say(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 8, LAST, slow=(3,))
    rows = lines_of(run.path / "metrics.jsonl")[-10:]
    exposed = sum(row["exposed_seconds"] for row in rows)
    hidden = 1 - exposed / sum(row["communication_seconds"] for row in rows)
    async with looked_at(run.path, LAST) as tab:
        headline = await read(tab, "headline")
        assert headline.startswith(f"{hidden * 100:.0f} % of communication is hidden; ")
        assert f"{await written(tab, exposed / len(rows) * 1e9)} of each" in headline
        await tab.until("braid.run.ranks")
        assert "Slow rank: 3" in await read(tab, "alerts")
        assert await tab.evaluate("braid.run.ranks.stragglers.map((one) => [one.rank, one.stage])") == [
            [3, 0]
        ]
        assert await count(tab, ".rank.slow") == 1
        assert await count(tab, ".strands rect") > 10
        assert await count(tab, "#heat td") > 10


@looking
async def test_names_are_text_and_unknown_numbers_are_gaps(tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
    run = made_up(tmp_path / "run", 2, 4, name=evil, operator=evil)
    run.note("failed", 2, evil)
    cluster = json.loads((run.path / "cluster.json").read_text())
    cluster["ranks"][0]["node"] = evil
    (run.path / "cluster.json").write_text(json.dumps(cluster))
    rows = lines_of(run.path / "metrics.jsonl")
    for row in rows[1:3]:
        row |= dict.fromkeys(("loss", "grad_norm", "slowdown_seconds", "exposed_by_axis"))
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with looked_at(run.path, 4) as tab:
        assert await read(tab, "name", "textContent") == evil
        for name in ("alerts", "log", "nodes"):
            assert evil in await read(tab, name, "textContent"), name
        labels = "braid.timeline.steps(0)[0].data.labels.map((one) => one.operator).join()"
        assert evil in await tab.evaluate(labels)
        assert (await count(tab, "img"), await count(tab, "script")) == (0, 1)
        assert await tab.evaluate("window.hacked ?? null") is None
        assert await tab.evaluate("braid.run.columns.loss") == [rows[0]["loss"], None, None, rows[3]["loss"]]
        charts = str(await read(tab, "charts", "innerHTML"))
        assert f"<output>{rows[3]['loss']:.3f}</output>" in charts
        assert not re.search("NaN|undefined|Infinity", charts)


@looking
async def test_experts_have_a_map_and_charts(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 2, 3, experts=True)
    lines = lines_of(run.path / "metrics.jsonl")
    numbers = lines[-1]["experts"]
    visits = numbers["visits"][4][6]
    async with looked_at(run.path, 3) as tab:
        await tab.until("!document.getElementById('experts-section').hidden")
        text = await read(tab, "experts-read", "textContent")
        for part in ("Step 3", f"{numbers['worst_imbalance']:.2f} \u00d7", "1 expert without a visit"):
            assert part in text
        titles = await read(tab, "expert-charts")
        for title in ("Fullest expert", "Entropy", "Visits dropped", "Auxiliary losses"):
            assert title in titles
        column = await tab.evaluate("braid.run.columns['experts.worst_entropy']")
        assert column == [line["experts"]["worst_entropy"] for line in lines]
        told = await read(tab, "experts", "rows[5].querySelectorAll('td')[6].dataset.tip")
        share = f"{100 * visits / sum(numbers['visits'][4]):.2f} %"
        for part in ("layer 4, expert 6, step 3", f"{visits:,}", share):
            assert part in told


CLIPPED = """(() => {
  const box = document.getElementById('budget').getBoundingClientRect();
  const parts = [...document.querySelectorAll('#budget :is(span, output)')];
  return parts.map((part) => part.getBoundingClientRect())
    .filter((part) => part.left < box.left - 1 || part.right > box.right + 1).length;
})()"""
WAIT = """(() => {
  const t = braid.timeline, {data, at} = t.steps(0)[0], {start: a, end: b} = data.ranks.get(0).waits;
  const box = t.canvas.getBoundingClientRect();
  return [box.x + t.x((a[0] + b[0]) / 2 + at), box.y + 22 + 3 + 3 * t.lane + 2];
})()"""


@looking
async def test_hover_tells_what_the_trace_says_and_keys_move_it(tmp_path: Path) -> None:
    """Waiting for a peer is told apart from waiting for transfers; nothing is wider than the window."""
    run = made_up(tmp_path / "run", 2, 3, late=1)
    ((peer, operator, waited),) = lines_of(run.path / "ranks.jsonl")[-1]["waits_for"][0]
    rows = lines_of(run.path / "metrics.jsonl")[1:]
    tp = sum(row["exposed_by_axis"]["tp"] for row in rows) / len(rows)
    async with looked_at(run.path, 3) as tab:
        await tab.until("braid.timeline.drawn === 3 && braid.run.ranks")
        async for longest, text in told_of_longest(tab, run.path):
            assert all(part in text for part in ("(simulated)", "predicted", "alone"))
            assert ("exposed" in text) == (longest.stream == "intra")
        _, tip = await hovered(tab, "timeline", WAIT)
        time = await written(tab, waited * 1e9)
        assert peer == 1
        assert f"rank 0 waits for rank 1 ({operator}" in tip
        assert time in tip
        assert f"rank 0 waits {time} for rank 1 ({operator})" in await read(tab, "longest-wait")
        assert f"exposed by axis: tp {await written(tab, tp * 1e9)}" in await read(tab, "subline")
        charts = await read(tab, "charts")
        for title in ("Exposed, by axis", "Learning rate", "Validation, bits per byte"):
            assert title in charts
        middle = await tab.evaluate("braid.timeline.time(700)")
        await tab.evaluate("braid.timeline.zoom(4, 700)")
        assert await tab.evaluate("braid.timeline.time(700)") == pytest.approx(middle, rel=1e-3)
        assert await tab.evaluate("braid.timeline.time(800)") < middle * 1.5
        await tab.key("+")
        assert await tab.evaluate("braid.timeline.scale") == pytest.approx(6.4)
        await tab.key("0")
        assert await tab.evaluate("braid.timeline.scale") == 1
        await tab.key(".")
        await tab.key(".")
        assert "measured" in await read(tab, "tip")
        await tab.key("[")
        assert await tab.evaluate("braid.timeline.step") == 2
        assert await read(tab, "follow", "checked") is False
        await tab.key("f")
        assert await tab.evaluate("braid.timeline.step") == 3
        ink = await tab.evaluate("braid.timeline.colours.ink")
        await tab.key("t")
        assert await tab.evaluate("braid.timeline.colours.ink") != ink
        for width in (390, 1400):
            size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": False}
            await tab.send("Emulation.setDeviceMetricsOverride", **size)
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            assert await tab.evaluate(CLIPPED) == 0
        await tab.key("?")
        assert await read(tab, "help", "open") is True


@looking
async def test_the_step_before_stays_until_the_next_one_is_here(tmp_path: Path) -> None:
    """Steps that come faster than their columns: nothing flickers, and the picture goes on."""
    run = MadeUpRun(tmp_path / "run", 2, steps=100)
    run.step()
    async with looked_at(run.path, 1) as tab:
        await tab.until("braid.timeline.steps(0).length === 1")
        await tab.evaluate("""(() => {
          const {timeline, run} = braid, draw = timeline.draw.bind(timeline), ask = window.fetch;
          window.seen = [];
          timeline.draw = () => { draw(); seen.push([timeline.drawn, timeline.steps(0).length]) };
          window.fetch = async (address) => {  // two steps late
            if (address.includes("timeline")) await new Promise((done) => setTimeout(done, 900));
            return ask(address);
          };
        })()""")
        for _ in range(8):
            run.step()
            await asyncio.sleep(0.3)
        seen = await tab.evaluate("seen")
        assert {count for _, count in seen} == {1}, "always one step"
        assert len({step for step, _ in seen}) > 2, "and newer and newer ones"
        await tab.until("braid.timeline.drawn === 9")
        assert await read(tab, "step-shown", "textContent") == "9"
        assert "elapsed" in await read(tab, "progress", "textContent")


@looking
async def test_only_ranks_in_view_are_asked_for(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 256, 2)
    async with looked_at(run.path, 2) as tab:
        await tab.until("braid.timeline.steps(0).length")
        asked = [url for url in tab.requests if "/api/timeline" in url]
        assert 1 <= len(asked) <= 4, "sixteen ranks an answer, not all of them"
        await tab.evaluate("braid.timeline.reveal(255)")
        await tab.until("braid.timeline.steps(255).length")
        place = await tab.evaluate("braid.timeline.steps(255).at(-1).data.ranks.get(255).numbers.exposed_ns")
        line = lines_of(run.path / "ranks.jsonl")[-1]
        assert place == round(line["exposed_seconds"][255] * 1e9)


@looking
async def test_the_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    """A page that was alone for a while shows the newest state, by itself; of another run, too."""
    run = MadeUpRun(tmp_path / "run", 2)
    run.step()
    runner = await serve(run.path)
    port = runner.addresses[0][1]
    async with browser() as tab:
        await tab.open(f"http://127.0.0.1:{port}/")
        await tab.until(DRAWN.format(step=1))
        await runner.cleanup()
        await tab.until("document.getElementById('status').textContent.includes('no connection')")
        run.step()
        run.step()
        runner = await serve(run.path, port)
        await tab.until(DRAWN.format(step=3))
        await runner.cleanup()
        shutil.rmtree(run.path)
        made_up(run.path, 2, 3, seed=5, name="another")
        losses = [line["loss"] for line in lines_of(run.path / "metrics.jsonl")]
        runner = await serve(run.path, port)
        try:
            await tab.until("document.getElementById('name').textContent === 'another'")
            await tab.until(f"JSON.stringify(braid.run.columns.loss) === JSON.stringify({losses})")
            await tab.until("!document.getElementById('status').textContent.includes('no connection')")
        finally:
            await runner.cleanup()


async def check_trained(tab: Tab, run: Path, steps: int) -> None:
    await tab.until(f"braid.timeline.drawn === {steps} && braid.timeline.steps(0).length === 1")
    async for longest, text in told_of_longest(tab, run):
        assert ("shapes" in text) != (longest.operator in ("norm", "optimizer"))
    line = lines_of(run / "ranks.jsonl")[-1]
    for rank in (0, 1):
        numbers = await tab.evaluate(f"braid.timeline.steps({rank})[0].data.ranks.get({rank}).numbers")
        for name in ("communication", "hidden", "exposed", "compute", "launch_gap", "bubble"):
            assert numbers[f"{name}_ns"] == round(line[f"{name}_seconds"][rank] * 1e9), name


@looking
async def test_a_run_that_trains_and_the_same_run_past(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    steps = 60  # the page asks four times a second
    quiet = {"progress": False, "page": False}
    write_config(tmp_path, train={"steps": steps}, parallel={"tp": 2}, telemetry=quiet)
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "events.jsonl").touch()
    async with looked_at(run, None) as tab:  # it looks before anything is trained
        process = start(tmp_path, "train", "run.yaml")
        try:
            seen = []
            while process.poll() is None:
                with contextlib.suppress(RuntimeError):
                    seen.append(await tab.evaluate("braid.drawnStep"))
                await asyncio.sleep(0.1)
            await tab.until(DRAWN.format(step=steps))
            assert len(set(seen)) > 3, "the charts move while it trains"
            await tab.until("document.getElementById('status').textContent === 'finished'")
            await check_trained(tab, run, steps)
        finally:
            if process.poll() is None:
                process.terminate()
            process.communicate(timeout=60)
    async with looked_at(run, steps) as tab:
        await check_trained(tab, run, steps)


@looking
async def test_a_report_shows_the_run_without_a_single_request(tmp_path: Path, capsys: Capture) -> None:
    """Data cannot leave their element."""
    made = made_up(tmp_path / "run", ranks=8, steps=6)
    output, evil = tmp_path / "report.html", "</script><script>alert(1)</script>"
    with (made.path / "config.yaml").open("a") as config:
        config.write(f"evil: {json.dumps(evil)}\n")
    assert called(capsys, "report", made.path, "--output", output).code == 0
    refused(called(capsys, "report", tmp_path / "none"), str(tmp_path / "none"))
    text = output.read_text()
    assert evil not in text
    assert text.count("<script") == 2
    async with browser() as tab:
        await tab.open(output.as_uri())
        await tab.until(DRAWN.format(step=6))
        assert "of communication is hidden" in await read(tab, "headline")
        assert tab.errors == []
        assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data", "about", "blob"}
        assert len([url for url in tab.requests if url.startswith("file:")]) == 1
