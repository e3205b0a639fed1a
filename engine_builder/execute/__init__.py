"""Runs engines on a GPU: their outputs, their latency, their memory."""
