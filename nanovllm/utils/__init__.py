"""What the rest leans on: argument checks, step context, weights, tokenizer, roofline."""
