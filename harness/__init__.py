"""What train.py stands on and an experiment does not change."""
