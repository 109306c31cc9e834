"""Data preparation: from files and tables to token shards."""
