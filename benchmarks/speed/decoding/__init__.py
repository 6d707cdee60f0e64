"""Decoding speed on the demo backbone, in settings that can be measured apart."""
