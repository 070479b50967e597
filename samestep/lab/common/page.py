"""Templates of pages of results, which all share one style sheet."""

from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


def templates(package: str, **options: Any) -> Environment:
    """Return the environment of a package's templates, which may include `style.css`."""
    loader = ChoiceLoader([PackageLoader(name, "") for name in (package, "samestep.lab.common")])
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, **options)
