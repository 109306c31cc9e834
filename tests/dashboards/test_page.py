"""The page in a headless browser: made-up runs, a run that trains meanwhile, and the same run past."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from braid.dashboards.server import make_app
from braid.scheduling.stragglers import LAST
from tests.dashboards.browser import CHROMIUM, Tab, browser
from tests.dashboards.made_up_runs import MIXTURE, MadeUpRun, made_up
from tests.end_to_end.command import start, write_config, write_corpus
from tests.spans import read_folder, spans_of

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium to look at the page with"),
    pytest.mark.slow,
]
DRAWN = "window.braid && braid.drawnStep >= {step} && braid.timeline.whole && !document.hidden"
LONGEST = """(() => {
  const t = braid.timeline, {data, at} = t.steps(0).at(-1), own = data.ranks.get(0).lanes[LANE].spans;
  const {start, end, label} = data.columns;
  let best = own[0];
  for (const span of own) if (end[span] - start[span] > end[best] - start[best]) best = span;
  const box = t.canvas.getBoundingClientRect();
  return {x: box.x + t.x((start[best] + end[best]) / 2 + at),
          y: box.y + 22 + 3 + (LANE + 0.5) * t.lane - t.scroll,
          operator: data.labels[label[best]].operator, ns: end[best] - start[best], step: data.step};
})()"""


@asynccontextmanager
async def looked_at(run: Path, width: int = 1366, height: int = 768) -> AsyncIterator[tuple[Tab, str]]:
    """A tab that shows a run, and the server's address; the page must not have complained."""
    runner = web.AppRunner(make_app(run), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with browser(width, height) as tab:
            await tab.open(address)
            yield tab, address
            assert tab.errors == []
            asked = [url for url in tab.requests if not url.startswith(("data:", "about:"))]
            assert all(url.startswith(address) for url in asked), "a request left this machine"
    finally:
        await runner.cleanup()


def look(run: Path, question: Callable[[Tab], Awaitable[None]]) -> None:
    """Look at a run."""

    async def ask() -> None:
        async with looked_at(run) as (tab, _):
            await question(tab)

    asyncio.run(ask())


async def tip(tab: Tab, lane: int) -> tuple[dict[str, Any], str]:
    """The longest operator of a lane of rank 0, and what the page says when the mouse is over it."""
    await tab.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
    place: dict[str, Any] = await tab.evaluate(LONGEST.replace("LANE", str(lane)))
    await tab.move(place["x"], place["y"])
    await tab.until("!document.getElementById('tip').hidden")
    return place, str(await tab.evaluate("document.getElementById('tip').innerText"))


async def written(tab: Tab, ns: float) -> str:
    """A time as the page writes it."""
    return str(await tab.evaluate(f"import('/dom.js').then((dom) => dom.nanoseconds({ns}))"))


def test_hover_tells_what_the_trace_says(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 2, 3)

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=3))
        for lane, stream in enumerate(("compute", "intra")):
            place, text = await tip(tab, lane)
            own = [
                s
                for s in spans_of(read_folder(run.path).step(place["step"] - 1))
                if s.rank == 0 and s.stream == stream
            ]
            longest = max(own, key=lambda span: span.end_ns - span.start_ns)
            assert place["operator"] == longest.operator
            assert place["ns"] == longest.end_ns - longest.start_ns
            for part in (
                longest.operator,
                await written(tab, place["ns"]),
                "(simulated)",
                "predicted",
                "alone",
            ):
                assert part in text
            assert ("exposed" in text) == (stream == "intra")

    look(run.path, ask)


def test_the_headline_says_what_the_numbers_say(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 8, LAST, slow=(3,))
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()][-10:]
    hidden = 1 - sum(r["exposed_seconds"] for r in rows) / sum(r["communication_seconds"] for r in rows)

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=LAST))
        headline = await tab.evaluate("document.getElementById('headline').innerText")
        assert headline.startswith(f"{hidden * 100:.0f} % of communication is hidden; ")
        exposed = sum(row["exposed_seconds"] for row in rows) / len(rows) * 1e9
        assert f"{await written(tab, exposed)} of each" in headline
        await tab.until("braid.run.ranks")
        assert "rank 3" in await tab.evaluate("document.getElementById('stragglers').innerText")
        assert "Slow rank: 3" in await tab.evaluate("document.getElementById('alerts').innerText")
        assert await tab.evaluate("document.querySelectorAll('.chip.slow').length") == 1
        assert await tab.evaluate("document.querySelectorAll('.strands rect').length > 10")
        assert await tab.evaluate("document.querySelectorAll('#heat td').length > 10")

    look(run.path, ask)


