"""Startup: from options to an engine that can run."""
