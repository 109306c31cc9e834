"""Models and clusters by name, every figure with its source.

`models.yaml` and `clusters.yaml` are the tables, `library.py` reads them; `architectures.py` and
`hugging_face.py` say what Hugging Face calls models, their sizes and their parameters.
"""
