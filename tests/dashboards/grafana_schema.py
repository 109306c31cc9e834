"""The parts of Grafana's dashboard model that are used, written off by hand: other keys and types are errors.

It is our reading, and was compared with no Grafana. Sources, in the repository grafana/grafana:
``kinds/dashboard/dashboard_kind.cue`` (dashboard, panel, fields, thresholds, grid, variables, annotations,
links), ``panelcfg.cue`` of each panel under ``public/app/plugins/panel``, and
``packages/grafana-schema/src/common/mudball.cue`` (what panels share). Queries and annotations are as
Grafana's own dashboards hold them. Bodies of requests are those of Grafana's HTTP interface.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tests.strict_models import Count, Size, Text, each, matching, model, one_of, some

Column = Annotated[int, Field(ge=0, le=24)]
Colour = matching(r"^#[0-9A-F]{6}$")

DataSource = model(type=Literal["prometheus"], uid=Text)
Look = dict[str, Any]
"""What changes nothing but looks, and is not checked: lines, legends, colours of thresholds."""
Color = model(mode=one_of("thresholds fixed shades"), fixedColor=Colour)
Override = model(
    matcher=model(id=one_of("byName byFrameRefID"), options=str),
    properties=some(
        model(id=Literal["color"], value=Color)
        | model(id=one_of("displayName unit"), value=str)
        | model(id=Literal["custom.lineStyle"], value=Look)
    ),
)
Target = model(
    refId=matching("^[A-Z]$"),
    datasource=DataSource,
    editorMode=one_of("code builder"),
    expr=Text,
    legendFormat=str,
    format=one_of("time_series table heatmap"),
    **each(bool, "range instant"),
)
REDUCED = model(values=bool, calcs=list[str], fields=str)
STAT = model(ConfigDict(extra="allow", strict=True), reduceOptions=REDUCED)


def panel(kind: str) -> Any:
    ends = each(float | None, "min max")
    defaults = model(unit=str, color=Color, thresholds=Look, custom=Look, optional=ends)
    return model(
        id=Size,
        type=Literal[kind],
        datasource=DataSource,
        gridPos=model(h=Size, w=Size, x=Column, y=Count),
        targets=some(Target),
        fieldConfig=model(defaults=defaults, overrides=list[Override]),
        options=STAT if kind == "stat" else Look,
        transformations=list[model(id=one_of("merge organize"), options=dict[str, Any])],
        transparent=bool,
        **each(Text, "title description"),
    )


OF_VARIABLES = {
    "name": matching("^[a-z]+$"),
    **each(str, "label regex"),
    **each(bool, "multi includeAll skipUrlSync"),
    **each(Literal[0, 1, 2], "refresh hide"),
    "current": dict[str, Any],
    "options": list[Any],
}
Variable = model(type=Literal["datasource"], query=Text, **OF_VARIABLES) | model(
    type=Literal["query"],
    query=model(query=Text, refId=str),
    datasource=DataSource,
    definition=str,
    sort=Annotated[int, Field(ge=0, le=8)],
    allValue=str | None,
    **OF_VARIABLES,
)
Annotation = model(
    datasource=DataSource,
    step=matching(r"^\d+[smh]$"),
    **each(bool, "enable hide useValueForTime"),
    **each(str, "name iconColor expr titleFormat textFormat tagKeys"),
)
Link = model(
    type=one_of("link dashboards"),
    tags=list[str],
    **each(str, "title icon tooltip url"),
    **each(bool, "asDropdown targetBlank includeVars keepTime"),
)
Dashboard: type[BaseModel] = model(
    id=int | None,
    uid=matching(r"^[A-Za-z0-9_-]{1,40}$"),
    title=Text,
    tags=list[str],
    timezone=one_of("browser utc"),
    editable=bool,
    graphTooltip=Literal[0, 1, 2],
    time=dict[Literal["from", "to"], str],
    schemaVersion=Annotated[int, Field(ge=36)],
    links=list[Link],
    templating=model(list=list[Variable]),
    annotations=model(list=list[Annotation]),
    panels=list[panel("timeseries") | panel("stat") | panel("table") | panel("heatmap")],
    **each(str, "description refresh"),
)
DashboardBody = model(dashboard=Dashboard, overwrite=bool, **each(str, "folderUid message"))
DataSourceBody = model(
    ConfigDict(extra="allow", strict=True),
    type=Literal["prometheus"],
    access=one_of("proxy direct"),
    **each(str, "uid name url"),
)
FolderBody = model(title=Text, optional={"uid": str | None})
