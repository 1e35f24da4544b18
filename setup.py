"""The description for package indexes; everything else is in setup.cfg."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
# Links into the repository lead nowhere on an index: keep their text, and no pictures.
LINK = r"\[([^]]*)\]\((?!https?:)[^)]*\)"

setup(
    long_description=re.sub(LINK, r"\1", re.sub(f"!{LINK}\n*", "", README)),
    long_description_content_type="text/markdown",
)
