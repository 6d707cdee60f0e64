"""`python -m train regenerate-data --config configs/X.yaml --out FILE.jsonl`: its data as its backbone says it."""
