"""Mechanisms of one kind, a file each: positions."""
