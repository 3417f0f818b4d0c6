"""report.html: one page that tells a run from its values, with inline pictures and style, and nothing that runs or is fetched.

Called by `mem_core.core.run.run_report`, which gathers the values. Nothing here reads a file.
"""

REPORT_NAME = "report.html"
