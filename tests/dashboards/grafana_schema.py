"""The parts of Grafana's dashboard model that are used, written off by hand: other keys and types are errors.

It is our reading, and was compared with no Grafana. Sources, in the repository grafana/grafana:
``kinds/dashboard/dashboard_kind.cue`` (dashboard, panel, fields, thresholds, grid, variables, annotations,
links), ``panelcfg.cue`` of each panel under ``public/app/plugins/panel``, and
``packages/grafana-schema/src/common/mudball.cue`` (what panels share). The heatmap's own options are not
closed there; queries and annotations are as Grafana's own dashboards hold them. Bodies of requests are those
of Grafana's HTTP interface.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

STRICT = ConfigDict(extra="forbid", strict=True)


def model(config: ConfigDict = STRICT, optional: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A model with fields of these types; ``optional`` ones may be missing."""
    required = {name: (kind, ...) for name, kind in fields.items()}
    missing = {name: (kind, None) for name, kind in (optional or {}).items()}
    return create_model("Model", __config__=config, **required, **missing)


Text = Annotated[str, Field(min_length=1)]
Colour = Annotated[str, Field(pattern=r"^#[0-9A-F]{6}$")]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(gt=0)]
Column = Annotated[int, Field(ge=0, le=24)]
Hidden = Literal[0, 1, 2]


def some(kind: Any) -> Any:
    """A list that is not empty."""
    return Annotated[list[kind], Field(min_length=1)]


DataSource = model(type=Literal["prometheus"], uid=Text)
Color = model(mode=Literal["thresholds", "fixed", "shades"], fixedColor=Colour)
Thresholds = model(
    mode=Literal["absolute", "percentage"], steps=some(model(value=float | None, color=Colour))
)
LineStyle = model(fill=Literal["solid", "dash", "dot", "square"], dash=list[float])
Override = model(
    matcher=model(id=Literal["byName", "byFrameRefID"], options=str),
    properties=some(
        model(id=Literal["color"], value=Color)
        | model(id=Literal["custom.lineStyle"], value=LineStyle)
        | model(id=Literal["displayName", "unit"], value=str)
    ),
)
Target = model(
    refId=Annotated[str, Field(pattern="^[A-Z]$")],
    datasource=DataSource,
    editorMode=Literal["code", "builder"],
    expr=Text,
    legendFormat=str,
    range=bool,
    instant=bool,
    format=Literal["time_series", "table", "heatmap"],
)
CUSTOM = {
    "timeseries": model(
        drawStyle=Literal["line", "bars", "points"],
        lineWidth=float,
        fillOpacity=float,
        showPoints=Literal["auto", "never", "always"],
        spanNulls=bool | float,
        scaleDistribution=model(
            type=Literal["linear", "log", "ordinal", "symlog"], optional={"log": float | None}
        ),
        stacking=model(mode=Literal["none", "normal", "percent"], group=str),
        thresholdsStyle=model(mode=Literal["off", "line", "dashed", "area"]),
    ),
    "stat": model(),
    "table": model(),
    "heatmap": dict[str, Any],
}
OPTIONS = {
    "timeseries": model(
        legend=model(
            displayMode=Literal["list", "table", "hidden"],
            placement=Literal["bottom", "right"],
            showLegend=bool,
            calcs=list[str],
        ),
        tooltip=model(mode=Literal["single", "multi", "none"], sort=Literal["asc", "desc", "none"]),
    ),
    "stat": model(
        reduceOptions=model(values=bool, calcs=list[str], fields=str),
        orientation=Literal["auto", "vertical", "horizontal"],
        graphMode=Literal["none", "line", "area"],
        colorMode=Literal["value", "background", "background_no_gradient", "none"],
        justifyMode=Literal["auto", "center"],
        textMode=Literal["auto", "value", "value_and_name", "name", "none"],
    ),
    "table": model(showHeader=bool),
    "heatmap": dict[str, Any],
}


def panel(kind: str) -> Any:
    """A panel of a kind."""
    defaults = model(
        unit=str,
        color=Color,
        thresholds=Thresholds,
        custom=CUSTOM[kind],
        optional={"min": float | None, "max": float | None},
    )
    return model(
        id=Size,
        type=Literal[kind],
        title=Text,
        description=Text,
        datasource=DataSource,
        gridPos=model(h=Size, w=Size, x=Column, y=Count),
        targets=some(Target),
        fieldConfig=model(defaults=defaults, overrides=list[Override]),
        options=OPTIONS[kind],
        transformations=list[model(id=Literal["merge", "organize"], options=dict[str, Any])],
        transparent=bool,
    )


PANELS = panel("timeseries") | panel("stat") | panel("table") | panel("heatmap")
of_variables = {
    "name": Annotated[str, Field(pattern="^[a-z]+$")],
    "label": str,
    "refresh": Literal[0, 1, 2],
    "multi": bool,
    "includeAll": bool,
    "current": dict[str, Any],
    "options": list[Any],
    "regex": str,
    "hide": Hidden,
    "skipUrlSync": bool,
}
Variable = model(type=Literal["datasource"], query=Text, **of_variables) | model(
    type=Literal["query"],
    query=model(query=Text, refId=str),
    datasource=DataSource,
    definition=str,
    sort=Annotated[int, Field(ge=0, le=8)],
    allValue=str | None,
    **of_variables,
)
Annotation = model(
    name=str,
    datasource=DataSource,
    enable=bool,
    hide=bool,
    iconColor=str,
    expr=str,
    step=Annotated[str, Field(pattern=r"^\d+[smh]$")],
    titleFormat=str,
    textFormat=str,
    tagKeys=str,
    useValueForTime=bool,
)
Link = model(
    title=str,
    type=Literal["link", "dashboards"],
    icon=str,
    tooltip=str,
    url=str,
    tags=list[str],
    asDropdown=bool,
    targetBlank=bool,
    includeVars=bool,
    keepTime=bool,
)
Dashboard: type[BaseModel] = model(
    id=int | None,
    uid=Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")],
    title=Text,
    description=str,
    tags=list[str],
    timezone=Literal["browser", "utc"],
    editable=bool,
    graphTooltip=Literal[0, 1, 2],
    time=dict[Literal["from", "to"], str],
    refresh=str,
    schemaVersion=Annotated[int, Field(ge=36)],
    links=list[Link],
    templating=model(list=list[Variable]),
    annotations=model(list=list[Annotation]),
    panels=list[PANELS],
)
DashboardBody = model(dashboard=Dashboard, folderUid=str, overwrite=bool, message=str)
DataSourceBody = model(
    ConfigDict(extra="allow", strict=True),
    uid=str,
    name=str,
    type=Literal["prometheus"],
    access=Literal["proxy", "direct"],
    url=str,
)
FolderBody = model(title=Text, optional={"uid": str | None})
