"""Numeric hot spots: public functions, reference implementations, backends behind one dispatch."""
