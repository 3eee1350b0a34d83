"""Task accuracy: problems with checkable answers, run under several policies and budgets."""
