"""What the rest of the package leans on: argument checks, step context, weight loading."""
