"""Helpers for all of the package: checks of values, described options, bars, deferred Ctrl-C."""