def test_names_are_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=window.hacked=1><script>window.hacked=1</script>"
    run = made_up(tmp_path / "run", 2, 2, name=evil, operator=evil)
    run.note("failed", 2, evil)
    cluster = json.loads((run.path / "cluster.json").read_text())
    cluster["ranks"][0]["node"] = evil
    (run.path / "cluster.json").write_text(json.dumps(cluster))

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=2))
        assert await tab.evaluate("document.getElementById('name').textContent") == evil
        assert evil in await tab.evaluate("document.getElementById('alerts').textContent")
        assert evil in await tab.evaluate("document.getElementById('log').textContent")
        assert evil in await tab.evaluate("document.getElementById('cluster').textContent")
        assert evil in await tab.evaluate(
            "braid.timeline.steps(0)[0].data.labels.map((one) => one.operator).join()"
        )
        assert await tab.evaluate("document.querySelectorAll('img').length") == 0
        assert await tab.evaluate("document.querySelectorAll('script').length") == 1
        assert await tab.evaluate("window.hacked ?? null") is None

    look(run.path, ask)


def test_experts_have_a_map_and_charts(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 2, 3, experts=MIXTURE)
    numbers = json.loads((run.path / "metrics.jsonl").read_text().splitlines()[-1])["experts"]
    visits = numbers["visits"][4][6]

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=3))
        await tab.until("!document.getElementById('experts-section').hidden")
        text = await tab.evaluate("document.getElementById('experts-read').textContent")
        for part in ("Step 3", f"{numbers['worst_imbalance']:.2f} \u00d7", "1 expert without a visit"):
            assert part in text
        titles = await tab.evaluate("document.getElementById('expert-charts').innerText")
        for title in ("Fullest over the average", "Entropy", "Visits dropped", "Auxiliary losses"):
            assert title in titles
        await tab.evaluate("document.getElementById('experts').scrollIntoView({block: 'center'})")
        place = await tab.evaluate(
            "(() => { const {experts} = braid, {wide, tall} = experts.cell, box = experts.canvas"
            ".getBoundingClientRect(); return [box.x + 62 + 6.5 * wide, box.y + 20 + 4.5 * tall] })()"
        )
        await tab.move(*place)
        await tab.until("!document.getElementById('tip').hidden")
        tip = await tab.evaluate("document.getElementById('tip').innerText")
        share = f"{100 * visits / sum(numbers['visits'][4]):.2f} %"
        for part in ("layer 4, expert 6, step 3", f"{visits:,}", share):
            assert part in tip

    look(run.path, ask)


def test_waiting_for_a_peer_and_for_transfers_are_told_apart(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 2, 3, late=1)
    line = json.loads((run.path / "ranks.jsonl").read_text().splitlines()[-1])
    ((peer, operator, waited),) = line["waits_for"][0]
    assert peer == 1

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=3))
        await tab.until("braid.timeline.drawn === 3 && braid.run.ranks")
        await tab.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
        place = await tab.evaluate("""(() => {
          const t = braid.timeline, {data, at} = t.steps(0)[0], {wait_start: a, wait_end: b} = data.columns;
          const box = t.canvas.getBoundingClientRect();
          return [box.x + t.x((a[0] + b[0]) / 2 + at), box.y + 22 + 3 + 3 * t.lane + 2];
        })()""")
        await tab.move(*place)
        await tab.until("!document.getElementById('tip').hidden")
        tip = str(await tab.evaluate("document.getElementById('tip').innerText"))
        assert f"rank 0 waits for rank 1 ({operator}" in tip
        assert await written(tab, waited * 1e9) in tip
        under = await tab.evaluate("document.getElementById('stragglers').innerText")
        assert f"rank 0 waits {await written(tab, waited * 1e9)} for rank 1 ({operator})" in under
        subline = await tab.evaluate("document.getElementById('subline').innerText")
        rows = [json.loads(row) for row in (run.path / "metrics.jsonl").read_text().splitlines()][1:]
        tp = sum(row["exposed_by_axis"]["tp"] for row in rows) / len(rows)
        assert f"exposed by axis: tp {await written(tab, tp * 1e9)}" in subline
        charts = await tab.evaluate("document.getElementById('charts').innerText")
        for title in ("Exposed, by axis", "Learning rate", "Validation, bits per byte"):
            assert title in charts

    look(run.path, ask)


