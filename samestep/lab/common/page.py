"""Pages of results: templates of a package, in the one style of all of them."""

from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def templates(package: str, **options: Any) -> Environment:
    """The templates of a package, which may include `style.css` too."""
    loader = ChoiceLoader([PackageLoader(name, "") for name in (package, "samestep.lab.common")])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **options)
