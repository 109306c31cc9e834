"""Two Grafana dashboards, *Overlap* and *Training*, as files beside this module, and their export.

The dashboards use Grafana's classic model (schema version 39), which Grafana 10 to 13 read; no panel needs a
plug-in. Colours are those of Okabe and Ito (2008), which people with any colour vision can distinguish.
"""

import json
from pathlib import Path
from string import Template
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import yaml

Json = dict[str, Any]

_HERE: Final = Path(__file__).parent
RULES: Final = _HERE.parent / "prometheus" / "rules.yaml"
"""File of recording rules and alerts, for ``rule_files`` of a Prometheus configuration."""

_DASHBOARDS: Final = ("braid-overlap", "braid-training")
_EXPORTED: Final = {
    "provisioning/datasources/braid.yaml": _HERE / "datasource.yaml",
    "provisioning/dashboards/braid.yaml": _HERE / "provider.yaml",
    **{f"dashboards/{uid}.json": _HERE / f"{uid}.json" for uid in _DASHBOARDS},
    "prometheus/rules.yaml": RULES,
    "README.md": _HERE / "export.md",
}


def parse_url(url: str, key: str = "--url") -> SplitResult:
    """Parse ``http[s]://host[:port][/prefix]``; raise `ValueError` for anything else."""
    if "@" in url:  # not shown in the message, as it contains a secret
        raise ValueError(f"{key} holds a name or password; leave it out and give a token instead")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ValueError(f"{key}={url!r} is no URL of a server; write it like http://127.0.0.1:3000")
    return parts


def all_dashboards() -> list[Json]:
    return [json.loads((_HERE / f"{uid}.json").read_text(encoding="utf-8")) for uid in _DASHBOARDS]


def datasource(prometheus_url: str) -> Json:
    """Return the data source in Grafana's format. Raise `ValueError` if the URL is not valid."""
    parse_url(prometheus_url, "--prometheus-url")
    (source,) = yaml.safe_load(_filled(_HERE / "datasource.yaml", prometheus=prometheus_url))["datasources"]
    return dict(source)


def export(directory: Path, prometheus_url: str, folder: str) -> list[Path]:
    """Write provisioning files for Grafana, rules and a README to ``directory``; return the files.
    ``folder``: title of the dashboards' folder in Grafana. Raise `ValueError` if they cannot be written."""
    parse_url(prometheus_url, "--prometheus-url")
    directory = directory.resolve()
    values = {"directory": str(directory), "dashboards": f"{directory}/dashboards", "folder": folder}
    for name, source in _EXPORTED.items():
        text = _filled(source, prometheus=prometheus_url, **values)
        try:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"DIR={directory}: cannot write {name}: {error.strerror}") from None
    return [directory / name for name in _EXPORTED]


def _filled(source: Path, **values: str) -> str:
    """Return a file's text with its placeholders filled, quoted in YAML; Grafana's own variables stay."""
    quoted = {key: json.dumps(value) for key, value in values.items()} if source.suffix == ".yaml" else values
    return Template(source.read_text(encoding="utf-8")).safe_substitute(quoted)