def test_the_step_before_stays_until_the_next_one_is_here(tmp_path: Path) -> None:
    """Steps that come faster than their columns: nothing flickers, and the picture goes on."""
    run = MadeUpRun(tmp_path / "run", 2, steps=100)
    run.step()

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=1))
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
        assert await tab.evaluate("document.getElementById('step-shown').textContent") == "9"
        texts = await tab.evaluate("document.getElementById('progress').textContent")
        assert "elapsed" in texts

    look(run.path, ask)


def test_numbers_that_are_none_leave_gaps(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 2, 4)
    path = run.path / "metrics.jsonl"
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    for row in rows[1:3]:
        row |= dict.fromkeys(("loss", "grad_norm", "slowdown_seconds", "exposed_by_axis"))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=4))
        assert await tab.evaluate("braid.run.columns.loss") == [rows[0]["loss"], None, None, rows[3]["loss"]]
        texts = await tab.evaluate(
            "[...document.querySelectorAll('#charts output')].map((o) => o.textContent)"
        )
        assert f"{rows[3]['loss']:.3f}" in texts
        assert not [text for text in texts if "NaN" in text or "undefined" in text]

    look(run.path, ask)


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_window(tmp_path: Path, width: int) -> None:
    run = made_up(tmp_path / "run", 2, 3)
    run.note("telemetry", 2, "spans of some steps only, to stay within 1 % of the time")

    async def ask() -> None:
        async with looked_at(run.path, width, 844) as (tab, _):
            await tab.until(DRAWN.format(step=3))
            await tab.until("document.querySelectorAll('#log td').length > 10")
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            clipped = await tab.evaluate("""(() => {
              const box = document.getElementById('budget').getBoundingClientRect();
              return [...document.querySelectorAll('#budget text')].map((one) => one.getBoundingClientRect())
                .filter((one) => one.left < box.left - 1 || one.right > box.right + 1).length;
            })()""")
            assert clipped == 0
            words = await tab.evaluate("""(() => [...document.querySelectorAll('#log th')].map((one) => {
              const range = document.createRange();
              range.selectNodeContents(one);
              return new Set([...range.getClientRects()].map((box) => box.top)).size;
            }).filter((count) => count > 1).length)()""")
            assert words == 0, "no word of the events is broken"

    asyncio.run(ask())


def test_keys(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 2, 3)

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=3))
        await tab.evaluate("document.getElementById('timeline').focus()")
        await tab.key("+")
        assert await tab.evaluate("braid.timeline.view !== null")
        before = await tab.evaluate("braid.timeline.view[0]")
        await tab.key("ArrowRight")
        assert await tab.evaluate("braid.timeline.view[0]") > before
        await tab.key("0")
        assert await tab.evaluate("braid.timeline.view === null")
        await tab.key(".")
        await tab.key(".")
        assert "measured" in await tab.evaluate("document.getElementById('timeline-read').textContent")
        await tab.key("[")
        assert await tab.evaluate("braid.timeline.step") == 2
        assert await tab.evaluate("document.getElementById('follow').checked") is False
        await tab.key("f")
        assert await tab.evaluate("braid.timeline.step") == 3
        theme = await tab.evaluate("document.documentElement.dataset.theme")
        await tab.key("t")
        assert await tab.evaluate("document.documentElement.dataset.theme") != theme
        await tab.key("?")
        assert await tab.evaluate("document.getElementById('help').open") is True

    look(run.path, ask)


