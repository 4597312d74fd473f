"""Typed specs: base classes, registry, serialisation, overrides, errors."""
