"""Taylor mode: derivatives of any order along directions, a rule for each primitive."""
