"""Reads and writes what people read: records as YAML and JSON, patterns of layers, near misses of names.

`records.py` checks mappings against dataclasses, `yaml_text.py` and `json_text.py` are the two formats,
`pattern.py` knows the kinds of a model's layers, `suggestions.py` finds what a wrong name may have meant.
"""
