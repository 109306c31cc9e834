"""Spans, and the numbers of overlap that are computed from them.

`spans.py`: what a span is. `batches.py`: a step's spans as Arrow records. `arrays.py` and `numbers.py`:
hidden and exposed communication, bubbles, waiting (docs/design.md, Numbers of overlap). `svg.py` draws,
`compare.py` compares.
"""
