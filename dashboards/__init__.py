"""Reads run directories and shows them; imports nothing but `scheduling`.

`run_data.py` reads a run for pages, `frames.py` for Python, `server.py` and `page/` are the live page,
`report.py` the report, `timeline_picture.py` and `perfetto.py` draw traces, `metrics.py` names every metric,
`prometheus/` and `grafana/` have rules and dashboards as files.
"""
