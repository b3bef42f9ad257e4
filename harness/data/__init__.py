"""The data of an experiment, from text to batches and to the metric: one job a file."""
