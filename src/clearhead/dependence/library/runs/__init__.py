"""Two runs that a finding compares: as calls, as sizes, and as a script."""
