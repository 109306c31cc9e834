"""Read and write files for people: records as YAML and JSON, patterns of layers, near misses of names.

`records.py` converts mappings to dataclasses and back; `yaml_text.py` and `json_text.py` are formats;
`pattern.py` parses kinds of layers; `suggestions.py` finds the known name that a wrong name stands for.
"""
