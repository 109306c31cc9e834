"""Two Grafana dashboards as data, *Overlap* and *Training*, and the ways to a Grafana server."""

from braid.dashboards.grafana.overlap import overlap
from braid.dashboards.grafana.panels import Json
from braid.dashboards.grafana.training import training


def all_dashboards() -> tuple[Json, ...]:
    """Both dashboards as Grafana takes them."""
    return overlap(), training()
