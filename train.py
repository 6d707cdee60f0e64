"""Entry for `accelerate launch train.py --config configs/X.yaml`. `--help` explains every field."""

from train.run import main

if __name__ == "__main__":
    main()
