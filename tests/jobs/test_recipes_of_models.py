"""The recipes of known models: planned for the cluster that their page names, they fit and are as fast as it
says."""

from pathlib import Path

import pytest

from braid.actors.config import load_config
from braid.jobs.planning.work import make_plan, request
from tests.end_to_end.command import ROOT

FOLDER = ROOT / "jobs" / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "demo")
GIB = 2**30


def rows() -> dict[str, list[str]]:
    """Cells of the table in docs/clusters.md, by recipe."""
    lines = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8").splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    return {first.strip("`"): rest for first, *rest in cells if first.strip("`") in RECIPES}


def test_every_recipe_has_a_row_and_is_a_configuration() -> None:
    assert sorted(rows()) == RECIPES
    for name in RECIPES:
        config = load_config(FOLDER / f"{name}.yaml")
        assert config.layout().ranks == 8 * int(rows()[name][0])
        config.check(1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_and_is_as_fast_as_its_page_says(name: str) -> None:
    nodes, layout, schedule, gib, seconds, tokens, mfu = rows()[name]
    job = request(str(Path(FOLDER / f"{name}.yaml")), None, "h100", int(nodes))
    plan = make_plan(job)
    score, setting = plan.score, plan.setting
    assert score.peak_bytes < job.cluster.usable_bytes
    assert f"{job.cluster.usable_bytes / GIB:.1f}" == "72.5", "as the table's head says"
    assert setting.layout.describe() == layout
    assert f"{setting.schedule} ({setting.pipeline})" == schedule
    found = f"{score.peak_bytes / GIB:.1f}", f"{score.step_seconds:.3f}", f"{score.tokens_per_second:,.0f}"
    assert (*found, f"{100 * score.mfu:.1f} %") == (gib, seconds, tokens, mfu)
