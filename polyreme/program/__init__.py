"""Static programs: what they are made of, how code is recorded into them, and how they run."""
