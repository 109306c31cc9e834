"""The processes of a run: its configuration, its controller, and a stage for every GPU."""
