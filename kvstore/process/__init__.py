"""What every process does at its start and its end: flags, logs, signals, cores, model files."""
