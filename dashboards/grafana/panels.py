"""What dashboards are made of: queries, panels, variables and annotations, as plain JSON values.

The form is Grafana's classic dashboard model (schema version 39), which Grafana 10 to 13 read. Panels are
``timeseries``, ``stat``, ``heatmap`` and ``table``; none needs a plug-in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

Json = dict[str, Any]

SCHEMA_VERSION: Final = 39
WIDTH: Final = 24
"""Columns of Grafana's grid."""

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
SKY: Final = "#56B4E9"
PURPLE: Final = "#CC79A7"
GREY: Final = "#8E8E8E"
COLOURS: Final = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)

DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
RUN: Final = 'run=~"$job"'
STAGES: Final = 'run=~"$job",stage=~"$stage"'


def series(name: str, matchers: str = RUN) -> str:
    """A selector for a metric under its own name and under the one that Ray's agents give it."""
    return f'{{__name__=~"(ray_)?{name}",{matchers}}}'


def of_run(name: str) -> str:
    """A metric of the run: one series, whatever labels the scrape added."""
    return f"max by (run) ({series(name)})"


def of_ranks(name: str) -> str:
    """A metric of the chosen stages' ranks."""
    return f"max by (stage, rank) ({series(name, STAGES)})"


def rate(name: str, matchers: str = STAGES) -> str:
    """What a counter of ranks grows by in a second, mean over the ranks."""
    return f"avg(rate({series(name, matchers)}[$__rate_interval]))"


def or_zero(expr: str, like: str) -> str:
    """An expression, and 0 for the series of ``like`` that it lacks: Ray shows no counter that is still 0."""
    return f"{expr} or {like} * 0"


@dataclass(frozen=True, kw_only=True)
class Query:
    """A PromQL expression, how its series are called, and their colour."""

    expr: str
    legend: str = ""
    colour: str = BLUE
    dashed: bool = False
    many: bool = False
    """Several series share the query: they get shades of its colour."""
    buckets: bool = False
    """The series are a histogram's buckets, counted from below."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: ``kind`` is Grafana's name of its type, ``unit`` Grafana's id of a unit.

    ``steps`` are thresholds, each the value from which a colour holds.
    """

    kind: str
    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    width: int = 12
    height: int = 8
    minimum: float | None = None
    maximum: float | None = None
    stacked: bool = False
    logarithmic: bool = False
    steps: tuple[tuple[float, str], ...] = ()
    columns: tuple[tuple[str, str, str], ...] = ()
    """Of a table: letter of the query, heading and unit."""


def _targets(panel: Panel) -> list[Json]:
    table = panel.kind == "table"
    return [
        {
            "refId": chr(ord("A") + number),
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "range": not table,
            "instant": table,
            "format": "table" if table else "heatmap" if query.buckets else "time_series",
        }
        for number, query in enumerate(panel.queries)
    ]


def _overrides(panel: Panel) -> list[Json]:
    if panel.kind == "table":
        return [
            {
                "matcher": {"id": "byName", "options": f"Value #{letter}"},
                "properties": [
                    {"id": "displayName", "value": heading},
                    {"id": "unit", "value": unit},
                ],
            }
            for letter, heading, unit in panel.columns
        ]
    if panel.kind != "timeseries":
        return []
    return [
        {
            "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + number)},
            "properties": [
                {
                    "id": "color",
                    "value": {"mode": "shades" if query.many else "fixed", "fixedColor": query.colour},
                },
                *(
                    [{"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}}]
                    if query.dashed
                    else []
                ),
            ],
        }
        for number, query in enumerate(panel.queries)
    ]


def _custom(panel: Panel) -> Json:
    if panel.kind == "timeseries":
        scale: Json = {"type": "log", "log": 10} if panel.logarithmic else {"type": "linear"}
        return {
            "drawStyle": "line",
            "lineWidth": 2,
            "fillOpacity": 40 if panel.stacked else 0,
            "showPoints": "auto",
            "spanNulls": False,
            "scaleDistribution": scale,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.steps else "off"},
        }
    if panel.kind == "heatmap":
        return {"hideFrom": {"legend": False, "tooltip": False, "viz": False}}
    return {}


def _options(panel: Panel) -> Json:
    match panel.kind:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "none"},
            }
        case "stat":
            return {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value" if panel.steps else "none",
                "graphMode": "area",
                "textMode": "auto",
                "justifyMode": "auto",
                "orientation": "auto",
            }
        case "heatmap":
            return {
                "calculate": False,
                # From dark to bright in one direction: read without telling red from green.
                "color": {"mode": "scheme", "scheme": "Cividis", "steps": 64, "reverse": False},
                "cellGap": 1,
                "filterValues": {"le": 1e-9},
                "yAxis": {"axisPlacement": "left", "unit": panel.unit},
                "tooltip": {"mode": "single", "yHistogram": False},
                "legend": {"show": True},
                "rowsFrame": {"layout": "auto"},
            }
        case "table":
            return {"showHeader": True}
    raise ValueError(f"panel kind {panel.kind!r} is not one of timeseries, stat, heatmap, table")


