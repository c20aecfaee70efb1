"""How each linear layer of a model is quantized: its rules, read from JSON or made by an option."""
