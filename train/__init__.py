"""The application: trains heads (or a backbone) from one YAML file. Used from a checkout through train.py."""