def test_only_ranks_in_view_are_asked_for(tmp_path: Path) -> None:
    run = made_up(tmp_path / "run", 256, 2)

    async def ask(tab: Tab) -> None:
        await tab.until(DRAWN.format(step=2))
        await tab.until("braid.timeline.steps(0).length")
        asked = [url for url in tab.requests if "/api/timeline" in url]
        assert 1 <= len(asked) <= 4, "sixteen ranks an answer, not all of them"
        await tab.evaluate("braid.timeline.reveal(255)")
        await tab.until("braid.timeline.steps(255).length")
        place = await tab.evaluate("braid.timeline.steps(255).at(-1).data.ranks.get(255).numbers.exposed_ns")
        line = json.loads((run.path / "ranks.jsonl").read_text().splitlines()[-1])
        assert place == round(line["exposed_seconds"][255] * 1e9)

    look(run.path, ask)


def test_the_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    """A page that was alone for a while shows the newest state, by itself; of another run, too."""
    run = MadeUpRun(tmp_path / "run", 2)
    run.step()

    async def serve(port: int) -> web.AppRunner:
        runner = web.AppRunner(make_app(run.path), access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        return runner

    async def ask() -> None:
        runner = await serve(0)
        port = runner.addresses[0][1]
        async with browser() as tab:
            await tab.open(f"http://127.0.0.1:{port}/")
            await tab.until(DRAWN.format(step=1))
            await runner.cleanup()
            await tab.until("document.getElementById('status').textContent.includes('no connection')")
            run.step()
            run.step()
            runner = await serve(port)
            await tab.until(DRAWN.format(step=3))
            await runner.cleanup()
            shutil.rmtree(run.path)
            made_up(run.path, 2, 3, seed=5, name="another")
            lines = (run.path / "metrics.jsonl").read_text().splitlines()
            losses = [json.loads(line)["loss"] for line in lines]
            runner = await serve(port)
            try:
                await tab.until("document.getElementById('name').textContent === 'another'")
                await tab.until(f"JSON.stringify(braid.run.columns.loss) === JSON.stringify({losses})")
                await tab.until("!document.getElementById('status').textContent.includes('no connection')")
            finally:
                await runner.cleanup()

    asyncio.run(ask())


def test_a_run_that_trains_and_the_same_run_past(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    steps = 60  # the page asks four times a second
    write_config(
        tmp_path, train={"steps": steps}, parallel={"tp": 2}, telemetry={"progress": False, "page": False}
    )
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "events.jsonl").touch()

    async def training() -> None:
        async with looked_at(run) as (tab, _):  # it looks before anything is trained
            await tab.until("window.braid")
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
                await check(tab)
            finally:
                if process.poll() is None:
                    process.terminate()
                process.communicate(timeout=60)

    async def check(tab: Tab) -> None:
        await tab.until(f"braid.timeline.drawn === {steps} && braid.timeline.steps(0).length === 1")
        spans = spans_of(read_folder(run).step(steps - 1))
        for lane, stream in enumerate(("compute", "intra")):
            place, text = await tip(tab, lane)
            own = [span for span in spans if span.rank == 0 and span.stream == stream]
            longest = max(own, key=lambda span: span.end_ns - span.start_ns)
            assert (place["operator"], place["ns"]) == (longest.operator, longest.end_ns - longest.start_ns)
            assert await written(tab, place["ns"]) in text
            assert ("shapes" in text) != (longest.operator in ("norm", "optimizer"))
        line = json.loads((run / "ranks.jsonl").read_text().splitlines()[-1])
        for rank in (0, 1):
            numbers = await tab.evaluate(f"braid.timeline.steps({rank})[0].data.ranks.get({rank}).numbers")
            for name in ("communication", "hidden", "exposed", "compute", "launch_gap", "bubble"):
                assert numbers[f"{name}_ns"] == round(line[f"{name}_seconds"][rank] * 1e9), name

    async def past() -> None:
        async with looked_at(run) as (tab, _):
            await tab.until(DRAWN.format(step=steps))
            await check(tab)

    asyncio.run(training())
    asyncio.run(past())
