"""Read a step's inputs from the device table; guess and accept drafts."""
