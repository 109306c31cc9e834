"""The parts of Grafana's dashboard model that are used, written off by hand: other keys and types are errors.

It is our reading, and was compared with no Grafana. Sources, in the repository grafana/grafana:
``kinds/dashboard/dashboard_kind.cue`` (dashboard, panel, fields, thresholds, grid, variables, annotations,
links), ``panelcfg.cue`` of each panel under ``public/app/plugins/panel``, and
``packages/grafana-schema/src/common/mudball.cue`` (what panels share). The heatmap's own options are not
closed there; queries and annotations are as Grafana's own dashboards hold them.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Refuses keys that it does not know, and values of other types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class DataSourceRef(Strict):
    """``#DataSourceRef``."""

    type: Literal["prometheus"]
    uid: str = Field(min_length=1)


class GridPos(Strict):
    """``#GridPos``."""

    h: int = Field(gt=0)
    w: int = Field(gt=0, le=24)
    x: int = Field(ge=0, lt=24)
    y: int = Field(ge=0)


class Threshold(Strict):
    """``#Threshold``; the first one has no value (minus infinity)."""

    value: float | None
    color: str = Field(pattern=r"^#[0-9A-F]{6}$")


class Thresholds(Strict):
    """``#ThresholdsConfig``."""

    mode: Literal["absolute", "percentage"]
    steps: list[Threshold] = Field(min_length=1)


class Color(Strict):
    """``#FieldColor``."""

    mode: Literal["thresholds", "fixed", "shades"]
    fixedColor: str = Field(pattern=r"^#[0-9A-F]{6}$")  # noqa: N815


class Defaults(Strict):
    """``#FieldConfig``."""

    unit: str
    color: Color
    thresholds: Thresholds
    custom: dict[str, Any]
    min: float | None = None
    max: float | None = None


class Matcher(Strict):
    """``#MatcherConfig``."""

    id: Literal["byName", "byFrameRefID"]
    options: str


class Property(Strict):
    """``#DynamicConfigValue``."""

    id: Literal["color", "custom.lineStyle", "displayName", "unit"]
    value: Any


class Override(Strict):
    """An entry of ``#FieldConfigSource.overrides``."""

    matcher: Matcher
    properties: list[Property] = Field(min_length=1)


class FieldConfig(Strict):
    """``#FieldConfigSource``."""

    defaults: Defaults
    overrides: list[Override]


class LineStyle(Strict):
    """``LineStyle``."""

    fill: Literal["solid", "dash", "dot", "square"]
    dash: list[float] = []


class Scale(Strict):
    """``ScaleDistributionConfig``."""

    type: Literal["linear", "log", "ordinal", "symlog"]
    log: float | None = None


class Stacking(Strict):
    """``StackingConfig``."""

    mode: Literal["none", "normal", "percent"]
    group: str


class ThresholdsStyle(Strict):
    """``GraphThresholdsStyleConfig``."""

    mode: Literal["off", "line", "dashed", "area", "line+area", "dashed+area", "series"]


class GraphFieldConfig(Strict):
    """``GraphFieldConfig``: ``custom`` of a time series' fields."""

    drawStyle: Literal["line", "bars", "points"]  # noqa: N815
    lineWidth: float  # noqa: N815
    fillOpacity: float  # noqa: N815
    showPoints: Literal["auto", "never", "always"]  # noqa: N815
    spanNulls: bool | float  # noqa: N815
    scaleDistribution: Scale  # noqa: N815
    stacking: Stacking
    thresholdsStyle: ThresholdsStyle  # noqa: N815


class Legend(Strict):
    """``VizLegendOptions``."""

    displayMode: Literal["list", "table", "hidden"]  # noqa: N815
    placement: Literal["bottom", "right"]
    showLegend: bool  # noqa: N815
    calcs: list[str]


class Tooltip(Strict):
    """``VizTooltipOptions``."""

    mode: Literal["single", "multi", "none"]
    sort: Literal["asc", "desc", "none"]


class TimeseriesOptions(Strict):
    """``Options`` of the panel timeseries."""

    legend: Legend
    tooltip: Tooltip


class ReduceOptions(Strict):
    """``ReduceDataOptions``."""

    values: bool
    calcs: list[str]
    fields: str


class StatOptions(Strict):
    """``PanelOptions`` of the panel stat, with ``SingleStatBaseOptions``."""

    reduceOptions: ReduceOptions  # noqa: N815
    orientation: Literal["auto", "vertical", "horizontal"]
    graphMode: Literal["none", "line", "area"]  # noqa: N815
    colorMode: Literal["value", "background", "background_no_gradient", "none"]  # noqa: N815
    justifyMode: Literal["auto", "center"]  # noqa: N815
    textMode: Literal["auto", "value", "value_and_name", "name", "none"]  # noqa: N815


class TableOptions(Strict):
    """``PanelOptions`` of the panel table."""

    showHeader: bool  # noqa: N815


