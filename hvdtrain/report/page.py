"""The report pages: one self-contained HTML file each."""

from __future__ import annotations

from typing import Any

from hvdtrain.errors import UserError
from hvdtrain.report.figures import Figures
from hvdtrain.report.run import Run

_INSTALL = (
    "hvdtrain report needs {name}, which is not installed: pip install 'hvdtrain[report]', or take "
    "--format json, which needs nothing more"
)


def one(run: Run, figures: Figures) -> str:
    """Render the page of a run.

    Raises:
        UserError: matplotlib or jinja2 is not installed.
    """
    template = _template("run.html")
    from hvdtrain.report import plots, summary, tables

    return template.render(
        title=run.name,
        headline=summary.headline(figures),
        tiles=summary.tiles(figures),
        warnings=summary.warnings(figures),
        missing=run.missing,
        picture="\n".join(figures["layout"]["picture"]) if figures["layout"] else "",
        first=tables.first(figures),
        last=tables.last(run, figures),
        plots=plots.plots(run, figures),
    )


def two(a: Run, b: Run, figures: tuple[Figures, Figures]) -> str:
    """Render the page that compares two runs.

    Raises:
        UserError: as `one`.
    """
    template = _template("compare.html")
    from hvdtrain.report import compare, summary

    sides = [
        (letter, run, summary.headline(found))
        for letter, run, found in zip("AB", (a, b), figures, strict=True)
    ]
    return template.render(
        title=f"{a.name} and {b.name}",
        sides=sides,
        tables=[compare.table(*figures)],
        plots=compare.plots(a, b, figures),
    )


def _template(name: str) -> Any:
    try:
        import jinja2
        import matplotlib  # noqa: F401 - reports its absence before any work is done
    except ModuleNotFoundError as error:
        raise UserError(_INSTALL.format(name=error.name)) from None
    loader = jinja2.PackageLoader("hvdtrain.report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template(name)
