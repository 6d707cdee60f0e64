"""`python -m train plan --config configs/X.yaml`: what a run needs, before it is started. Only shapes are loaded."""
