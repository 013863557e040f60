"""The site: `make docs`. Pages are the Markdown beside this file; _extensions writes what follows from declarations."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(Path(__file__).parent / "_extensions"), str(ROOT)]

import polyreme  # noqa: E402

project = "polyreme"
author = "the polyreme authors"
version = release = polyreme.__version__
html_title = "polyreme"

extensions = ["myst_nb", "page_order", "snippets", "reference"]
exclude_patterns = ["_extensions", "_static"]
nitpicky = False
# a type in a signature is a bare name, which two modules may have
suppress_warnings = ["ref.python"]

myst_enable_extensions = ["amsmath", "dollarmath", "fieldlist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the suite executes the notebooks; what they show is committed with them
nb_custom_formats = {}

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5c8a", "color-brand-content": "#0b5c8a"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}
# searched in the browser, from files too: no server and no external address
html_search_language = "en"
pygments_style = "friendly"
pygments_dark_style = "monokai"
python_maximum_signature_line_length = 100
add_module_names = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
