"""The picture of README: the report of a committed receipt, as Chromium shows it.

    python -m tests.browser.report_picture      # writes docs/report.png

The receipt is that of 1000 steps on 8 ranks. Shown are the verdict and the matrix; what was run,
which stands between them, is left out, so that both fit.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

from samestep.lab.stress.report import render
from tests.browser.chromium import open_page

ROOT = Path(__file__).parents[2]
RECEIPT = ROOT / "receipts" / "soak_8" / "receipt.json"
PICTURE = ROOT / "docs" / "report.png"
WIDTH = 1280
# All but the verdict and the matrix; gives where that ends.
LEAVE_OUT = """(() => {
    for (const section of document.querySelectorAll("section:not(#matrix)"))
        section.style.display = "none";
    const matrix = document.querySelector("table.matrix");
    return Math.ceil(matrix.getBoundingClientRect().bottom + scrollY) + 16;
})()"""


def main() -> int:
    executable = shutil.which("chromium")
    if executable is None:
        sys.stderr.write("error: there is no chromium: apt-get install chromium\n")
        return 2
    with tempfile.TemporaryDirectory() as folder, open_page(executable) as page:
        report = Path(folder) / "report.html"
        report.write_text(render(json.loads(RECEIPT.read_text())), encoding="utf-8")
        page.look(WIDTH)
        page.open(report)
        page.look(WIDTH, page.evaluate(LEAVE_OUT))
        page.screenshot(PICTURE, whole=False)
    Image.open(PICTURE).quantize(64).save(PICTURE, optimize=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
