"""Scripts with their own loops, which tests start as users start theirs."""
