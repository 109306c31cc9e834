"""Models and clusters by name, every figure with its source.

`models.yaml` and `clusters.yaml` are the tables, and `library.py` reads them; `architectures.py` and
`hugging_face.py` translate Hugging Face's names of models, sizes and parameters.
"""
