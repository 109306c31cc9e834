"""What a person starts: the command line, configuration files, data preparation, benchmarks."""
