"""Measures the page: ``python -m tests.dashboards.measure_page``. Tests never time; this prints times.

Redraws of everything with 256 simulated ranks, and the delay from a step's end to its numbers on the page
during a real run of two ranks.
"""

import asyncio
import tempfile
from pathlib import Path
from statistics import median, quantiles

from tests.dashboards.made_up_runs import made_up
from tests.dashboards.test_page import DRAWN, looked_at
from tests.end_to_end.command import start, write_config, write_corpus

REDRAWS = 40
REDRAW = """(async () => {
  braid.redrawAll();
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return braid.lastRedrawMs;
})()"""


async def redraws(run: Path) -> list[float]:
    """Milliseconds of script for redrawing all parts at once, the costliest case."""
    async with looked_at(run) as (tab, _):
        await tab.until(DRAWN.replace("{step}", "2"))
        return [float(await tab.evaluate(REDRAW)) for _ in range(REDRAWS)]


async def delays(folder: Path) -> list[float]:
    """Seconds from the end of a step to its numbers being drawn, while two ranks train."""
    write_corpus(folder)
    telemetry = {"progress": False, "page": False}
    model = {"hidden": 256, "sequence": 256}
    write_config(folder, train={"steps": 60}, parallel={"tp": 2}, telemetry=telemetry, model=model)
    process, run = start(folder, "train", "run.yaml"), folder / "runs" / "run"
    try:
        while not (run / "metrics.jsonl").exists():
            assert process.poll() is None, process.communicate()
            await asyncio.sleep(0.1)
        async with looked_at(run) as (tab, _):
            await tab.until(DRAWN.replace("{step}", "5"))
            while process.poll() is None:
                await asyncio.sleep(0.5)
            found = await tab.evaluate("braid.delays")
    finally:
        process.terminate()
        process.communicate()
    return [float(delay) for delay in found]


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        run = made_up(Path(folder) / "run", 256, 2)
        times = asyncio.run(redraws(run.path))
        print(
            f"redraw of everything, 256 ranks, ms: median {median(times):.1f}, "
            f"95 % {quantiles(times, n=20)[-1]:.1f}, most {max(times):.1f} ({len(times)} redraws)"
        )
        late = asyncio.run(delays(Path(folder)))
        print(f"step's end to page, s: median {median(late):.2f}, most {max(late):.2f} ({len(late)} steps)")


if __name__ == "__main__":
    main()