OPTIONS: dict[str, type[Strict]] = {
    "timeseries": TimeseriesOptions,
    "stat": StatOptions,
    "table": TableOptions,
}


class Target(Strict):
    """A query of the Prometheus data source."""

    refId: str = Field(pattern="^[A-Z]$")  # noqa: N815
    datasource: DataSourceRef
    editorMode: Literal["code", "builder"]  # noqa: N815
    expr: str = Field(min_length=1)
    legendFormat: str  # noqa: N815
    range: bool
    instant: bool
    format: Literal["time_series", "table", "heatmap"]


class Transformation(Strict):
    """``#DataTransformerConfig``."""

    id: Literal["merge", "organize"]
    options: dict[str, Any]


class Panel(Strict):
    """``#Panel``."""

    id: int = Field(gt=0)
    type: Literal["timeseries", "stat", "heatmap", "table"]
    title: str = Field(min_length=1)
    description: str = Field(min_length=1)
    datasource: DataSourceRef
    gridPos: GridPos  # noqa: N815
    targets: list[Target] = Field(min_length=1)
    fieldConfig: FieldConfig  # noqa: N815
    options: dict[str, Any]
    transformations: list[Transformation]
    transparent: bool

    @model_validator(mode="after")
    def _check_parts_of_its_kind(self) -> "Panel":
        if self.type in OPTIONS:
            OPTIONS[self.type].model_validate(self.options)
        if self.type == "timeseries":
            GraphFieldConfig.model_validate(self.fieldConfig.defaults.custom)
        for override in self.fieldConfig.overrides:
            for entry in override.properties:
                match entry.id:
                    case "color":
                        Color.model_validate(entry.value)
                    case "custom.lineStyle":
                        LineStyle.model_validate(entry.value)
                    case "displayName" | "unit":
                        assert isinstance(entry.value, str)
        return self


class VariableQuery(Strict):
    """The query of a variable, for the Prometheus data source."""

    query: str = Field(min_length=1)
    refId: str  # noqa: N815


class Variable(Strict):
    """``#VariableModel``, of the types query and datasource."""

    type: Literal["query", "datasource"]
    name: str = Field(pattern="^[a-z]+$")
    label: str
    query: VariableQuery | str
    datasource: DataSourceRef | None = None
    definition: str = ""
    refresh: Literal[0, 1, 2]
    sort: int = Field(default=0, ge=0, le=8)
    multi: bool
    includeAll: bool  # noqa: N815
    allValue: str | None = None  # noqa: N815
    current: dict[str, Any]
    options: list[Any]
    regex: str
    hide: Literal[0, 1, 2]
    skipUrlSync: bool  # noqa: N815


class Annotation(Strict):
    """``#AnnotationQuery`` with the fields of the Prometheus data source."""

    name: str
    datasource: DataSourceRef
    enable: bool
    hide: bool
    iconColor: str  # noqa: N815
    expr: str
    step: str = Field(pattern=r"^\d+[smh]$")
    titleFormat: str  # noqa: N815
    textFormat: str  # noqa: N815
    tagKeys: str  # noqa: N815
    useValueForTime: bool  # noqa: N815


class Link(Strict):
    """``#DashboardLink``."""

    title: str
    type: Literal["link", "dashboards"]
    icon: str
    tooltip: str
    url: str
    tags: list[str]
    asDropdown: bool  # noqa: N815
    targetBlank: bool  # noqa: N815
    includeVars: bool  # noqa: N815
    keepTime: bool  # noqa: N815


class TimeRange(Strict):
    """The field ``time``."""

    from_: str = Field(alias="from")
    to: str


class Templating(Strict):
    """The field ``templating``."""

    list: list[Variable]


class Annotations(Strict):
    """``#AnnotationContainer``."""

    list: list[Annotation]


class Dashboard(Strict):
    """``spec`` of the kind Dashboard."""

    id: int | None
    uid: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")
    title: str = Field(min_length=1)
    description: str
    tags: list[str]
    timezone: Literal["browser", "utc"]
    editable: bool
    graphTooltip: Literal[0, 1, 2]  # noqa: N815
    time: TimeRange
    refresh: str
    schemaVersion: int = Field(ge=36)  # noqa: N815
    links: list[Link]
    templating: Templating
    annotations: Annotations
    panels: list[Panel]


class DashboardBody(Strict):
    """Body of ``POST /api/dashboards/db`` (Grafana's HTTP interface, *Create / Update dashboard*)."""

    dashboard: Dashboard
    folderUid: str  # noqa: N815
    overwrite: bool
    message: str


class DataSourceBody(BaseModel):
    """Body of ``POST /api/datasources`` and ``PUT /api/datasources/uid/:uid``; it takes other keys."""

    model_config = ConfigDict(extra="allow", strict=True)

    uid: str
    name: str
    type: Literal["prometheus"]
    access: Literal["proxy", "direct"]
    url: str


class FolderBody(Strict):
    """Body of ``POST /api/folders``."""

    title: str = Field(min_length=1)
    uid: str | None = None
