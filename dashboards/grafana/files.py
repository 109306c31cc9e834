"""The same as files: what Grafana reads when it starts (*provisioning*), without any token."""

import json
from pathlib import Path
from typing import Final

import yaml

from braid.dashboards.grafana import all_dashboards
from braid.dashboards.grafana.push import DATASOURCE_NAME, DATASOURCE_UID, GrafanaError, parse_url
from braid.dashboards.prometheus import RULES

_README: Final = """\
# Braid in Grafana

Made by `braid grafana export`; make it anew after an update of Braid.

| file | for |
| --- | --- |
| `provisioning/datasources/braid.yaml` | Grafana's data source, Prometheus at {prometheus} |
| `provisioning/dashboards/braid.yaml` | tells Grafana to read the dashboards of this folder |
| `dashboards/*.json` | *Overlap* and *Training*; can also be imported by hand |
| `prometheus/rules.yaml` | for `rule_files` of Prometheus: recording rules and alerts |

A Grafana of its own: start it with `GF_PATHS_PROVISIONING={folder}/provisioning`.

## Beside Ray's dashboard

Ray writes a configuration for Grafana into its session's folder. To have Ray's and Braid's dashboards in one
Grafana, copy both files of `provisioning` into the folders of the same names there:

    RAY_METRICS=/tmp/ray/session_latest/metrics
    cp -r {folder}/provisioning/. $RAY_METRICS/grafana/provisioning/
    grafana-server --config $RAY_METRICS/grafana/grafana.ini web

and start Ray's head node with these variables, so that Ray's pages find both servers:

| variable | value |
| --- | --- |
| `RAY_GRAFANA_HOST` | Grafana as the head node reaches it, such as `http://127.0.0.1:3000` |
| `RAY_GRAFANA_IFRAME_HOST` | Grafana as your browser reaches it, where that differs |
| `RAY_GRAFANA_ORG_ID` | Grafana's organisation, if it is not 1 |
| `RAY_PROMETHEUS_HOST` | Prometheus as the head node reaches it: {prometheus} |
| `RAY_PROMETHEUS_NAME` | name of the data source of Ray's own dashboards; `{name}` to share Braid's |

Ray's pages show Ray's own panels; Braid's dashboards are in the same Grafana, in the folder {grafana_folder}.
Ray's `grafana.ini` allows embedding and lets everybody look without a password: bind such a Grafana to an
address that only you reach. Prometheus must scrape Ray's agents: `$RAY_METRICS/prometheus/prometheus.yml` has
where they are; add `rule_files: [{folder}/prometheus/rules.yaml]` to it for recording rules and alerts.
"""


def export(folder: Path, prometheus_url: str, grafana_folder: str) -> list[Path]:
    """Write data source, dashboards, rules and a README to ``folder``; the files, in order.

    Raises `GrafanaError` where nothing can be written, or for a URL that is none.
    """
    parse_url(prometheus_url, "--prometheus-url")
    folder = folder.resolve()
    source = {
        "apiVersion": 1,
        "datasources": [
            {
                "name": DATASOURCE_NAME,
                "uid": DATASOURCE_UID,
                "type": "prometheus",
                "access": "proxy",
                "url": prometheus_url,
                "jsonData": {"httpMethod": "POST"},
            }
        ],
    }
    provider = {
        "apiVersion": 1,
        "providers": [
            {
                "name": "Braid",
                "folder": grafana_folder,
                "type": "file",
                "disableDeletion": False,
                "allowUiUpdates": False,
                "options": {"path": str(folder / "dashboards")},
            }
        ],
    }
    texts = {
        "provisioning/datasources/braid.yaml": yaml.safe_dump(source, sort_keys=False),
        "provisioning/dashboards/braid.yaml": yaml.safe_dump(provider, sort_keys=False),
        **{f"dashboards/{made['uid']}.json": json.dumps(made, indent=1) + "\n" for made in all_dashboards()},
        "prometheus/rules.yaml": RULES.read_text(encoding="utf-8"),
        "README.md": _README.format(
            folder=folder, prometheus=prometheus_url, name=DATASOURCE_NAME, grafana_folder=grafana_folder
        ),
    }
    written = []
    for name, text in texts.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise GrafanaError(f"DIR={folder}: cannot write {name}: {error.strerror}") from None
        written.append(path)
    return written
