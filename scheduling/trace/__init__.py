"""Spans, and the overlap numbers computed from them.

`spans.py` defines a span, `batches.py` a step's spans as Arrow records. `arrays.py` and `numbers.py` compute
hidden and exposed communication, bubbles and waiting (docs/design.md, Numbers of overlap). `svg.py` draws,
`compare.py` compares.
"""
