"""What libraries say about a DeepSpeed engine that no user of a run can act on; it is not shown."""

from __future__ import annotations

import logging
import warnings

ACCUMULATION = "Gradient accumulation steps mismatch"
"""accelerate's: the Trainer tells it 1 on purpose, and DeepSpeed the true number, which is used."""
DEPRECATED = "`torch.distributed.all_gather_into_tensor` is deprecated"
"""torch's, about DeepSpeed's own code."""


def is_for_users(record: logging.LogRecord) -> bool:
    """A filter of log messages.

    >>> [is_for_users(logging.makeLogRecord({"msg": text})) for text in (f"{ACCUMULATION}: 1, 2", "Step 3 was skipped")]
    [False, True]
    """
    return ACCUMULATION not in record.getMessage()


def leave_out_deprecations() -> None:
    warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
