"""Write every table again."""

from benchmarks.tables import PAGES, rendered

for page in PAGES:
    page.write_text(rendered(page.read_text()))
