"""Dashboards against Grafana's schema; ``braid grafana push`` against a stub with a memory; exported files.

No Grafana server was at hand: the stub and the schema follow its documentation and sources.
"""

import json
import re
import socket
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import pytest
import yaml

from braid.dashboards.grafana import RULES, all_dashboards, parse_url
from braid.dashboards.grafana.push import read_token
from braid.dashboards.metrics import METRICS
from tests import in_process
from tests.dashboards.grafana_schema import Dashboard
from tests.dashboards.grafana_stub import TOKEN, Failure, State, grafana
from tests.in_process import Capture, called

Stub = tuple[str, State]

DASHBOARDS = {made["uid"]: made for made in all_dashboards()}
COLOURS = {"#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8E8E8E"}
"""Those that people with any colour vision tell apart (Okabe and Ito, 2008), and grey."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A server that takes the token in the environment."""
    pytest.importorskip("grafana_api", reason="grafana-api is not installed (pip install -e '.[dev]')")
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    with grafana() as made:
        yield made


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """``braid grafana ARGUMENTS``: exit code, output, errors; the token is in neither."""
    found = called(capsys, "grafana", *arguments)
    assert TOKEN not in found.output + found.errors
    return found.code, found.output, found.errors


def refused(capsys: Capture, *arguments: str) -> str:
    """The one line that a command says before it ends with exit code 2."""
    line = in_process.refused(called(capsys, "grafana", *arguments))
    assert line.count("\n") == 1
    assert TOKEN not in line
    return line


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """Every PromQL expression of a dashboard: panels, variables, annotations."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    found += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return found + [annotation["expr"] for annotation in dashboard["annotations"]["list"]]


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_dashboards_fit_the_schema(uid: str) -> None:
    made = DASHBOARDS[uid]
    Dashboard.model_validate(made)
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert set(re.findall(r"#[0-9A-Fa-f]{6}", json.dumps(made))) <= COLOURS
    assert [v["name"] for v in made["templating"]["list"]] == ["datasource", "job", "stage"]
    assert [a["name"] for a in made["annotations"]["list"]] == ["Restarts", "Resizes"]
    (link,) = made["links"]
    assert link["url"].removeprefix("/d/") in DASHBOARDS.keys() - {uid}
    cells = []
    for panel in made["panels"]:
        assert "".join(t["refId"] for t in panel["targets"]) == ascii_uppercase[: len(panel["targets"])]
        properties = [p for one in panel["fieldConfig"]["overrides"] for p in one["properties"]]
        colours = [p["value"]["fixedColor"] for p in properties if p["id"] == "color"]
        assert len(set(colours)) == len(colours), f"{panel['title']}: two series of one colour"
        place = panel["gridPos"]
        columns = range(place["x"], place["x"] + place["w"])
        assert columns.stop <= 24
        cells.append(set(product(columns, range(place["y"], place["y"] + place["h"]))))
    assert not any(a & b for a, b in combinations(cells, 2)), "panels cover each other"


def test_queries_and_rules_name_metrics_and_labels_that_exist() -> None:
    rules = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    shown = [expr for made in DASHBOARDS.values() for expr in expressions(made)]
    asked = set()
    for expr in rules + shown:
        selectors = re.findall(r'\{__name__=~"\(ray_\)\?(\w+)"((?:,\w+=~"[^"]*")*)\}', expr)
        assert len(selectors) == expr.count("braid_"), f"{expr}: every metric with Ray's prefix, too"
        for name, matchers in selectors:
            metric = METRICS[name.removesuffix("_bucket")]
            asked.add(metric.name)
            assert name.endswith("_bucket") == (metric.kind == "histogram")
            assert set(re.findall(r"(\w+)=~", matchers)) <= set(metric.labels), expr
            for group in re.findall(r"by \(([^)]*)\)", expr):
                assert set(group.split(", ")) <= {*metric.labels, "le"}, expr
            rated = re.search(rf'(rate|increase)\({{__name__=~"\(ray_\)\?{name}"', expr)
            assert not rated or metric.kind != "gauge", f"{expr}: a gauge has no rate"
    unasked = {"braid_generation", "braid_starts_total", "braid_telemetry_changes_total"}
    assert METRICS.keys() - asked == unasked, "metrics that nobody shows"


def test_push_creates_everything_and_again_changes_nothing(capsys: Capture, tmp_path: Path) -> None:
    """On a server below a path, with the token in a file."""
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with grafana(prefix="/grafana") as (url, state):
        command = ("push", "--url", f"{url}/", "--folder", "Our runs", "--prometheus-url", "http://prom:9090")
        command += ("--token-file", str(token))
        code, output, errors = run(capsys, *command)
        assert (code, errors) == (0, "")
        assert output.count("created") == 4
        (folder,) = state.folders.values()
        assert folder["title"] == "Our runs"
        assert state.datasources["braid-prometheus"]["url"] == "http://prom:9090"
        assert state.dashboards.keys() == DASHBOARDS.keys()
        assert {made["meta"]["folderUid"] for made in state.dashboards.values()} == {folder["uid"]}
        kept, state.asked = state.kept(), []
        code, output, _ = run(capsys, *command)
        assert code == 0
        assert output.count("as it should be") == 3
        assert state.kept() == kept
        assert state.writes == []


def test_push_restores_what_was_changed_and_leaves_the_rest(stub: Stub, capsys: Capture) -> None:
    url, state = stub
    state.folders["mine"] = {"uid": "mine", "title": "Braid", "version": 3}
    assert run(capsys, "push", "--url", url)[0] == 0
    assert state.folders.keys() == {"mine"}
    assert not [path for _, path in state.asked if "datasources" in path], "nobody gave Prometheus' address"
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
    assert state.dashboards["braid-training"]["meta"]["folderUid"] == "mine"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, '{"message": "Invalid API key"}', "401, the token is not accepted; make a new one"),
        (403, '{"message": "Access denied"}', "role Editor.*Access denied"),
        (404, "<html>nothing</html>", "404, there is no such page.*path"),
        (500, '{"message": "disk\\nfull"}', "500, look into Grafana's log.*disk full"),
        (200, "<html>Log in</html>", "not Grafana's JSON; is this Grafana"),
        (200, '"a word"', "not Grafana's JSON"),
        (400, f'{{"message": "what is {TOKEN}?"}}', r"what is \*\*\*\?"),
    ],
)
def test_errors_are_one_line_with_a_remedy(
    stub: Stub, capsys: Capture, status: int, body: str, says: str
) -> None:
    url, state = stub
    command = ("push", "--url", url, "--prometheus-url", "http://127.0.0.1:9090")
    for path, what in (("folders", "list folders"), ("dashboards/db", "write dashboard braid-overlap")):
        state.failure = Failure(f"/api/{path}", status, body)
        line = refused(capsys, *command)
        assert f"--url={url}: cannot {what}: " in line
        assert re.search(says, line), line
    state.failure = None
    assert run(capsys, *command)[0] == 0, "mended by the next push"
    assert (len(state.folders), len(state.datasources), len(state.dashboards)) == (1, 1, 2)


def test_a_server_that_does_not_answer(stub: Stub, capsys: Capture) -> None:
    url, state = stub
    state.failure = Failure("/api/folders", wait_seconds=60.0)
    assert "no answer (ReadTimeout)" in refused(capsys, "push", "--url", url, "--timeout", "0.2")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take the port meanwhile
        line = refused(capsys, "push", "--url", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert "no answer (ConnectionError); is Grafana running there" in line


NO_URLS = ("grafana:3000", "ftp://grafana", "http://", "http://grafana:99999", "http://grafana/?orgId=1")


@pytest.mark.parametrize("url", [*NO_URLS, "ftp://me:hunter2@grafana"])
def test_urls_that_are_none(url: str) -> None:
    says = "no URL of a server" if url in NO_URLS else "holds a name or password"
    with pytest.raises(ValueError, match=says) as error:
        parse_url(url)
    assert "hunter2" not in str(error.value)


def test_tokens_come_from_a_private_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert "No such option: --token" in refused(capsys, "push", "--url", "http://127.0.0.1:1", "--token", "x")
    file = tmp_path / "token"
    with pytest.raises(ValueError, match="No such file"):
        read_token(file)
    file.write_text("glsa_x\n")
    file.chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == "glsa_x"
    monkeypatch.setenv("GRAFANA_TOKEN", " glsa_y ")
    assert read_token(None) == "glsa_y"
    monkeypatch.delenv("GRAFANA_TOKEN")
    with pytest.raises(ValueError, match="GRAFANA_TOKEN is empty; set"):
        read_token(None)
    for text, says in (("", "is empty"), ("two words", "one word"), ("a\nb", "one word")):
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_token(file)


def test_export_writes_what_provisioning_reads(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "out"
    options = ("--prometheus-url", "http://prom:9090", "--folder", 'X: "y"')
    code, output, _ = run(capsys, "export", str(folder), *options)
    assert code == 0
    assert {Path(line) for line in output.split()} == {path for path in folder.rglob("*") if path.is_file()}
    (source,) = yaml.safe_load((folder / "provisioning/datasources/braid.yaml").read_text())["datasources"]
    assert (source["url"], source["uid"]) == ("http://prom:9090", "braid-prometheus")
    (provider,) = yaml.safe_load((folder / "provisioning/dashboards/braid.yaml").read_text())["providers"]
    assert provider["folder"] == 'X: "y"'
    found = [json.loads(path.read_text()) for path in Path(provider["options"]["path"]).glob("*.json")]
    assert {made["uid"]: made for made in found} == DASHBOARDS
    assert (folder / "prometheus/rules.yaml").read_bytes() == RULES.read_bytes()
    readme = (folder / "README.md").read_text()
    assert f"{folder}/prometheus/rules.yaml" in readme
    assert "${" not in readme
    line = refused(capsys, "export", str(folder / "README.md"))
    assert f"DIR={folder / 'README.md'}: cannot write provisioning" in line
