"""Helpers for all of the package: checks of values, described options, deferred Ctrl-C."""
