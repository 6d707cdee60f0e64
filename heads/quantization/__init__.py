"""Microscaling (MX) weights: 4, 6 or 8 bits an element, one power of two for each block of 32."""