def _transformations(panel: Panel) -> list[Json]:
    if panel.kind != "table":
        return []
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}}},
    ]


def _panel(panel: Panel, number: int, x: int, y: int) -> Json:
    base = [{"value": None, "color": panel.steps[0][1] if panel.steps else BLUE}]
    defaults: Json = {
        "unit": panel.unit,
        "color": {"mode": "thresholds" if panel.steps else "fixed", "fixedColor": BLUE},
        "thresholds": {
            "mode": "absolute",
            "steps": base + [{"value": value, "color": colour} for value, colour in panel.steps[1:]],
        },
        "custom": _custom(panel),
    }
    for key, value in (("min", panel.minimum), ("max", panel.maximum)):
        if value is not None:
            defaults[key] = value
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "targets": _targets(panel),
        "fieldConfig": {"defaults": defaults, "overrides": _overrides(panel)},
        "options": _options(panel),
        "transformations": _transformations(panel),
        "transparent": False,
    }


def placed(panels: Sequence[Panel]) -> list[Json]:
    """The panels from left to right, in rows as high as their first panel."""
    found, x, y, height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > WIDTH:
            x, y = 0, y + height
        height = panel.height if x == 0 else height
        found.append(_panel(panel, number, x, y))
        x += panel.width
    return found


def _query_variable(name: str, label: str, query: str, *, many: bool) -> Json:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,  # at every change of the time range: runs come and go
        "sort": 3 if many else 1,
        "multi": many,
        "includeAll": many,
        "allValue": ".*" if many else None,
        "current": {"text": ["All"], "value": ["$__all"]} if many else {},
        "options": [],
        "regex": "",
        "hide": 0,
        "skipUrlSync": False,
    }


def variables() -> list[Json]:
    """Data source, job (one run at a time, so that a colour means one thing) and stages."""
    jobs = 'label_values({__name__=~"(ray_)?braid_step"}, run)'
    stages = f"label_values({series('braid_peak_memory_bytes')}, stage)"
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "multi": False,
        "includeAll": False,
        "current": {},
        "options": [],
        "regex": "",
        "hide": 0,
        "skipUrlSync": False,
    }
    return [
        source,
        _query_variable("job", "Job", jobs, many=False),
        _query_variable("stage", "Stage", stages, many=True),
    ]


def grew(name: str) -> str:
    """A counter's growth in the last minute, where there was some.

    Not ``increase``: that misses a counter which comes into being with its first event, as Ray's do.
    """
    now = of_run(name)
    before = f"max by (run) ({series(name)} offset 1m)"
    return f"({now} - ({before} or {now} * 0)) > 0"


def annotation(name: str, metric: str, colour: str, text: str) -> Json:
    """Marks on all panels, at the times at which a counter of events grew."""
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": colour,
        "expr": grew(metric),
        "step": "60s",
        "titleFormat": text,
        "textFormat": "{{run}}",
        "tagKeys": "run",
        "useValueForTime": False,
    }


TITLES: Final = {"braid-overlap": "Braid: Overlap", "braid-training": "Braid: Training"}
"""Titles of the dashboards, by uid."""


def dashboard(uid: str, description: str, panels: Sequence[Panel]) -> Json:
    """A whole dashboard, with links to the others."""
    links = [
        {
            "title": title,
            "type": "link",
            "icon": "dashboard",
            "tooltip": "",
            "url": f"/d/{other}",
            "tags": [],
            "asDropdown": False,
            "targetBlank": False,
            "includeVars": True,
            "keepTime": True,
        }
        for other, title in TITLES.items()
        if other != uid
    ]
    return {
        "id": None,
        "uid": uid,
        "title": TITLES[uid],
        "description": description,
        "tags": ["braid"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "links": links,
        "templating": {"list": variables()},
        "annotations": {
            "list": [
                annotation("Restarts", "braid_restarts_total", VERMILION, "Restarted"),
                annotation("Resizes", "braid_resizes_total", ORANGE, "Resized"),
            ]
        },
        "panels": placed(panels),
    }
