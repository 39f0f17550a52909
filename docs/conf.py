"""Sphinx settings."""

from lightning_swarm import __version__

project = "lightning-swarm"
author = "The lightning-swarm authors"
project_copyright = author
release = version = __version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "plots"]
html_theme = "alabaster"
html_theme_options = {"description": "LightningModules on machines that come and go", "page_width": "1080px"}
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
default_role = "code"
