"""Runs in a browser: their curves side by side, live, and what lies in their folders; nothing in them is changed.

`polyreme dash RUNS` serves it: records of a log as it grows (`log.py`), a run's folder (`run.py`, `pictures.py`),
endpoints (`app.py`), the process (`server.py`), and the page itself (`page/`).
"""
