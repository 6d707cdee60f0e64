"""`python -m train plan --config configs/X.yaml`: what a run needs, before it starts. No weights are read."""
