"""`make bench`: what a served model's clients wait for: the scenarios, the verdicts, the report."""
