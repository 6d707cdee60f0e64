"""The demo's backbone and heads, padded with zeros to the shapes, and so to the costs, of larger models."""
