"""`python -m train regenerate-data --config configs/X.yaml --out FILE.jsonl`: training data by its own backbone."""
