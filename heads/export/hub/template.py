"""custom_generate/generate.py of an exported folder, as it is copied there: decodes with the heads in heads/.

transformers puts `generate` in place of `model.generate` where the folder is opened with trust_remote_code=True. Plain
generation remains available as `type(model).generate(model, …)`.
"""

from typing import Any

try:
    from heads.export.hub.entry import generate_with_heads
except ImportError as error:
    raise ImportError(
        f"This folder decodes with Headway, which is not installed here in a version that can ({error}); install its "
        f"wheel, or open the folder without trust_remote_code to generate plainly."
    ) from error


def generate(*positional: Any, model: Any, **named: Any) -> Any:
    """`model.generate(*positional, **named)`, decoded with the heads in the model's folder."""
    return generate_with_heads(model, *positional, **named)
