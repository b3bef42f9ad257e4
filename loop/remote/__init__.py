"""Runs elsewhere: on a Ray cluster."""
