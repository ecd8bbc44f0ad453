"""The README's example is run as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    blocks = capsys.readouterr().out
    assert blocks.startswith("[ 0 ")


def test_every_page_of_the_documentation_is_listed():
    pages = {f"docs/{page.name}" for page in (README.parent / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text())) & pages
