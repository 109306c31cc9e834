"""Where ranks are and what they share.

`layout.py`: degrees of the axes dp, tp, pp, cp, ep and the chunks of each stage. `mesh.py`: ranks as
coordinates along factors, groups of ranks. `cluster.py`: GPUs, links and nodes. `topology.py`: which groups
stay inside a node. `partition.py`: how one collective is cut into stages over factors and into pieces.
"""
