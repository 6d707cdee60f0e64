"""The demo's text and acceptance at a larger model's price: its backbone and heads, zero-padded to larger shapes."""
