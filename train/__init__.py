"""The application: trains heads (or a backbone) from one YAML file. Used from a checkout through train.py.

Every entry imports this file, so a missing `headway[train]` ends here, in one sentence and without a traceback.
"""

import sys

from heads.extras import MissingExtraError, needs_extra

try:
    with needs_extra("train", "Training"):
        import datasets  # noqa: F401
        import jsonargparse  # noqa: F401
        import rich  # noqa: F401
        import yaml  # noqa: F401
except MissingExtraError as error:
    sys.exit(f"error: {error}")
