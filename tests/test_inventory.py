"""Nothing that users can name goes missing unnoticed."""

import json

from tests.inventory import LISTED, inventory


def test_everything_is_still_there():
    """What was meant goes into the list: python -m tests.inventory > tests/inventory.json."""
    assert inventory() == json.loads(LISTED.read_text())
