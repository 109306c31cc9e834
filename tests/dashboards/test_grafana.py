"""Dashboards against Grafana's schema; ``braid grafana push`` against a stub with a memory; exported files.

No Grafana server was at hand: the stub and the schema follow its documentation and sources.
"""

import json
import re
import socket
import threading
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from braid.dashboards.grafana import all_dashboards
from braid.dashboards.grafana.panels import COLOURS, Panel, Query, placed
from braid.dashboards.grafana.push import GrafanaError, parse_url, read_token
from braid.dashboards.metric_table import METRICS, Kind
from braid.dashboards.prometheus import RULES
from braid.jobs.cli import main
from tests.dashboards.grafana_schema import Dashboard
from tests.dashboards.grafana_stub import TOKEN, Failure, State, grafana
from tests.end_to_end.command import braid

Stub = tuple[str, State]

DASHBOARDS = {made["uid"]: made for made in all_dashboards()}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A server that takes the token in the environment."""
    pytest.importorskip("grafana_api", reason="grafana-api is not installed (pip install -e '.[dev]')")
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    with grafana() as made:
        yield made


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """``braid grafana ARGUMENTS``: exit code, output, errors; the token is in neither."""
    with pytest.raises(SystemExit) as end:
        main(["grafana", *arguments])
    output, errors = capsys.readouterr()
    assert TOKEN not in output + errors
    return int(end.value.code or 0), output, errors


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command says before it ends with exit code 2."""
    code, _, errors = run(capsys, *arguments)
    assert code == 2, errors
    assert errors.count("\n") == 1, errors
    assert errors.startswith("braid: ")
    return errors


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """Every PromQL expression of a dashboard: panels, variables, annotations."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return found + [annotation["expr"] for annotation in dashboard["annotations"]["list"]]


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_dashboards_fit_the_schema(uid: str) -> None:
    checked = Dashboard.model_validate(json.loads(json.dumps(DASHBOARDS[uid])))
    assert len({panel.id for panel in checked.panels}) == len(checked.panels)
    for panel in checked.panels:
        assert [t.refId for t in panel.targets] == [chr(ord("A") + n) for n in range(len(panel.targets))]
        values = [step.value for step in panel.fieldConfig.defaults.thresholds.steps]
        assert values[0] is None
        assert values[1:] == sorted(value for value in values[1:] if value is not None)


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_panels_do_not_cover_each_other_and_stay_on_the_grid(uid: str) -> None:
    cells = []
    for panel in DASHBOARDS[uid]["panels"]:
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        assert columns.stop <= 24
        cells.append(set(product(columns, range(place["y"], place["y"] + place["h"]))))
    assert not any(a & b for a, b in combinations(cells, 2))


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_queries_name_metrics_that_exist_with_and_without_rays_prefix(uid: str) -> None:
    kinds = {metric.name: metric.kind for metric in METRICS}
    for expr in expressions(DASHBOARDS[uid]):
        selectors = re.findall(r'\{__name__=~"([^"]*)"', expr)
        assert selectors
        assert len(selectors) == expr.count("braid_"), f"{expr}: every metric is matched by a pattern"
        for selector in selectors:
            assert selector.startswith("(ray_)?")
            name = selector.removeprefix("(ray_)?")
            kind = kinds[name.removesuffix("_bucket")]
            assert name.endswith("_bucket") == (kind is Kind.HISTOGRAM)
            rated = f'rate({{__name__=~"{selector}"' in expr
            assert not rated or kind is not Kind.GAUGE, f"{expr}: a gauge has no rate"


def test_every_metric_that_people_ask_for_is_on_a_dashboard() -> None:
    shown = " ".join(expr for made in DASHBOARDS.values() for expr in expressions(made))
    hidden = {metric.name for metric in METRICS if f'(ray_)?{metric.name}"' not in shown}
    assert hidden == {
        "braid_step_duration_seconds",  # as its buckets
        "braid_generation",
        "braid_starts_total",
        "braid_telemetry_changes_total",
    }


def test_colours_are_the_ones_that_everybody_can_tell_apart() -> None:
    for made in DASHBOARDS.values():
        assert set(re.findall(r"#[0-9A-Fa-f]{6}", json.dumps(made))) <= set(COLOURS)
        for panel in made["panels"]:
            fixed = [
                p["value"]["fixedColor"]
                for override in panel["fieldConfig"]["overrides"]
                for p in override["properties"]
                if p["id"] == "color"
            ]
            assert len(set(fixed)) == len(fixed), f"{panel['title']}: two series of one colour"


def test_both_dashboards_have_the_variables_and_marks() -> None:
    for made in DASHBOARDS.values():
        assert [v["name"] for v in made["templating"]["list"]] == ["datasource", "job", "stage"]
        assert [a["name"] for a in made["annotations"]["list"]] == ["Restarts", "Resizes"]
        (link,) = made["links"]
        assert link["url"].removeprefix("/d/") in DASHBOARDS.keys() - {made["uid"]}


def test_an_unknown_kind_of_panel_is_refused() -> None:
    with pytest.raises(ValueError, match="'graph' is not one of timeseries"):
        placed([Panel(kind="graph", title="t", description="d", queries=(Query(expr="up"),))])


def test_push_creates_everything_and_again_changes_nothing(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    url, state = stub
    command = ("push", "--url", url, "--folder", "Our runs", "--prometheus-url", "http://prom:9090")
    code, output, errors = run(capsys, *command)
    assert (code, errors) == (0, "")
    assert output.count("created") == 4
    (folder,) = state.folders.values()
    assert folder["title"] == "Our runs"
    assert state.datasources["braid-prometheus"]["url"] == "http://prom:9090"
    assert state.dashboards.keys() == DASHBOARDS.keys()
    for made in state.dashboards.values():
        assert made["meta"]["folderUid"] == folder["uid"]
    kept, state.asked = state.kept(), []
    code, output, _ = run(capsys, *command)
    assert code == 0
    assert output.count("as it should be") == 3
    assert state.kept() == kept
    assert state.writes == []


def test_push_restores_what_was_changed_and_leaves_the_rest(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    url, state = stub
    run(capsys, "push", "--url", url, "--prometheus-url", "http://old:9090")
    state.datasources["braid-prometheus"]["jsonData"] = {"timeInterval": "30s"}
    state.dashboards["braid-overlap"]["dashboard"]["panels"] = []
    state.dashboards["braid-training"]["meta"]["folderUid"] = "elsewhere"
    code, output, _ = run(capsys, "push", "--url", url, "--prometheus-url", "http://new:9090")
    assert code == 0
    assert output.count("updated") == 3
    source = state.datasources["braid-prometheus"]
    assert (source["url"], source["jsonData"]) == ("http://new:9090", {"timeInterval": "30s"})
    assert state.dashboards["braid-overlap"]["dashboard"]["panels"] == DASHBOARDS["braid-overlap"]["panels"]
    assert state.dashboards["braid-training"]["meta"]["folderUid"] == "f0"


def test_push_without_prometheus_leaves_data_sources_alone(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    url, state = stub
    assert run(capsys, "push", "--url", url)[0] == 0
    assert not [path for _, path in state.asked if "datasources" in path]


def test_push_uses_a_folder_that_is_there(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    url, state = stub
    state.folders["mine"] = {"id": 7, "uid": "mine", "title": "Braid", "version": 3}
    assert run(capsys, "push", "--url", url)[0] == 0
    assert state.folders.keys() == {"mine"}
    assert state.dashboards["braid-overlap"]["meta"]["folderUid"] == "mine"


def test_push_below_a_path_as_a_process_of_its_own(stub: Stub, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with grafana(prefix="/grafana") as (url, state):
        done = braid(tmp_path, "grafana", "push", "--url", f"{url}/", "--token-file", str(token))
    assert (done.code, done.errors) == (0, "")
    assert state.dashboards.keys() == DASHBOARDS.keys()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, '{"message": "Invalid API key"}', "401, the token is not accepted; make a new one"),
        (403, '{"message": "Access denied"}', "role Editor.*Access denied"),
        (404, '{"message": "Not found"}', "404, there is no such page.*path"),
        (404, "<html>nothing</html>", "404, there is no such page.*path"),
        (409, '{"message": "taken"}', "409, the name is taken; rename or remove"),
        (500, '{"message": "disk\\nfull"}', "500: disk full; look into Grafana's log"),
        (502, "<html>a message of nginx</html>", "not Grafana's JSON"),
        (200, "<html>Log in</html>", "not Grafana's JSON; is this Grafana"),
        (200, '"a word"', "not Grafana's JSON"),
        (200, "", "not Grafana's JSON"),
        (400, f'{{"message": "what is {TOKEN}?"}}', r"what is \*\*\*\?"),
    ],
)
@pytest.mark.parametrize("path", ["/api/folders", "/api/datasources", "/api/dashboards/db"])
@pytest.mark.slow
def test_errors_are_one_line_with_a_remedy(
    stub: Stub, capsys: pytest.CaptureFixture[str], path: str, status: int, body: str, says: str
) -> None:
    url, state = stub
    missing = status == 404 and body.startswith("{") and path == "/api/datasources"
    if missing:  # that one means that there is none yet; it may not be answered to the write
        state.failure = Failure(path, status, body)
        assert re.search(r"cannot create the data source: 404", refused(capsys, *_push(url)))
        return
    state.failure = Failure(path, status, body)
    line = refused(capsys, *_push(url))
    assert f"--url={url}: cannot " in line
    assert re.search(says, line), line
    assert "cannot list folders" in line if path == "/api/folders" else "folders" not in line


def _push(url: str) -> tuple[str, ...]:
    return ("push", "--url", url, "--prometheus-url", "http://127.0.0.1:9090")


def test_a_wrong_token_is_refused_by_the_server(
    stub: Stub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", "glsa_of_another_server")
    line = refused(capsys, "push", "--url", stub[0])
    assert "401, the token is not accepted" in line
    assert "glsa_of_another_server" not in line
    assert stub[1].writes == []


def test_a_failure_half_way_is_mended_by_the_next_push(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    url, state = stub
    state.failure = Failure("/api/dashboards/db", 500, '{"message": "no"}')
    refused(capsys, *_push(url))
    state.failure = None
    assert run(capsys, *_push(url))[0] == 0
    assert (len(state.folders), len(state.datasources), len(state.dashboards)) == (1, 1, 2)


def test_nobody_listens(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port meanwhile
        line = refused(capsys, "push", "--url", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert "connection refused; is Grafana running there?" in line


def test_a_server_that_does_not_answer(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    url, state = stub
    state.failure = Failure("/api/folders", wait_seconds=60.0)
    assert "no answer in 0.2 s" in refused(capsys, "push", "--url", url, "--timeout", "0.2")


def test_a_server_that_hangs_up(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        line = refused(capsys, "push", "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert "is Grafana running there?" in line


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("grafana:3000", "no URL of a server"),
        ("ftp://grafana", "no URL of a server"),
        ("http://", "no URL of a server"),
        ("http://grafana:99999", "is no URL"),
        ("http://me:hunter2@grafana", "holds a name or password"),
        ("http://grafana/?orgId=1", "no URL of a server"),
    ],
)
def test_urls_that_are_none(url: str, says: str) -> None:
    with pytest.raises(GrafanaError, match=says) as error:
        parse_url(url)
    assert "hunter2" not in str(error.value)


def test_urls_are_taken_apart() -> None:
    parts = parse_url("https://[::1]:3000/a/b/")
    assert (parts.protocol, parts.host, parts.port, parts.prefix) == ("https", "[::1]", 3000, "a/b/")


def test_tokens_come_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(GrafanaError, match="No such file"):
        read_token(file)
    file.write_text("glsa_x\n")
    file.chmod(0o640)
    with pytest.raises(GrafanaError, match="chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file, {}) == "glsa_x"
    assert read_token(None, {"GRAFANA_TOKEN": " glsa_y "}) == "glsa_y"
    with pytest.raises(GrafanaError, match="there is no token; set GRAFANA_TOKEN"):
        read_token(None, {})
    for text, says in (("", "is empty"), ("two words", "one word"), ("a\nb", "one word")):
        file.write_text(text)
        with pytest.raises(GrafanaError, match=says):
            read_token(file)


def test_no_option_takes_a_token_itself(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = run(capsys, "push", "--url", "http://127.0.0.1:1", "--token", "x")
    assert code == 2
    assert "has no option --token" in errors


def test_export_writes_what_provisioning_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    code, output, _ = run(
        capsys, "export", str(folder), "--prometheus-url", "http://prom:9090", "--folder", "X"
    )
    assert code == 0
    assert [Path(line) for line in output.split()] == [
        folder / name
        for name in (
            "provisioning/datasources/braid.yaml",
            "provisioning/dashboards/braid.yaml",
            "dashboards/braid-overlap.json",
            "dashboards/braid-training.json",
            "prometheus/rules.yaml",
            "README.md",
        )
    ]
    (source,) = yaml.safe_load((folder / "provisioning/datasources/braid.yaml").read_text())["datasources"]
    assert (source["url"], source["uid"]) == ("http://prom:9090", "braid-prometheus")
    (provider,) = yaml.safe_load((folder / "provisioning/dashboards/braid.yaml").read_text())["providers"]
    assert provider["folder"] == "X"
    found = {
        made["uid"]: made
        for made in (json.loads(p.read_text()) for p in Path(provider["options"]["path"]).glob("*.json"))
    }
    assert found == DASHBOARDS
    assert (folder / "prometheus/rules.yaml").read_bytes() == RULES.read_bytes()
    readme = (folder / "README.md").read_text()
    for name in ("RAY_GRAFANA_HOST", "RAY_PROMETHEUS_HOST", "RAY_GRAFANA_IFRAME_HOST", "RAY_PROMETHEUS_NAME"):
        assert name in readme


def test_variables_of_the_readme_are_rays() -> None:
    """Of the Ray that is installed: a renamed variable would make the README wrong."""
    metrics_head = pytest.importorskip("ray.dashboard.modules.metrics.metrics_head")
    assert metrics_head.GRAFANA_HOST_ENV_VAR == "RAY_GRAFANA_HOST"
    assert metrics_head.GRAFANA_IFRAME_HOST_ENV_VAR == "RAY_GRAFANA_IFRAME_HOST"
    assert metrics_head.GRAFANA_ORG_ID_ENV_VAR == "RAY_GRAFANA_ORG_ID"
    assert metrics_head.PROMETHEUS_HOST_ENV_VAR == "RAY_PROMETHEUS_HOST"
    assert metrics_head.PROMETHEUS_NAME_ENV_VAR == "RAY_PROMETHEUS_NAME"


def test_export_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capsys, "export", str(tmp_path / "file"))
    assert f"DIR={tmp_path / 'file'}: cannot write provisioning" in line


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("panels", 0, "type"), "graph"),
        (("panels", 0, "gridPos", "w"), 25),
        (("panels", 0, "targets", 0, "expression"), "up"),
        (("panels", 0, "options", "colorMode"), "red"),
        (("panels", 5, "fieldConfig", "defaults", "custom", "drawStyle"), "curve"),
        (("templating", "list", 0, "name"), 3),
        (("rows",), []),
    ],
)
def test_the_schema_refuses_what_grafana_does_not_know(place: tuple[Any, ...], value: Any) -> None:
    made = json.loads(json.dumps(DASHBOARDS["braid-overlap"]))
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValidationError):
        Dashboard.model_validate(made)
