"""Starts a local tritonserver on a model repository, for development and tests."""
