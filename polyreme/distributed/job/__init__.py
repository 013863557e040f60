"""Health of a job: who is there, how far each process is, what ended it, and which rank is to blame."""
